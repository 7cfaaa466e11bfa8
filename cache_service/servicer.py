"""The cache service as gRPC sees it: decode, one call, encode.

No policy, no state and no status codes: refusals are raised and end the call in `status.py`.
"""

# ruff: noqa: N802 - the protocol names the methods
from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import Any

from mapflow.cache_service import wire
from mapflow.cache_service.arena import Arena
from mapflow.cache_service.calls import CallStreams
from mapflow.cache_service.config import Config
from mapflow.cache_service.core.cache import Cache
from mapflow.cache_service.core.device_tier import FIRST_ARENA_ID
from mapflow.cache_service.core.errors import InvalidRequest
from mapflow.cache_service.promoter import DeviceMemory
from mapflow.cache_service.session import SessionHub
from mapflow.cache_service.status import Observer
from mapflow.cache_service.transfer import Transfer
from mapflow.v1 import cache_pb2, cache_pb2_grpc
from mapflow.v1.version import __version__


class CacheServicer(cache_pb2_grpc.CacheServicer):
    """All calls of `mapflow.v1.Cache`."""

    def __init__(
        self,
        config: Config,
        cache: Cache,
        arena: Arena,
        sessions: SessionHub,
        boot_id: bytes,
        clock: Callable[[], float],
        memories: Sequence[DeviceMemory],
        promote: Callable[[], None],
        observe: Observer,
    ) -> None:
        """Put the calls on a cache.

        Args:
            memories: of the device arenas, in the order of their numbers.
            promote: called after whatever may have begun promotions.
            observe: told of every call on a Calls stream.
        """
        self._config = config
        self._cache = cache
        self._sessions = sessions
        self._transfer = Transfer(cache, arena, clock)
        self._boot_id = boot_id
        self._clock = clock
        self._arena = cache_pb2.Arena(id=wire.ARENA_ID, segment_name=arena.segment_name, num_bytes=arena.num_bytes)
        self._device_arenas = [
            wire.device_arena_message(arena_id, memory) for arena_id, memory in enumerate(memories, FIRST_ARENA_ID)
        ]
        self._promote = promote
        others: dict[str, Callable[[Any], None]] = {
            "release": self._release,
            "commit": self._commit,
            "abort": self._abort,
        }
        self.calls = CallStreams(self._lookup, self._reserve, others, observe)

    async def Handshake(self, request: cache_pb2.HandshakeRequest, context: Any) -> cache_pb2.HandshakeResponse:
        """Say who we are and what we allow."""
        self._cache.check_formats(request.format_versions)
        return cache_pb2.HandshakeResponse(
            server_version=__version__,
            boot_id=self._boot_id,
            arenas=[self._arena],
            session_timeout_s=self._config.session_timeout_s,
            max_lease_s=self._config.max_lease_s,
            max_keys=self._config.max_keys,
            max_blob_bytes=self._cache.max_blob_bytes,
            device_arenas=self._device_arenas,
        )

    async def Session(self, request_iterator: Any, context: Any) -> AsyncIterator[cache_pb2.SessionResponse]:
        """Keep a session for as long as the stream lasts."""
        async with aclosing(self._sessions.serve(aiter(request_iterator))) as responses:
            async for response in responses:
                yield response

    async def Calls(self, request_iterator: Any, context: Any) -> None:
        """Answer calls for as long as the stream lasts."""
        await self.calls.serve(context)

    async def Lookup(self, request: cache_pb2.LookupRequest, context: Any) -> cache_pb2.LookupResponse:
        """Find runs of chunks and lease them."""
        return self._lookup(request)

    def _lookup(self, request: cache_pb2.LookupRequest) -> cache_pb2.LookupResponse:
        keys = wire.split_keys(request.keys, request.key_bytes)
        wants = [wire.want(want) for want in request.wants]
        result = self._cache.lookup(
            request.session_id, keys, wants, request.lease_s, self._clock(), request.device_arena_id
        )
        self._promote()
        return wire.lookup_response(result)

    async def Reserve(self, request: cache_pb2.ReserveRequest, context: Any) -> cache_pb2.ReserveResponse:
        """Make room for blobs."""
        return self._reserve(request)

    def _reserve(self, request: cache_pb2.ReserveRequest) -> cache_pb2.ReserveResponse:
        kind, entries = wire.kind(request.kind), [wire.new_entry(entry) for entry in request.entries]
        answers = self._cache.reserve(request.session_id, kind, request.producer, entries, self._clock())
        return cache_pb2.ReserveResponse(reservations=map(wire.reservation_message, answers))

    async def Commit(self, request: cache_pb2.CommitRequest, context: Any) -> cache_pb2.CommitResponse:
        """Publish blobs."""
        self._commit(request)
        return cache_pb2.CommitResponse()

    def _commit(self, request: cache_pb2.CommitRequest) -> None:
        self._cache.commit(request.session_id, request.reservation_ids, self._clock())
        self._promote()

    async def Abort(self, request: cache_pb2.AbortRequest, context: Any) -> cache_pb2.AbortResponse:
        """Give room back."""
        self._abort(request)
        return cache_pb2.AbortResponse()

    def _abort(self, request: cache_pb2.AbortRequest) -> None:
        self._cache.abort(request.session_id, request.reservation_ids, self._clock())

    async def Release(self, request: cache_pb2.ReleaseRequest, context: Any) -> cache_pb2.ReleaseResponse:
        """End leases."""
        self._release(request)
        return cache_pb2.ReleaseResponse()

    def _release(self, request: cache_pb2.ReleaseRequest) -> None:
        self._cache.release(request.session_id, request.lease_ids, self._clock())

    async def Fetch(self, request: cache_pb2.FetchRequest, context: Any) -> AsyncIterator[cache_pb2.FetchResponse]:
        """Send the bytes of leased extents."""
        extents = [wire.extent(extent) for extent in request.extents]
        async with aclosing(self._transfer.fetch(request.session_id, request.lease_id, extents)) as pieces:
            async for index, data in pieces:
                yield cache_pb2.FetchResponse(index=index, data=data)

    async def Store(self, request_iterator: Any, context: Any) -> cache_pb2.StoreResponse:
        """Take one blob and publish it."""
        requests = aiter(request_iterator)
        first = await anext(requests, cache_pb2.StoreRequest())
        if not first.HasField("header"):
            raise InvalidRequest("the first message of a Store must be its header")
        header, pieces = first.header, _pieces(requests)
        kind, entry = wire.kind(header.kind), wire.new_entry(header.entry)
        state = await self._transfer.store(header.session_id, kind, header.producer, entry, pieces)
        self._promote()
        return cache_pb2.StoreResponse(state=wire.state_message(state))

    async def Stats(self, request: cache_pb2.StatsRequest, context: Any) -> cache_pb2.StatsResponse:
        """Report counters and gauges."""
        return wire.stats_message(
            self._cache.stats(self._clock()), self._cache.peers(), self._boot_id, self._arena, self._device_arenas
        )


async def _pieces(requests: AsyncIterator[cache_pb2.StoreRequest]) -> AsyncIterator[bytes]:
    async for request in requests:
        if not request.HasField("data"):
            raise InvalidRequest("a Store has one header, and data after it")
        yield request.data
