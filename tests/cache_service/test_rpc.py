"""Every call but Session over a real socket: a server in this process, a real stub, a temporary Unix socket."""

from __future__ import annotations

import asyncio
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from mapflow.cache_service.config import Endpoint
from mapflow.cache_service.core import errors
from mapflow.cache_service.core.cache import Cache
from mapflow.cache_service.status import status_code
from mapflow.cache_service.transfer import PIECE_BYTES
from mapflow.v1 import cache_pb2

Play = Callable[..., None]
A = "m@1/float32/tp0of1"
KEYS = [bytes([number]) * 16 for number in range(20)]


def test_handshake_says_what_is_there(play: Play) -> None:
    async def scenario(served: Any) -> None:
        async with served.client() as client:
            answer = await client.stub.Handshake(cache_pb2.HandshakeRequest(format_versions=[1]))
            assert len(answer.boot_id) == 16
            assert [(a.segment_name, a.num_bytes) for a in answer.arenas] == [(served.arena.segment_name, 1 << 20)]
            assert (answer.session_timeout_s, answer.max_lease_s, answer.max_keys) == (10.0, 60.0, 4096)
            assert answer.max_blob_bytes == 1 << 20
            opened = await client.open()
            assert opened.boot_id == answer.boot_id
            async with served.refused(grpc.StatusCode.FAILED_PRECONDITION, "[99]"):
                await client.stub.Handshake(cache_pb2.HandshakeRequest(format_versions=[99]))

    play(scenario)


def test_a_blob_written_in_place_is_found_and_read_in_place(play: Play) -> None:
    async def scenario(served: Any) -> None:
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
            assert reader.extents(hit) == [reservation.extent for reservation in reservations]
            assert [served.arena.read(e.offset, e.num_bytes) for e in reader.extents(hit)] == [b"\0" * 100, b"\1" * 100]
            release = cache_pb2.ReleaseRequest(session_id=reader.session, lease_ids=[found.lease_id])
            await reader.stub.Release(release)
            await reader.stub.Release(release)
            assert (await reader.stats()).num_leases == 0

    play(scenario)


def test_a_look_takes_no_lease_and_names_no_extents(play: Play) -> None:
    async def scenario(served: Any) -> None:
        async with served.client() as client:
            await client.open()
            await client.store(0, [b"x"], 1)
            found = await client.lookup(0)
            assert (found.lease_id, found.hits[0].num_chunks, len(client.extents(found.hits[0]))) == (0, 1, 0)

    play(scenario)


def test_store_and_fetch_carry_bytes_in_pieces(play: Play) -> None:
    blob = bytes(range(251)) * 10_000  # 2.5 MB

    async def scenario(served: Any) -> None:
        async with served.client() as client:
            await client.open()
            pieces = [blob[:1], blob[1:700_000], b"", blob[700_000:]]
            assert await client.store(0, pieces, len(blob)) == cache_pb2.RESERVATION_STATE_RESERVED
            assert await client.store(1, [b"tiny"], 4) == cache_pb2.RESERVATION_STATE_RESERVED
            assert await client.store(0, pieces, len(blob)) == cache_pb2.RESERVATION_STATE_EXISTS
            found = await client.lookup(0, 1, lease_s=5.0)
            pieces_back = await client.fetch(found.lease_id, client.extents(found.hits[0]))
            assert max(len(data) for _, data in pieces_back) <= PIECE_BYTES
            assert b"".join(data for index, data in pieces_back if index == 0) == blob
            assert b"".join(data for index, data in pieces_back if index == 1) == b"tiny"

    play(scenario, arena_bytes=8 << 20)


def test_a_store_that_goes_wrong_leaves_nothing(play: Play) -> None:
    async def scenario(served: Any) -> None:
        async with served.client() as client:
            await client.open()
            async with served.refused(grpc.StatusCode.INVALID_ARGUMENT, "ended after 2 of the announced 3 bytes"):
                await client.store(0, [b"ab"], 3)
            async with served.refused(grpc.StatusCode.INVALID_ARGUMENT, "exceeds the announced num_bytes (3)"):
                await client.store(0, [b"ab", b"cd"], 3)
            async with served.refused(grpc.StatusCode.INVALID_ARGUMENT, "its header"):
                await client.stub.Store(iter([cache_pb2.StoreRequest(data=b"x")]))
            async with served.refused(grpc.StatusCode.INVALID_ARGUMENT, "its header"):
                await client.stub.Store(iter([]))
            header = cache_pb2.StoreHeader(
                session_id=client.session,
                kind=cache_pb2.KIND_MAP,
                producer=A,
                entry=cache_pb2.NewEntry(key=KEYS[0], layer=0, num_bytes=3),
            )
            async with served.refused(grpc.StatusCode.INVALID_ARGUMENT, "one header"):
                await client.stub.Store(iter([cache_pb2.StoreRequest(header=header)] * 2))
            stats = await client.stats()
            assert (stats.num_reservations, stats.arenas[0].used_bytes) == (0, 0)
            assert await client.store(0, [b"abc"], 3) == cache_pb2.RESERVATION_STATE_RESERVED

    play(scenario)


def test_a_store_that_is_broken_off_frees_its_room(play: Play) -> None:
    async def scenario(served: Any) -> None:
        async with served.client() as client:
            await client.open()
            call = client.stub.Store()
            entry = cache_pb2.NewEntry(key=KEYS[0], layer=0, num_bytes=100)
            header = cache_pb2.StoreHeader(session_id=client.session, kind=cache_pb2.KIND_MAP, producer=A, entry=entry)
            await call.write(cache_pb2.StoreRequest(header=header))

            async def is_reserved() -> bool:
                return bool((await client.stats()).num_reservations == 1)

            async def is_free() -> bool:
                return not await is_reserved()

            await served.until(is_reserved)
            call.cancel()
            await served.until(is_free)
            assert (await client.stats()).arenas[0].used_bytes == 0

    play(scenario)


def test_refusals_name_the_field_and_the_value(play: Play) -> None:
    async def scenario(served: Any) -> None:
        async with served.client() as client:
            await client.open()
            session, stub = client.session, client.stub
            want = cache_pb2.Want(kind=cache_pb2.KIND_MAP, model="m@1", layers=[0])
            bad = grpc.StatusCode.INVALID_ARGUMENT
            async with served.refused(bad, "key_bytes must be 16 or 32, got 8"):
                await stub.Lookup(cache_pb2.LookupRequest(session_id=session, keys=b"k" * 16, key_bytes=8))
            async with served.refused(bad, "keys has 17 bytes"):
                await stub.Lookup(cache_pb2.LookupRequest(session_id=session, keys=b"k" * 17, key_bytes=16))
            async with served.refused(bad, "kind must be KIND_MAP (1), got 0"):
                await stub.Lookup(
                    cache_pb2.LookupRequest(
                        session_id=session, keys=KEYS[0], key_bytes=16, wants=[cache_pb2.Want(model="m@1", layers=[0])]
                    )
                )
            async with served.refused(bad, "num_bytes must be in [1, 1048576] (the arena), got 1048577"):
                await client.reserve(0, num_bytes=(1 << 20) + 1)
            async with served.refused(bad, "arena_id must be 1, got 7"):
                await client.fetch(1, [cache_pb2.Extent(arena_id=7, num_bytes=1)])
            async with served.refused(grpc.StatusCode.NOT_FOUND, "lease 99 "):
                await client.fetch(99, [cache_pb2.Extent(arena_id=1, num_bytes=1)])
            async with served.refused(grpc.StatusCode.NOT_FOUND, "session 12 does not exist"):
                await stub.Lookup(cache_pb2.LookupRequest(session_id=12, keys=KEYS[0], key_bytes=16, wants=[want]))
            async with served.refused(grpc.StatusCode.NOT_FOUND, "reservation 5"):
                await stub.Commit(cache_pb2.CommitRequest(session_id=session, reservation_ids=[5]))
            async with served.refused(grpc.StatusCode.NOT_FOUND, "reservation 5"):
                await stub.Abort(cache_pb2.AbortRequest(session_id=session, reservation_ids=[5]))
            async with served.refused(grpc.StatusCode.FAILED_PRECONDITION, "another start"):
                await stub.Commit(cache_pb2.CommitRequest(session_id=session ^ (1 << 63)))

    play(scenario)


def test_a_fetch_stops_when_its_lease_ends(play: Play) -> None:
    async def scenario(served: Any) -> None:
        async with served.client() as client:
            await client.open()
            num_bytes = 48 << 20
            await client.store(0, [b"x" * num_bytes], num_bytes)
            found = await client.lookup(0, lease_s=30.0)
            request = cache_pb2.FetchRequest(
                session_id=client.session, lease_id=found.lease_id, extents=client.extents(found.hits[0])
            )
            call = client.stub.Fetch(request)
            assert (await call.read()).index == 0
            await client.stub.Release(cache_pb2.ReleaseRequest(session_id=client.session, lease_ids=[found.lease_id]))
            async with served.refused(grpc.StatusCode.NOT_FOUND, "not in force"):
                while await call.read() is not grpc.aio.EOF:
                    pass

    play(scenario, arena_bytes=64 << 20)


def test_a_draining_server_takes_no_new_work(play: Play) -> None:
    async def scenario(served: Any) -> None:
        async with served.client() as client:
            await client.open()
            (reservation,) = await client.reserve(0)
            draining = asyncio.create_task(served.server.drain())
            await asyncio.sleep(0.05)
            assert not draining.done()
            async with served.refused(grpc.StatusCode.UNAVAILABLE, "shutting down"):
                await client.reserve(1)
            async with served.refused(grpc.StatusCode.UNAVAILABLE, "shutting down"):
                await client.lookup(0)
            commit = cache_pb2.CommitRequest(session_id=client.session, reservation_ids=[reservation.reservation_id])
            await client.stub.Commit(commit)
            await draining

    play(scenario)


def test_a_bug_is_an_internal_error_that_tells_nothing(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("secret")

    async def scenario(served: Any) -> None:
        async with served.client() as client:
            await client.open()
            monkeypatch.setattr(Cache, "lookup", fail)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await client.lookup(0)
            assert caught.value.code() == grpc.StatusCode.INTERNAL
            assert "secret" not in caught.value.details()

    play(scenario)


def test_the_socket_is_for_its_owner_only(play: Play) -> None:
    async def scenario(served: Any) -> None:
        assert stat.S_IMODE(Path(served.endpoint.path).stat().st_mode) == 0o600

    play(scenario)


def test_tcp_on_loopback_with_a_port_that_the_system_chose(play: Play) -> None:
    async def scenario(served: Any) -> None:
        assert served.endpoint.port > 0
        async with served.client() as client:
            await client.open()
            assert (await client.stats()).num_sessions == 1

    play(scenario, endpoint=Endpoint(host="127.0.0.1", port=0))


def test_every_refusal_of_the_core_has_a_status() -> None:
    kinds = errors.CacheError.__subclasses__()
    assert len({status_code(kind("x")) for kind in kinds}) == len(kinds) == 4
