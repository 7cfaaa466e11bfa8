"""Writers that evict and readers that hold leases, all at once, on real shared memory: no reader ever sees a change."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from hashlib import blake2b
from random import Random
from typing import Any

from mapflow.v1 import cache_pb2

Play = Callable[..., None]

BLOB_BYTES = 1000
NUM_KEYS = 20  # of which about a third fit
SECONDS = 2.0


def blob(chunk: int) -> bytes:
    """The only right content of a chunk."""
    return blake2b(bytes([chunk]), digest_size=50).digest() * (BLOB_BYTES // 50)


def test_blobs_under_a_lease_never_change(play: Play) -> None:
    counts = {"written": 0, "read": 0, "full": 0}

    async def write(served: Any, chance: Random, end: float) -> None:
        async with served.client() as client:
            await client.open()
            while asyncio.get_running_loop().time() < end:
                chunks = chance.sample(range(NUM_KEYS), 3)
                ids = []
                for chunk, reservation in zip(chunks, await client.reserve(*chunks, num_bytes=BLOB_BYTES), strict=True):
                    counts["full"] += reservation.state == cache_pb2.RESERVATION_STATE_NO_ROOM
                    if reservation.state == cache_pb2.RESERVATION_STATE_RESERVED:
                        served.arena.write(reservation.extent.offset, b"?" * BLOB_BYTES)
                        await asyncio.sleep(0)
                        served.arena.write(reservation.extent.offset, blob(chunk))
                        ids.append(reservation.reservation_id)
                request = cache_pb2.CommitRequest(session_id=client.session, reservation_ids=ids)
                await client.stub.Commit(request)
                counts["written"] += len(ids)

    async def read(served: Any, chance: Random, end: float) -> None:
        async with served.client() as client:
            await client.open()
            while asyncio.get_running_loop().time() < end:
                chunk = chance.randrange(NUM_KEYS)
                found = await client.lookup(chunk, lease_s=10.0)
                for _ in range(2):
                    for hit in found.hits:
                        (extent,) = client.extents(hit)
                        assert served.arena.read(extent.offset, extent.num_bytes) == blob(chunk)
                        counts["read"] += 1
                    await asyncio.sleep(chance.random() / 100)
                if found.lease_id:
                    ids = [found.lease_id]
                    await client.stub.Release(cache_pb2.ReleaseRequest(session_id=client.session, lease_ids=ids))

    async def scenario(served: Any) -> None:
        end = asyncio.get_running_loop().time() + SECONDS
        async with asyncio.TaskGroup() as tasks:
            for seed in range(3):
                tasks.create_task(write(served, Random(seed), end))
                tasks.create_task(read(served, Random(seed), end))
        async with served.client() as client:
            stats = await client.stats()
            assert (stats.num_leases, stats.num_reservations) == (0, 0)
            assert stats.evicted_entries > 0

    play(scenario, arena_bytes=8 * 1024)
    assert min(counts["written"], counts["read"]) > 20, counts
