"""The Calls stream over a real socket: answers in order, refusals that end nothing, and its end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc

from mapflow.v1 import cache_pb2

Play = Callable[..., None]


def _lookup(client: Any, *chunks: int, lease_s: float = 0.0, key_bytes: int = 16) -> cache_pb2.CallRequest:
    want = cache_pb2.Want(kind=cache_pb2.KIND_MAP, model="m@1", layers=[0])
    keys = b"".join(bytes([chunk]) * 16 for chunk in chunks)
    request = cache_pb2.LookupRequest(
        session_id=client.session, keys=keys, key_bytes=key_bytes, wants=[want], lease_s=lease_s
    )
    return cache_pb2.CallRequest(lookup=request)


async def _ask(stream: Any, *requests: cache_pb2.CallRequest) -> list[cache_pb2.CallResponse]:
    for request in requests:
        await stream.write(request)
    return [await asyncio.wait_for(stream.read(), 10) for _ in requests]


def test_answers_come_in_order_and_are_those_of_the_calls(play: Play) -> None:
    async def scenario(served: Any) -> None:
        async with served.client() as client:
            await client.open()
            await client.store(0, [b"x"], 1)
            stream = client.stub.Calls()
            requests = (_lookup(client, 0, lease_s=5.0), _lookup(client, 9), _lookup(client, 0))
            leased, missed, looked = await _ask(stream, *requests)
            assert [answer.code for answer in (leased, missed, looked)] == [0, 0, 0]
            assert (leased.lookup.hits[0].num_chunks, len(leased.lookup.hits[0].extents.offsets)) == (1, 1)
            assert not missed.lookup.hits and looked.lookup.hits and not looked.lookup.lease_id
            assert (await client.stats()).num_leases == 1
            release = cache_pb2.ReleaseRequest(session_id=client.session, lease_ids=[leased.lookup.lease_id])
            (released,) = await _ask(stream, cache_pb2.CallRequest(release=release))
            assert (released.code, released.HasField("lookup")) == (0, False)
            assert (await client.stats()).num_leases == 0

    play(scenario)


def test_publishing_in_two_calls(play: Play) -> None:
    async def scenario(served: Any) -> None:
        async with served.client() as client:
            await client.open()
            stream = client.stub.Calls()
            entry = cache_pb2.NewEntry(key=b"k" * 16, layer=0, num_bytes=10)
            reserve = cache_pb2.ReserveRequest(
                session_id=client.session, kind=cache_pb2.KIND_MAP, producer="m@1/float32/tp0of1", entries=[entry]
            )
            first, again = await _ask(stream, *2 * [cache_pb2.CallRequest(reserve=reserve)])
            (room,) = first.reserve.reservations
            assert room.state == cache_pb2.RESERVATION_STATE_RESERVED and room.extent.num_bytes == 10
            assert again.reserve.reservations[0].state == cache_pb2.RESERVATION_STATE_EXISTS
            ids = {"session_id": client.session, "reservation_ids": [room.reservation_id]}
            aborted, late = await _ask(
                stream,
                cache_pb2.CallRequest(abort=cache_pb2.AbortRequest(**ids)),
                cache_pb2.CallRequest(commit=cache_pb2.CommitRequest(**ids)),
            )
            assert (aborted.code, late.code) == (0, grpc.StatusCode.NOT_FOUND.value[0])
            (third,) = await _ask(stream, cache_pb2.CallRequest(reserve=reserve))
            ids["reservation_ids"] = [third.reserve.reservations[0].reservation_id]
            (committed,) = await _ask(stream, cache_pb2.CallRequest(commit=cache_pb2.CommitRequest(**ids)))
            stats = await client.stats()
            assert (committed.code, stats.num_entries, stats.num_reservations) == (0, 1, 0)

    play(scenario)


def test_refusals_name_their_reason_and_end_nothing(play: Play) -> None:
    async def scenario(served: Any) -> None:
        async with served.client() as client:
            await client.open()
            stream = client.stub.Calls()
            strange = _lookup(client, 0)
            strange.lookup.session_id = 12
            asked = (cache_pb2.CallRequest(), _lookup(client, 0, key_bytes=8), strange, _lookup(client, 0))
            empty, short, unknown, fine = await _ask(stream, *asked)
            invalid = grpc.StatusCode.INVALID_ARGUMENT.value[0]
            assert (empty.code, empty.message) == (invalid, "a call must name what it calls")
            assert (short.code, short.message) == (invalid, "key_bytes must be 16 or 32, got 8")
            assert unknown.code == grpc.StatusCode.NOT_FOUND.value[0] and "12" in unknown.message
            assert (fine.code, fine.message) == (0, "")

    play(scenario)


def test_what_fails_inside_is_an_answer_too(play: Play) -> None:
    async def scenario(served: Any) -> None:
        async with served.client() as client:
            await client.open()
            stream = client.stub.Calls()
            served.server._cache.lookup = lambda *arguments: 1 / 0
            (failed,) = await _ask(stream, _lookup(client, 0))
            assert (failed.code, failed.message) == (13, "lookup failed; the daemon's log has the traceback")
            release = cache_pb2.ReleaseRequest(session_id=client.session)
            (fine,) = await _ask(stream, cache_pb2.CallRequest(release=release))
            assert fine.code == 0

    play(scenario)


def test_the_stream_ends_with_its_client(play: Play) -> None:
    async def scenario(served: Any) -> None:
        async with served.client() as client:
            await client.open()
            stream = client.stub.Calls()
            await _ask(stream, _lookup(client, 0))
            await stream.done_writing()
            assert await asyncio.wait_for(stream.read(), 10) is grpc.aio.EOF
            assert await stream.code() is grpc.StatusCode.OK

    play(scenario)
