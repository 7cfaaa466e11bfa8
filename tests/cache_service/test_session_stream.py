"""The Session stream over a real socket: opening, signs of life, news, and every way to end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from mapflow.v1 import cache_pb2

Play = Callable[..., None]
A = "m@1/float32/tp0of1"
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


def test_the_end_of_a_session_frees_what_it_held(play: Play) -> None:
    async def scenario(served: Any) -> None:
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
            async with served.refused(grpc.StatusCode.FAILED_PRECONDITION, "has ended"):
                await writer.reserve(2)

    play(scenario)


def test_a_client_that_never_reads_and_goes_away_holds_nothing(play: Play) -> None:
    async def scenario(served: Any) -> None:
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
                return bool((await other.stats()).num_sessions == 1)

            async with asyncio.timeout(5):
                await served.until(is_alone)

    play(scenario, session_timeout_s=60.0)


def test_everyone_is_told_who_publishes_and_what_is_wanted(play: Play) -> None:
    async def scenario(served: Any) -> None:
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
    async def scenario(served: Any) -> None:
        async with served.client() as quiet, served.client() as lively:
            await quiet.open(producer="")
            await lively.open(producer="")
            await lively.receive()
            for _ in range(8):
                await asyncio.sleep(0.1)
                await lively.stream.write(cache_pb2.SessionRequest(heartbeat=cache_pb2.Heartbeat()))
                assert (await lively.receive()).HasField("heartbeat")
            async with served.refused(grpc.StatusCode.FAILED_PRECONDITION, "was silent for too long"):
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
    async def scenario(served: Any) -> None:
        async with served.client() as client:
            stream = client.stub.Session()
            await stream.write(message)
            async with served.refused(grpc.StatusCode.INVALID_ARGUMENT, text):
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
    async def scenario(served: Any) -> None:
        async with served.client() as client:
            await client.open()
            await client.reserve(0)
            await client.stream.write(message)
            async with served.refused(grpc.StatusCode.INVALID_ARGUMENT, text):
                await client.receive()
                await client.receive()
            stats = await client.stats()
            assert (stats.num_sessions, stats.num_reservations) == (0, 0)

    play(scenario)
