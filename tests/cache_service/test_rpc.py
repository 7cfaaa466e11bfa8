"""Every call over a real socket: the server in this process, a real client stub, a temporary Unix socket."""

from __future__ import annotations

import asyncio
import stat
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from mapflow.cache_service.arena import Arena
from mapflow.cache_service.config import Config, Endpoint
from mapflow.cache_service.core import errors
from mapflow.cache_service.server import CacheServer
from mapflow.cache_service.status import status_code
from mapflow.cache_service.transfer import PIECE_BYTES
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
INTERESTS = cache_pb2.InterestSet(
    interests=[
        cache_pb2.Interest(
            namespace=NAMESPACE,
            model="m@1",
            layers=[
                cache_pb2.LayerInterest(layer=3, heads=[0, 5], tile_top_p=0.5, tile_dtype=cache_pb2.TILE_DTYPE_E4M3)
            ],
        )
    ]
)


class Client:
    """A channel with a stub, and the session that was opened on it."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.stub: Any = cache_pb2_grpc.CacheStub(channel)  # type: ignore[no-untyped-call]
        self.stream: Any = None
        self.session = 0

    async def open(self, producer: str = A, name: str = "test") -> cache_pb2.SessionOpened:
        """Open a session; with an empty producer it only reads."""
        message = cache_pb2.OpenSession(client_name=name, namespace=NAMESPACE)
        if producer:
            message.producer.CopyFrom(cache_pb2.Producer(id=producer, model=producer.rsplit("/", 2)[0]))
        self.stream = self.stub.Session()
        await self.stream.write(cache_pb2.SessionRequest(open=message))
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

    async def lookup(self, *chunks: int, lease_s: float = 0.0) -> cache_pb2.LookupResponse:
        """Runs of layer 0 of model m@1."""
        want = cache_pb2.Want(kind=cache_pb2.KIND_MAP, model="m@1", layers=[0])
        keys = b"".join(KEYS[chunk] for chunk in chunks)
        request = cache_pb2.LookupRequest(
            session_id=self.session, keys=keys, key_bytes=16, wants=[want], lease_s=lease_s
        )
        response = await self.stub.Lookup(request)
        assert isinstance(response, cache_pb2.LookupResponse)
        return response

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


class Served:
    """A server in this process, its arena, and clients for it."""

    def __init__(self, server: CacheServer, arena: Arena, endpoint: Endpoint) -> None:
        self.server = server
        self.arena = arena
        self.endpoint = endpoint

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        """A client with a channel of its own."""
        async with grpc.aio.insecure_channel(str(self.endpoint)) as channel:
            yield Client(channel)


Scenario = Callable[[Served], Awaitable[None]]
Play = Callable[..., None]


@pytest.fixture
def play(socket_folder: Path, tmp_path: Path) -> Play:
    """`play(scenario, arena_bytes=..., endpoint=..., session_timeout_s=...)` runs a scenario against a new server."""

    async def serve(scenario: Scenario, config: Config) -> None:
        with Arena(config.arena_bytes, tmp_path) as arena:
            list(arena.allocate())
            server = CacheServer(config, arena)
            endpoint = await server.start()
            try:
                await asyncio.wait_for(scenario(Served(server, arena, endpoint)), 30)
            finally:
                await server.stop()

    def play_it(
        scenario: Scenario,
        arena_bytes: int = 1 << 20,
        endpoint: Endpoint | None = None,
        session_timeout_s: float = 10.0,
    ) -> None:
        endpoint = endpoint or Endpoint(path=str(socket_folder / "s"))
        asyncio.run(
            serve(
                scenario,
                Config(endpoint=endpoint, arena_bytes=arena_bytes, session_timeout_s=session_timeout_s, drain_s=0.2),
            )
        )

    return play_it


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Wait for something that the server does in its own time."""
    async with asyncio.timeout(10):
        while not await condition():
            await asyncio.sleep(0.01)


@asynccontextmanager
async def refused(code: grpc.StatusCode, text: str) -> AsyncIterator[None]:
    """Expect a call to end with a status whose message contains a text."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        yield
    assert caught.value.code() == code
    assert text in caught.value.details()
    assert "\n" not in caught.value.details()


def test_handshake_says_what_is_there(play: Play) -> None:
    async def scenario(served: Served) -> None:
        async with served.client() as client:
            answer = await client.stub.Handshake(cache_pb2.HandshakeRequest(format_versions=[1]))
            assert len(answer.boot_id) == 16
            assert [(a.segment_name, a.num_bytes) for a in answer.arenas] == [(served.arena.segment_name, 1 << 20)]
            assert (answer.session_timeout_s, answer.max_lease_s, answer.max_keys) == (10.0, 60.0, 4096)
            assert answer.max_blob_bytes == 1 << 20
            opened = await client.open()
            assert opened.boot_id == answer.boot_id
            async with refused(grpc.StatusCode.FAILED_PRECONDITION, "[99]"):
                await client.stub.Handshake(cache_pb2.HandshakeRequest(format_versions=[99]))

    play(scenario)


def test_a_blob_written_in_place_is_found_and_read_in_place(play: Play) -> None:
    async def scenario(served: Served) -> None:
        async with served.client() as writer, served.client() as reader:
            await writer.open()
            await reader.open(producer="")
            reservations = await writer.reserve(0, 1)
            for number, reservation in enumerate(reservations):
                assert reservation.state == cache_pb2.RESERVATION_STATE_RESERVED
                assert (reservation.extent.arena_id, reservation.extent.num_bytes) == (1, 100)
                served.arena.write(reservation.extent.offset, bytes([number]) * 100)
            ids = [reservation.reservation_id for reservation in reservations]
            await writer.stub.Commit(cache_pb2.CommitRequest(session_id=writer.session, reservation_ids=ids))
            found = await reader.lookup(0, 1, 2, lease_s=5.0)
            (hit,) = found.hits
            assert (hit.want, hit.producer, hit.num_chunks) == (0, A, 2)
            assert list(hit.extents) == [reservation.extent for reservation in reservations]
            assert [served.arena.read(e.offset, e.num_bytes) for e in hit.extents] == [b"\0" * 100, b"\1" * 100]
            release = cache_pb2.ReleaseRequest(session_id=reader.session, lease_ids=[found.lease_id])
            await reader.stub.Release(release)
            await reader.stub.Release(release)
            assert (await reader.stats()).num_leases == 0

    play(scenario)


def test_a_look_takes_no_lease_and_names_no_extents(play: Play) -> None:
    async def scenario(served: Served) -> None:
        async with served.client() as client:
            await client.open()
            await client.store(0, [b"x"], 1)
            found = await client.lookup(0)
            assert (found.lease_id, found.hits[0].num_chunks, len(found.hits[0].extents)) == (0, 1, 0)

    play(scenario)


def test_store_and_fetch_carry_bytes_in_pieces(play: Play) -> None:
    blob = bytes(range(251)) * 10_000  # 2.5 MB

    async def scenario(served: Served) -> None:
        async with served.client() as client:
            await client.open()
            pieces = [blob[:1], blob[1:700_000], b"", blob[700_000:]]
            assert await client.store(0, pieces, len(blob)) == cache_pb2.RESERVATION_STATE_RESERVED
            assert await client.store(1, [b"tiny"], 4) == cache_pb2.RESERVATION_STATE_RESERVED
            assert await client.store(0, pieces, len(blob)) == cache_pb2.RESERVATION_STATE_EXISTS
            found = await client.lookup(0, 1, lease_s=5.0)
            pieces_back = await client.fetch(found.lease_id, found.hits[0].extents)
            assert max(len(data) for _, data in pieces_back) <= PIECE_BYTES
            assert b"".join(data for index, data in pieces_back if index == 0) == blob
            assert b"".join(data for index, data in pieces_back if index == 1) == b"tiny"

    play(scenario, arena_bytes=8 << 20)


def test_a_store_that_goes_wrong_leaves_nothing(play: Play) -> None:
    async def scenario(served: Served) -> None:
        async with served.client() as client:
            await client.open()
            async with refused(grpc.StatusCode.INVALID_ARGUMENT, "ended after 2 of the announced 3 bytes"):
                await client.store(0, [b"ab"], 3)
            async with refused(grpc.StatusCode.INVALID_ARGUMENT, "exceeds the announced num_bytes (3)"):
                await client.store(0, [b"ab", b"cd"], 3)
            async with refused(grpc.StatusCode.INVALID_ARGUMENT, "its header"):
                await client.stub.Store(iter([cache_pb2.StoreRequest(data=b"x")]))
            async with refused(grpc.StatusCode.INVALID_ARGUMENT, "its header"):
                await client.stub.Store(iter([]))
            header = cache_pb2.StoreHeader(
                session_id=client.session,
                kind=cache_pb2.KIND_MAP,
                producer=A,
                entry=cache_pb2.NewEntry(key=KEYS[0], layer=0, num_bytes=3),
            )
            async with refused(grpc.StatusCode.INVALID_ARGUMENT, "one header"):
                await client.stub.Store(iter([cache_pb2.StoreRequest(header=header)] * 2))
            stats = await client.stats()
            assert (stats.num_reservations, stats.arenas[0].used_bytes) == (0, 0)
            assert await client.store(0, [b"abc"], 3) == cache_pb2.RESERVATION_STATE_RESERVED

    play(scenario)


def test_a_store_that_is_broken_off_frees_its_room(play: Play) -> None:
    async def scenario(served: Served) -> None:
        async with served.client() as client:
            await client.open()
            call = client.stub.Store()
            entry = cache_pb2.NewEntry(key=KEYS[0], layer=0, num_bytes=100)
            header = cache_pb2.StoreHeader(session_id=client.session, kind=cache_pb2.KIND_MAP, producer=A, entry=entry)
            await call.write(cache_pb2.StoreRequest(header=header))

            async def is_reserved() -> bool:
                return (await client.stats()).num_reservations == 1

            async def is_free() -> bool:
                return not await is_reserved()

            await until(is_reserved)
            call.cancel()
            await until(is_free)
            assert (await client.stats()).arenas[0].used_bytes == 0

    play(scenario)


def test_the_end_of_a_session_frees_what_it_held(play: Play) -> None:
    async def scenario(served: Served) -> None:
        async with served.client() as writer, served.client() as other:
            await other.open()
            await writer.open()
            await writer.store(0, [b"x"], 1)
            await writer.lookup(0, lease_s=60.0)
            await writer.reserve(1)
            stats = await other.stats()
            assert (stats.num_sessions, stats.num_leases, stats.num_reservations) == (2, 1, 1)
            await writer.stream.done_writing()
            while await writer.stream.read() is not grpc.aio.EOF:
                pass
            assert await writer.stream.code() == grpc.StatusCode.OK
            stats = await other.stats()
            assert (stats.num_sessions, stats.num_leases, stats.num_reservations) == (1, 0, 0)
            (reservation,) = await other.reserve(1)
            assert reservation.state == cache_pb2.RESERVATION_STATE_RESERVED
            async with refused(grpc.StatusCode.FAILED_PRECONDITION, "has ended"):
                await writer.reserve(2)

    play(scenario)


def test_a_client_that_never_reads_and_goes_away_holds_nothing(play: Play) -> None:
    async def scenario(served: Served) -> None:
        async with served.client() as other:
            await other.open()
            async with served.client() as deaf:
                await deaf.open(producer="")
                for number in range(400):  # far more news than a connection takes in unread
                    layers = [cache_pb2.LayerInterest(layer=layer, heads=range(64)) for layer in range(number, 200)]
                    wanted = cache_pb2.Interest(namespace=NAMESPACE, model=f"m@{number}", layers=layers)
                    interests = cache_pb2.InterestSet(interests=[wanted])
                    await other.stream.write(cache_pb2.SessionRequest(interests=interests))
                    await other.receive()

            async def is_alone() -> bool:
                return (await other.stats()).num_sessions == 1

            async with asyncio.timeout(5):
                await until(is_alone)

    play(scenario, session_timeout_s=60.0)


def test_everyone_is_told_who_publishes_and_what_is_wanted(play: Play) -> None:
    async def scenario(served: Served) -> None:
        async with served.client() as sender, served.client() as receiver:
            await sender.open()
            peers = (await sender.receive()).peers
            assert [(p.producer.id, p.producer.model) for p in peers.publishers] == [(A, "m@1")]
            assert peers.publishers[0].namespace == NAMESPACE
            await receiver.open(producer="")
            assert (await receiver.receive()).peers == peers
            await receiver.stream.write(cache_pb2.SessionRequest(interests=INTERESTS))
            assert list((await sender.receive()).peers.interests) == list(INTERESTS.interests)
            assert list((await receiver.receive()).peers.interests) == list(INTERESTS.interests)
            assert list((await sender.stats()).publishers) == list(peers.publishers)
            await receiver.stream.done_writing()
            assert list((await sender.receive()).peers.interests) == []

    play(scenario)


def test_heartbeats_are_answered_and_keep_a_session(play: Play) -> None:
    async def scenario(served: Served) -> None:
        async with served.client() as quiet, served.client() as lively:
            await quiet.open(producer="")
            await lively.open(producer="")
            await lively.receive()
            for _ in range(8):
                await asyncio.sleep(0.1)
                await lively.stream.write(cache_pb2.SessionRequest(heartbeat=cache_pb2.Heartbeat()))
                assert (await lively.receive()).HasField("heartbeat")
            async with refused(grpc.StatusCode.FAILED_PRECONDITION, "was silent for too long"):
                await quiet.receive()
                await quiet.receive()
            assert (await lively.stats()).num_sessions == 1

    play(scenario, session_timeout_s=0.4)


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (cache_pb2.SessionRequest(heartbeat=cache_pb2.Heartbeat()), "must be OpenSession"),
        (cache_pb2.SessionRequest(), "must be OpenSession"),
        (cache_pb2.SessionRequest(open=cache_pb2.OpenSession(namespace=NAMESPACE)), "client_name"),
        (
            cache_pb2.SessionRequest(
                open=cache_pb2.OpenSession(
                    client_name="x", namespace=NAMESPACE, producer=cache_pb2.Producer(id=A, model="m@2")
                )
            ),
            "'m@2' but producer.id says 'm@1'",
        ),
        (
            cache_pb2.SessionRequest(
                open=cache_pb2.OpenSession(client_name="x", producer=cache_pb2.Producer(id=A, model="m@1"))
            ),
            "namespace.",
        ),
    ],
)
def test_a_session_that_does_not_open_properly(play: Play, message: cache_pb2.SessionRequest, text: str) -> None:
    async def scenario(served: Served) -> None:
        async with served.client() as client:
            stream = client.stub.Session()
            await stream.write(message)
            async with refused(grpc.StatusCode.INVALID_ARGUMENT, text):
                await stream.read()
            assert (await client.stats()).num_sessions == 0

    play(scenario)


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (cache_pb2.SessionRequest(open=cache_pb2.OpenSession(client_name="x")), "got open"),
        (cache_pb2.SessionRequest(), "got an empty message"),
    ],
)
def test_a_session_that_goes_wrong_ends(play: Play, message: cache_pb2.SessionRequest, text: str) -> None:
    async def scenario(served: Served) -> None:
        async with served.client() as client:
            await client.open()
            await client.reserve(0)
            await client.stream.write(message)
            async with refused(grpc.StatusCode.INVALID_ARGUMENT, text):
                await client.receive()
                await client.receive()
            stats = await client.stats()
            assert (stats.num_sessions, stats.num_reservations) == (0, 0)

    play(scenario)


def test_refusals_name_the_field_and_the_value(play: Play) -> None:
    async def scenario(served: Served) -> None:
        async with served.client() as client:
            await client.open()
            session, stub = client.session, client.stub
            want = cache_pb2.Want(kind=cache_pb2.KIND_MAP, model="m@1", layers=[0])
            bad = grpc.StatusCode.INVALID_ARGUMENT
            async with refused(bad, "key_bytes must be 16 or 32, got 8"):
                await stub.Lookup(cache_pb2.LookupRequest(session_id=session, keys=b"k" * 16, key_bytes=8))
            async with refused(bad, "keys has 17 bytes"):
                await stub.Lookup(cache_pb2.LookupRequest(session_id=session, keys=b"k" * 17, key_bytes=16))
            async with refused(bad, "kind must be KIND_MAP (1), got 0"):
                await stub.Lookup(
                    cache_pb2.LookupRequest(
                        session_id=session, keys=KEYS[0], key_bytes=16, wants=[cache_pb2.Want(model="m@1", layers=[0])]
                    )
                )
            async with refused(bad, "num_bytes must be in [1, 1048576] (the arena), got 1048577"):
                await client.reserve(0, num_bytes=(1 << 20) + 1)
            async with refused(bad, "arena_id must be 1, got 7"):
                await client.fetch(1, [cache_pb2.Extent(arena_id=7, num_bytes=1)])
            async with refused(grpc.StatusCode.NOT_FOUND, "lease 99 "):
                await client.fetch(99, [cache_pb2.Extent(arena_id=1, num_bytes=1)])
            async with refused(grpc.StatusCode.NOT_FOUND, "session 12 does not exist"):
                await stub.Lookup(cache_pb2.LookupRequest(session_id=12, keys=KEYS[0], key_bytes=16, wants=[want]))
            async with refused(grpc.StatusCode.NOT_FOUND, "reservation 5"):
                await stub.Commit(cache_pb2.CommitRequest(session_id=session, reservation_ids=[5]))
            async with refused(grpc.StatusCode.NOT_FOUND, "reservation 5"):
                await stub.Abort(cache_pb2.AbortRequest(session_id=session, reservation_ids=[5]))
            async with refused(grpc.StatusCode.FAILED_PRECONDITION, "another start"):
                await stub.Commit(cache_pb2.CommitRequest(session_id=session ^ (1 << 63)))

    play(scenario)


def test_a_fetch_stops_when_its_lease_ends(play: Play) -> None:
    async def scenario(served: Served) -> None:
        async with served.client() as client:
            await client.open()
            num_bytes = 48 << 20
            await client.store(0, [b"x" * num_bytes], num_bytes)
            found = await client.lookup(0, lease_s=30.0)
            request = cache_pb2.FetchRequest(
                session_id=client.session, lease_id=found.lease_id, extents=found.hits[0].extents
            )
            call = client.stub.Fetch(request)
            assert (await call.read()).index == 0
            await client.stub.Release(cache_pb2.ReleaseRequest(session_id=client.session, lease_ids=[found.lease_id]))
            async with refused(grpc.StatusCode.NOT_FOUND, "not in force"):
                while await call.read() is not grpc.aio.EOF:
                    pass

    play(scenario, arena_bytes=64 << 20)


def test_a_draining_server_takes_no_new_work(play: Play) -> None:
    async def scenario(served: Served) -> None:
        async with served.client() as client:
            await client.open()
            (reservation,) = await client.reserve(0)
            draining = asyncio.create_task(served.server.drain())
            await asyncio.sleep(0.05)
            assert not draining.done()
            async with refused(grpc.StatusCode.UNAVAILABLE, "shutting down"):
                await client.reserve(1)
            async with refused(grpc.StatusCode.UNAVAILABLE, "shutting down"):
                await client.lookup(0)
            commit = cache_pb2.CommitRequest(session_id=client.session, reservation_ids=[reservation.reservation_id])
            await client.stub.Commit(commit)
            await draining

    play(scenario)


def test_a_bug_is_an_internal_error_that_tells_nothing(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    from mapflow.cache_service.core.cache import Cache

    def fail(*_: object) -> None:
        raise RuntimeError("secret")

    async def scenario(served: Served) -> None:
        async with served.client() as client:
            await client.open()
            monkeypatch.setattr(Cache, "lookup", fail)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await client.lookup(0)
            assert caught.value.code() == grpc.StatusCode.INTERNAL
            assert "secret" not in caught.value.details()

    play(scenario)


def test_the_socket_is_for_its_owner_only(play: Play) -> None:
    async def scenario(served: Served) -> None:
        assert stat.S_IMODE(Path(served.endpoint.path).stat().st_mode) == 0o600

    play(scenario)


def test_tcp_on_loopback_with_a_port_that_the_system_chose(play: Play) -> None:
    async def scenario(served: Served) -> None:
        assert served.endpoint.port > 0
        async with served.client() as client:
            await client.open()
            assert (await client.stats()).num_sessions == 1

    play(scenario, endpoint=Endpoint(host="127.0.0.1", port=0))


def test_every_refusal_of_the_core_has_a_status() -> None:
    kinds = errors.CacheError.__subclasses__()
    assert len({status_code(kind("x")) for kind in kinds}) == len(kinds) == 4
