"""The GPU tier through the protocol, with device arenas in host memory into which bytes are really copied."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from prometheus_client import generate_latest

from mapflow.cache_service.promoter import joined
from mapflow.connector.client import Client as EngineClient
from mapflow.connector.client_config import ClientConfig
from mapflow.connector.messages import LookupResult, Want
from mapflow.connector.namespace import Namespace
from mapflow.v1 import cache_pb2

Play = Callable[..., None]
NO_COPY = 2**64 - 1


def blob(chunk: int, num_bytes: int) -> bytes:
    """Different for every chunk."""
    return bytes((chunk * 31 + place) % 251 for place in range(num_bytes))


async def copied(served: Any, client: Any, num_copies: int, number: int = 0) -> None:
    async def there() -> bool:
        return bool((await client.stats()).device_arenas[number].num_copies == num_copies)

    await served.until(there)


async def publish(client: Any, *sizes: int) -> None:
    for chunk, num_bytes in enumerate(sizes):
        assert await client.store(chunk, [blob(chunk, num_bytes)], num_bytes) == cache_pb2.RESERVATION_STATE_RESERVED


def test_handshake_names_the_device_arenas(play: Play) -> None:
    async def scenario(served: Any) -> None:
        async with served.client() as client:
            hello = await client.stub.Handshake(cache_pb2.HandshakeRequest())
            arenas = [(arena.arena_id, arena.device_uuid, arena.num_bytes) for arena in hello.device_arenas]
            assert arenas == [(2, "GPU-00000000", 4096), (3, "GPU-00000001", 8192)]
            assert [arena.handle for arena in hello.device_arenas] == [bytes(64), b"\1" * 64]

    play(scenario, gpu_arena_bytes=(4096, 8192))


def test_the_second_look_up_names_copies_that_equal_the_blobs(play: Play) -> None:
    sizes = (1000, 64, 3)

    async def scenario(served: Any) -> None:
        async with served.client() as client:
            await client.open(device_arena_id=2)
            await publish(client, *sizes)
            first = (await client.lookup(0, 1, 2, lease_s=30.0, device_arena_id=2)).hits[0]
            assert len(first.extents.offsets) == 3 and not first.device_offsets
            await copied(served, client, 3)
            second = (await client.lookup(0, 1, 2, lease_s=30.0, device_arena_id=2)).hits[0]
            assert len(second.device_offsets) == 3
            for chunk, (offset, num_bytes) in enumerate(zip(second.device_offsets, sizes, strict=True)):
                assert offset % 64 == 0
                assert served.memories[0].bytes[offset : offset + num_bytes] == blob(chunk, num_bytes)
            (stats,) = (await client.stats()).device_arenas
            assert (stats.arena.arena_id, stats.arena.device_uuid, stats.arena.num_bytes) == (2, "GPU-00000000", 4096)
            assert (stats.used_bytes, stats.promoted_entries) == (1024 + 64 + 64, 3)
            assert not stats.arena.handle

    play(scenario, gpu_arena_bytes=(4096,))


def test_the_client_of_an_engine_on_that_gpu_is_told(play: Play) -> None:
    """What another engine published, and nothing to one on another GPU."""

    async def scenario(served: Any) -> None:
        async with served.client() as client:
            await client.open()
            await publish(client, 100, 100)
            found = await asyncio.to_thread(look_up_twice, str(served.endpoint), "GPU-00000001")
            assert found.device_arena_id == 3
            ((first,), (second,)) = found.hits[0].device_offsets
            for chunk, offset in enumerate((first, second)):
                assert served.memories[1].bytes[offset : offset + 100] == blob(chunk, 100)
            assert (await client.stats()).device_arenas[0].num_copies == 0
            found = await asyncio.to_thread(look_up_twice, str(served.endpoint), "GPU-0000000f")
            assert found.device_arena_id == 0 and found.hits[0].device_offsets == ()

    play(scenario, gpu_arena_bytes=(4096, 8192))


def look_up_twice(endpoint: str, device_uuid: str) -> LookupResult:
    """As an engine's scheduler does, until copies are there or will not come."""
    namespace = Namespace(tokenizer_fingerprint="f00d")
    config = ClientConfig(
        endpoint=endpoint, client_name="c", namespace=namespace, device_uuid=device_uuid, call_deadline_s=10.0
    )
    client = EngineClient(config)
    client.start()
    try:
        assert client.wait_connected(10.0)
        for _ in range(100):
            result = client.lookup([b"\0" * 16, b"\1" * 16], [Want(model="m@1", layers=(0,))], 30.0).result()
            if result.hits[0].device_offsets:
                break
            time.sleep(0.01)
        return result
    finally:
        client.close()


def test_a_run_of_which_only_a_part_has_copies(play: Play) -> None:
    async def scenario(served: Any) -> None:
        async with served.client() as client:
            await client.open()
            await publish(client, 64, 64)
            await client.lookup(1, lease_s=30.0, device_arena_id=2)
            await copied(served, client, 1)
            hit = (await client.lookup(0, 1, lease_s=30.0, device_arena_id=2)).hits[0]
            assert list(hit.device_offsets) == [NO_COPY, 0]

    play(scenario, gpu_arena_bytes=(4096,))


def test_a_commit_promotes_for_a_session_that_wants_it(play: Play) -> None:
    async def scenario(served: Any) -> None:
        async with served.client() as reader, served.client() as client:
            await reader.open(producer="", device_arena_id=3)
            interest = cache_pb2.Interest(
                namespace=cache_pb2.Namespace(
                    format_version=1, tokenizer_fingerprint="f00d", chunk_tokens=512, block=64, key_hash=1
                ),
                model="m@1",
                layers=[cache_pb2.LayerInterest(layer=0)],
            )
            interests = cache_pb2.InterestSet(interests=[interest])
            await reader.stream.write(cache_pb2.SessionRequest(interests=interests))
            await client.open()

            async def wanted() -> bool:
                return bool(served.server._cache.peers().interests)

            await served.until(wanted)
            await publish(client, 100)
            await copied(served, client, 1, number=1)
            (reservation,) = await client.reserve(1)
            served.arena.write(reservation.extent.offset, blob(7, 100))
            commit = cache_pb2.CommitRequest(session_id=client.session, reservation_ids=[reservation.reservation_id])
            await client.stub.Commit(commit)
            await copied(served, client, 2, number=1)
            hit = (await reader.lookup(0, lease_s=30.0, device_arena_id=3)).hits[0]
            assert served.memories[1].bytes[hit.device_offsets[0] :][:100] == blob(0, 100)
            hit = (await reader.lookup(1, lease_s=30.0, device_arena_id=3)).hits[0]
            assert served.memories[1].bytes[hit.device_offsets[0] :][:100] == blob(7, 100)
            assert (await client.stats()).device_arenas[0].num_copies == 0

    play(scenario, gpu_arena_bytes=(4096, 4096))


def test_a_copy_that_fails_leaves_the_host_path_and_is_counted(play: Play) -> None:
    async def scenario(served: Any) -> None:
        (memory,) = served.memories
        memory.error = RuntimeError("the GPU is on fire")
        async with served.client() as client:
            await client.open()
            await publish(client, 100, 100)

            for attempt in (1, 2):
                found = await client.lookup(0, 1, lease_s=30.0, device_arena_id=2)
                assert not found.hits[0].device_offsets
                pieces = await client.fetch(found.lease_id, client.extents(found.hits[0]))
                assert [data for _, data in pieces] == [blob(0, 100), blob(1, 100)]

                async def failed(attempt: int = attempt) -> bool:
                    return bool((await client.stats()).device_arenas[0].failed_entries == 2 * attempt)

                await served.until(failed)
                assert (await client.stats()).device_arenas[0].used_bytes == 0
            memory.error = None
            await client.lookup(0, 1, lease_s=30.0, device_arena_id=2)
            await copied(served, client, 2)

    play(scenario, gpu_arena_bytes=(4096,))


def test_failures_are_logged_once_a_kind(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(
        "mapflow.cache_service.promoter._log.error", lambda event, exc_info, **_: lines.append(str(exc_info))
    )

    async def scenario(served: Any) -> None:
        async with served.client() as client:
            await client.open()
            await publish(client, 100)
            for number, error in enumerate([RuntimeError("a"), RuntimeError("b"), OSError("c")], start=1):
                served.memories[0].error = error
                await client.lookup(0, lease_s=30.0, device_arena_id=2)

                async def failed(number: int = number) -> bool:
                    return bool((await client.stats()).device_arenas[0].failed_entries == number)

                await served.until(failed)
        assert lines == ["a", "c"]

    play(scenario, gpu_arena_bytes=(4096,))


def test_unknown_device_arenas_are_refused(play: Play) -> None:
    async def scenario(served: Any) -> None:
        async with served.client() as client, served.client() as other:
            await client.open()
            bad = grpc.StatusCode.INVALID_ARGUMENT
            async with served.refused(bad, "device_arena_id must be 0 or one of [2], got 7"):
                await client.lookup(0, lease_s=1.0, device_arena_id=7)
            async with served.refused(bad, "device_arena_id must be 0 or one of [2], got 1"):
                await other.open(device_arena_id=1)

    play(scenario, gpu_arena_bytes=(4096,))


def test_stopping_waits_for_the_copy_under_way_and_begins_no_other(play: Play) -> None:
    waiting: list[Any] = []

    async def scenario(served: Any) -> None:
        (memory,) = served.memories
        memory.gate.clear()
        async with served.client() as client:
            await client.open()
            await publish(client, 64, 64)
            await client.lookup(0, lease_s=30.0, device_arena_id=2)

            async def copying() -> bool:
                return bool(memory.busy)

            await served.until(copying)
            await client.lookup(1, lease_s=30.0, device_arena_id=2)
            stopping = asyncio.create_task(served.server.stop())
            waiting.append(memory)
            await asyncio.sleep(0.1)
            assert not stopping.done()
            memory.gate.set()
            await stopping
            assert not memory.busy and memory.num_calls == 1

    play(scenario, gpu_arena_bytes=(4096,))
    assert waiting[0].closed


def test_metrics_of_a_device_arena(play: Play) -> None:
    async def scenario(served: Any) -> None:
        async with served.client() as client:
            await client.open()
            await publish(client, 100, 4096)
            await client.lookup(0, 1, lease_s=30.0, device_arena_id=2)
            await copied(served, client, 1)
        registry = served.server._metrics.registry
        text = (await asyncio.to_thread(generate_latest, registry)).decode()
        values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        expected = {
            "promoted_entries_total": 1,
            "no_room_entries_total": 1,
            "failed_entries_total": 0,
            "dropped_entries_total": 0,
            "arena_bytes": 4096,
            "used_bytes": 128,
            "num_copies": 1,
        }
        found = {name: float(values[f'mapflow_device_{name}{{device_arena="2"}}']) for name in expected}
        assert found == expected

    play(scenario, gpu_arena_bytes=(4096,))


def test_copies_behind_each_other_are_joined() -> None:
    assert joined([]) == []
    assert joined([(0, 64, 10), (64, 128, 64), (128, 192, 1), (192, 320, 5), (512, 384, 5), (576, 448, 70)]) == [
        (0, 64, 129),
        (192, 320, 5),
        (512, 384, 134),
    ]
