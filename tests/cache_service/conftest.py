"""Real clients, and a server in the test's own process.

`play(scenario)` runs `async def scenario(served)` against a new server; `served.client()` is a client of its own.
With `gpu_arena_bytes` it has device arenas in host memory, `served.memories`.
`connected(endpoint)` is a client with blocking calls, for the daemon as a process.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

from mapflow.cache_service.arena import Arena
from mapflow.cache_service.config import Config, Endpoint, GpuArena
from mapflow.cache_service.promoter import Pair
from mapflow.cache_service.server import CacheServer
from mapflow.v1 import cache_pb2, cache_pb2_grpc

A = "m@1/float32/tp0of1"
KEYS = [bytes([number]) * 16 for number in range(20)]
NAMESPACE = cache_pb2.Namespace(
    format_version=1,
    tokenizer_fingerprint="f00d",
    chunk_tokens=512,
    block=64,
    tenant="t",
    key_hash=cache_pb2.KEY_HASH_XXH3_128,
)


def open_message(producer: str = A, name: str = "test", device_arena_id: int = 0) -> cache_pb2.SessionRequest:
    """The first message of a session; with an empty producer it only reads."""
    message = cache_pb2.OpenSession(client_name=name, namespace=NAMESPACE, device_arena_id=device_arena_id)
    if producer:
        message.producer.CopyFrom(cache_pb2.Producer(id=producer, model=producer.rsplit("/", 2)[0]))
    return cache_pb2.SessionRequest(open=message)


class Client:
    """A channel with a stub, and the session that was opened on it."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.stub: Any = cache_pb2_grpc.CacheStub(channel)  # type: ignore[no-untyped-call]
        self.stream: Any = None
        self.session = 0

    async def open(self, producer: str = A, name: str = "test", device_arena_id: int = 0) -> cache_pb2.SessionOpened:
        """Open a session; with an empty producer it only reads."""
        self.stream = self.stub.Session()
        await self.stream.write(open_message(producer, name, device_arena_id))
        opened = (await self.receive()).opened
        assert isinstance(opened, cache_pb2.SessionOpened)
        self.session = opened.session_id
        return opened

    async def receive(self) -> cache_pb2.SessionResponse:
        """The next message of the stream."""
        response = await asyncio.wait_for(self.stream.read(), 10)
        assert isinstance(response, cache_pb2.SessionResponse), "the stream has ended"
        return response

    async def reserve(self, *chunks: int, num_bytes: int = 100) -> list[cache_pb2.Reservation]:
        """Room for chunks of the chain 0 -> 1 -> 2 ..."""
        entries = [
            cache_pb2.NewEntry(key=KEYS[c], parent_key=KEYS[c - 1] if c else b"", layer=0, num_bytes=num_bytes)
            for c in chunks
        ]
        request = cache_pb2.ReserveRequest(
            session_id=self.session, kind=cache_pb2.KIND_MAP, producer=A, entries=entries
        )
        return list((await self.stub.Reserve(request)).reservations)

    async def lookup(self, *chunks: int, lease_s: float = 0.0, device_arena_id: int = 0) -> cache_pb2.LookupResponse:
        """Runs of layer 0 of model m@1."""
        want = cache_pb2.Want(kind=cache_pb2.KIND_MAP, model="m@1", layers=[0])
        keys = b"".join(KEYS[chunk] for chunk in chunks)
        request = cache_pb2.LookupRequest(
            session_id=self.session,
            keys=keys,
            key_bytes=16,
            wants=[want],
            lease_s=lease_s,
            device_arena_id=device_arena_id,
        )
        response = await self.stub.Lookup(request)
        assert isinstance(response, cache_pb2.LookupResponse)
        return response

    @staticmethod
    def extents(hit: cache_pb2.Hit) -> list[cache_pb2.Extent]:
        """Of a run, chunk by chunk."""
        columns = zip(hit.extents.arena_ids, hit.extents.offsets, hit.extents.num_bytes, strict=True)
        return [cache_pb2.Extent(arena_id=a, offset=b, num_bytes=c) for a, b, c in columns]

    async def store(self, chunk: int, pieces: Iterable[bytes], num_bytes: int) -> cache_pb2.ReservationState:
        """One blob by Store."""
        entry = cache_pb2.NewEntry(key=KEYS[chunk], layer=0, num_bytes=num_bytes)
        header = cache_pb2.StoreHeader(session_id=self.session, kind=cache_pb2.KIND_MAP, producer=A, entry=entry)
        requests = [cache_pb2.StoreRequest(header=header), *(cache_pb2.StoreRequest(data=data) for data in pieces)]
        return (await self.stub.Store(iter(requests))).state  # type: ignore[no-any-return]

    async def fetch(self, lease_id: int, extents: Iterable[cache_pb2.Extent]) -> list[tuple[int, bytes]]:
        """Every piece of a Fetch."""
        request = cache_pb2.FetchRequest(session_id=self.session, lease_id=lease_id, extents=extents)
        return [(response.index, response.data) async for response in self.stub.Fetch(request)]

    async def stats(self) -> cache_pb2.StatsResponse:
        """Counters and gauges."""
        response = await self.stub.Stats(cache_pb2.StatsRequest())
        assert isinstance(response, cache_pb2.StatsResponse)
        return response


class FakeMemory:
    """A device arena in host memory, whose copies are real; `error` makes them fail, `gate` holds them up."""

    def __init__(self, arena: Arena, number: int, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.device_uuid = f"GPU-0000000{number}"
        self.handle = bytes([number]) * 64
        self.bytes = bytearray(b"\xee" * num_bytes)
        self.error: Exception | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.num_calls = 0
        self.busy = False
        self.closed = False
        self._arena = arena

    def copy_in(self, pairs: Sequence[Pair]) -> None:
        """Copy, or fail."""
        assert not self.closed
        self.busy = True
        self.num_calls += 1
        assert self.gate.wait(10)
        for source, target, num_bytes in pairs:
            self.bytes[target : target + num_bytes] = self._arena.read(source, num_bytes)
        assert len(self.bytes) == self.num_bytes
        self.busy = False
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        """Nobody copies any more."""
        assert not self.busy
        self.closed = True


class Served:
    """A server in this process, its arenas, and clients for it."""

    memories: Sequence[FakeMemory] = ()

    def __init__(self, server: CacheServer, arena: Arena, endpoint: Endpoint) -> None:
        self.server = server
        self.arena = arena
        self.endpoint = endpoint

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        """A client with a channel of its own."""
        async with grpc.aio.insecure_channel(str(self.endpoint)) as channel:
            yield Client(channel)

    @staticmethod
    async def until(condition: Callable[[], Awaitable[bool]]) -> None:
        """Wait for something that the server does in its own time."""
        async with asyncio.timeout(10):
            while not await condition():
                await asyncio.sleep(0.01)

    @staticmethod
    @asynccontextmanager
    async def refused(code: grpc.StatusCode, text: str) -> AsyncIterator[None]:
        """Expect a call to end with a status whose message contains a text."""
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            yield
        assert caught.value.code() == code
        assert text in caught.value.details()
        assert "\n" not in caught.value.details()


Scenario = Callable[[Served], Awaitable[None]]
Play = Callable[..., None]


@pytest.fixture
def play(socket_folder: Path, tmp_path: Path) -> Play:
    """`play(scenario, arena_bytes=..., endpoint=..., session_timeout_s=...)` runs a scenario against a new server."""

    async def serve(scenario: Scenario, config: Config) -> None:
        with Arena(config.arena_bytes, tmp_path) as arena:
            list(arena.allocate())
            memories = [FakeMemory(arena, number, gpu.num_bytes) for number, gpu in enumerate(config.gpu_arenas)]
            server = CacheServer(config, arena, memories)
            endpoint = await server.start()
            served = Served(server, arena, endpoint)
            served.memories = memories
            try:
                await asyncio.wait_for(scenario(served), 30)
            finally:
                await server.stop()
                for memory in memories:
                    memory.close()

    def play_it(
        scenario: Scenario,
        arena_bytes: int = 1 << 20,
        endpoint: Endpoint | None = None,
        session_timeout_s: float = 10.0,
        gpu_arena_bytes: Sequence[int] = (),
    ) -> None:
        endpoint = endpoint or Endpoint(path=str(socket_folder / "s"))
        asyncio.run(
            serve(
                scenario,
                Config(
                    endpoint=endpoint,
                    arena_bytes=arena_bytes,
                    session_timeout_s=session_timeout_s,
                    drain_s=0.2,
                    insecure_tcp=not endpoint.path,
                    gpu_arenas=tuple(GpuArena(device, size) for device, size in enumerate(gpu_arena_bytes)),
                ),
            )
        )

    return play_it


class BlockingClient:
    """A session over blocking stubs, with one blob published, leased, and another one reserved."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.stub: Any = cache_pb2_grpc.CacheStub(channel)  # type: ignore[no-untyped-call]
        self._stop = False
        self.stream = self.stub.Session(self._requests())
        self.session = next(self.stream).opened.session_id

    def _requests(self) -> Iterator[cache_pb2.SessionRequest]:
        yield open_message()
        while not self._stop:
            yield cache_pb2.SessionRequest(heartbeat=cache_pb2.Heartbeat())
            time.sleep(0.1)

    def close(self) -> None:
        """End the session."""
        self._stop = True
        with suppress(grpc.RpcError):
            for _ in self.stream:
                pass

    def publish(self, key: bytes = KEYS[0], data: bytes = b"blob") -> None:
        """Store one blob."""
        entry = cache_pb2.NewEntry(key=key, layer=0, num_bytes=len(data))
        header = cache_pb2.StoreHeader(session_id=self.session, kind=cache_pb2.KIND_MAP, producer=A, entry=entry)
        requests = [cache_pb2.StoreRequest(header=header), cache_pb2.StoreRequest(data=data)]
        assert self.stub.Store(iter(requests)).state == cache_pb2.RESERVATION_STATE_RESERVED

    def lookup(self, key: bytes = KEYS[0], lease_s: float = 30.0) -> cache_pb2.LookupResponse:
        """Look one blob up."""
        want = cache_pb2.Want(kind=cache_pb2.KIND_MAP, model="m@1", layers=[0])
        request = cache_pb2.LookupRequest(
            session_id=self.session, keys=key, key_bytes=16, wants=[want], lease_s=lease_s
        )
        response = self.stub.Lookup(request)
        assert isinstance(response, cache_pb2.LookupResponse)
        return response

    def reserve(self, key: bytes) -> cache_pb2.Reservation:
        """Ask for room for one blob."""
        entry = cache_pb2.NewEntry(key=key, layer=0, num_bytes=100)
        request = cache_pb2.ReserveRequest(
            session_id=self.session, kind=cache_pb2.KIND_MAP, producer=A, entries=[entry]
        )
        (reservation,) = self.stub.Reserve(request).reservations
        assert isinstance(reservation, cache_pb2.Reservation)
        return reservation


@contextmanager
def connect(endpoint: str) -> Iterator[BlockingClient]:
    """A client with an open session."""
    with grpc.insecure_channel(endpoint) as channel:
        client = BlockingClient(channel)
        try:
            yield client
        finally:
            client.close()


@pytest.fixture
def connected() -> Callable[[str], AbstractContextManager[BlockingClient]]:
    """`with connected(endpoint) as client:` opens a session and ends it."""
    return connect
