"""One process that asks: `python service_load.py SYSTEM ENDPOINT`, commands as in `service_loops.serve`.

SYSTEM: "bare unary" or "bare stream" (`service_bare.py`), or "mapflow", by the client that engines use.
"""

from __future__ import annotations

import queue
import sys
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # PYTHONSAFEPATH, which this project runs with, leaves it out

import grpc
from service_bare import SERVICE
from service_loops import Submit, serve

from mapflow.connector.client import Client
from mapflow.connector.client_config import ClientConfig
from mapflow.connector.messages import Kind, Lease, LookupResult, NewEntry, PendingBlob, Producer, Want
from mapflow.connector.namespace import Namespace
from mapflow.v1 import cache_pb2

CHAIN_CHUNKS = (1, 64, 1024)
MODEL = "bench@1"
_DEADLINE_S = 10.0


def lookup_request(count: int) -> cache_pb2.LookupRequest:
    """What an engine asks, of so many keys."""
    wants = [cache_pb2.Want(kind=cache_pb2.KIND_MAP, model=MODEL, layers=[0])]
    return cache_pb2.LookupRequest(session_id=1, keys=bytes(16 * count), key_bytes=16, wants=wants, lease_s=10.0)


class BareStream:
    """Look-ups of one size on a stream of their own, answered in order."""

    def __init__(self, channel: grpc.Channel, count: int) -> None:
        self._request = lookup_request(count)
        self._outbox: queue.SimpleQueue[cache_pb2.LookupRequest] = queue.SimpleQueue()
        self._pending: deque[Future[Any]] = deque()
        self._channel = channel
        threading.Thread(target=self._receive, daemon=True).start()

    def submit(self, number: int) -> Future[Any]:
        """Send one."""
        future: Future[Any] = Future()
        self._pending.append(future)
        self._outbox.put(self._request)
        return future

    def _requests(self) -> Iterator[cache_pb2.LookupRequest]:
        while True:
            yield self._outbox.get()

    def _receive(self) -> None:
        call = self._channel.stream_stream(
            f"/{SERVICE}/Stream",
            request_serializer=cache_pb2.LookupRequest.SerializeToString,
            response_deserializer=cache_pb2.LookupResponse.FromString,
            _registered_method=False,
        )
        for answer in call(self._requests()):
            self._pending.popleft().set_result(answer)


def bare(system: str, endpoint: str) -> Mapping[str, Submit]:
    """Look-ups that find no cache behind them."""
    channel = grpc.insecure_channel(endpoint, [("grpc.use_local_subchannel_pool", 1)])
    grpc.channel_ready_future(channel).result(_DEADLINE_S)
    if system == "bare stream":
        return {f"lookup {count}": BareStream(channel, count).submit for count in CHAIN_CHUNKS}
    call = channel.unary_unary(
        f"/{SERVICE}/Unary",
        request_serializer=cache_pb2.LookupRequest.SerializeToString,
        response_deserializer=cache_pb2.LookupResponse.FromString,
        _registered_method=False,
    )
    requests = {count: lookup_request(count) for count in CHAIN_CHUNKS}
    return {
        f"lookup {count}": lambda number, one=one: call.future(one, timeout=_DEADLINE_S)  # type: ignore[misc]
        for count, one in requests.items()
    }


class MapFlow:
    """The daemon as engines ask it; publishes the chains that it looks up."""

    def __init__(self, endpoint: str) -> None:
        self._namespace = Namespace(tokenizer_fingerprint="0" * 32, chunk_tokens=64, block=64)
        self._producer = Producer.of(MODEL, "bfloat16")
        self._client = Client(
            ClientConfig(
                endpoint=endpoint,
                client_name="benchmark",
                namespace=self._namespace,
                producer=self._producer,
                call_deadline_s=_DEADLINE_S,
                transfer_deadline_s=_DEADLINE_S,
            )
        )
        self._client.start()
        if not self._client.wait_connected(_DEADLINE_S):
            raise RuntimeError(f"no session with {endpoint}")
        self._chain = self._namespace.chunk_keys(range(64 * max(CHAIN_CHUNKS)))
        self._hashing, self._tokens = replace(self._namespace, chunk_tokens=256), list(range(64 * 256))
        self._lookup_64 = self._lookup_of(64)
        self._leases: list[Lease] = []
        self._published = 0
        blobs = [
            PendingBlob(key=key, parent_key=before, layer=0, num_bytes=64, write=len)
            for before, key in zip([b"", *self._chain], self._chain)
        ]
        self._client.publish(Kind.MAP, self._producer.id, blobs)

    def operations(self) -> Mapping[str, Submit]:
        """Look-ups with a lease; of tokens that are hashed first, or with the lease given back; one new chunk."""
        looks = {f"lookup {count}": self._lookup_of(count) for count in CHAIN_CHUNKS}
        return {
            **looks,
            "hash and lookup 64": self._hash_and_lookup,
            "lookup and release 64": self._cycle,
            "reserve and commit": self._publish_one,
        }

    def release(self) -> None:
        """Give back what look-ups leased."""
        leases, self._leases = self._leases, []
        self._client.release(leases)

    def _lookup_of(self, count: int) -> Submit:
        keys, wants = self._chain[:count], [Want(model=MODEL, layers=(0,))]

        def submit(number: int) -> Future[Any]:
            future = self._client.lookup(keys, wants, 60.0)
            future.add_done_callback(self._keep)
            return future

        return submit

    def _hash_and_lookup(self, number: int) -> Future[Any]:
        """Of a prompt of as many tokens as `service_lmcache.py` asks for; its chain is not the published one."""
        self._hashing.chunk_keys(self._tokens)
        return self._lookup_64(number)

    def _keep(self, done: Future[LookupResult]) -> None:
        if done.exception() is None and (lease := done.result().lease) is not None:
            self._leases.append(lease)

    def _cycle(self, number: int) -> Future[Any]:
        future = self._client.lookup(self._chain[:64], [Want(model=MODEL, layers=(0,))], 60.0)
        future.add_done_callback(lambda done: self._client.release([done.result().lease]))
        return future

    def _publish_one(self, number: int) -> Future[Any]:
        self._published += 1
        future: Future[Any] = Future()
        try:
            reservations = self._client.reserve(Kind.MAP, self._producer.id, [self._entry(self._published)])
            self._client.commit(reservations)
            future.set_result(None)
        except Exception as error:
            future.set_exception(error)
        return future

    def _entry(self, number: int) -> NewEntry:
        return NewEntry(key=number.to_bytes(16, "big"), parent_key=b"", layer=0, num_bytes=4096)


def main() -> None:
    """Connect, and answer commands."""
    _, system, endpoint = sys.argv
    if system == "mapflow":
        one = MapFlow(endpoint)
        serve(one.operations(), one.release)
    else:
        serve(bare(system, endpoint))


if __name__ == "__main__":
    main()
