"""Which chunk goes first when room is needed: the least recently used one that nothing holds.

A chunk is held by every lease on it, every reservation in it, and every child chunk that still has entries: so leaves
go before their parents, and use of a leaf is use of what it stands on. Knows chunk keys, ticks and counts; neither
entries nor bytes.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass


@dataclass(slots=True)
class _Place:
    tick: int
    holds: int = 0
    queued_tick: int | None = None  # the tick under which the chunk sits in the queue


class EvictionOrder:
    """Chunks by last use, of which only those without holds can be taken.

    The queue is a heap that is corrected lazily: a hold leaves the chunk where it is, and it is looked at again when it
    comes up. Each chunk sits in it at most once, so `hold` and `touch` take O(1), the rest O(log n) amortised.
    """

    def __init__(self) -> None:
        self._places: dict[bytes, _Place] = {}
        self._queue: list[tuple[int, bytes]] = []
        self._tick = 0

    def add(self, chunk: bytes, holds: int) -> None:
        """Enter a chunk as the most recently used one, with that many holds on it."""
        self._tick += 1
        self._places[chunk] = _Place(self._tick, holds)
        self._enqueue(chunk)

    def touch(self, chunk: bytes) -> None:
        """Make a chunk the most recently used one."""
        self._tick += 1
        self._places[chunk].tick = self._tick

    def hold(self, chunk: bytes) -> None:
        """Keep a chunk from being taken until as many `unhold` calls have been made."""
        self._places[chunk].holds += 1

    def unhold(self, chunk: bytes, used_at: int = 0) -> None:
        """Undo one `hold`; used_at: tick at which the chunk was in use, if that was later than its own."""
        place = self._places[chunk]
        assert place.holds > 0, "unhold without hold"
        place.holds -= 1
        place.tick = max(place.tick, used_at)
        self._enqueue(chunk)

    def remove(self, chunk: bytes) -> None:
        """Forget a chunk, held or not."""
        del self._places[chunk]

    def take(self) -> tuple[bytes, int] | None:
        """Remove the least recently used chunk without holds; returns it with the tick of its last use.

        None if every chunk is held.
        """
        while self._queue:
            tick, chunk = heapq.heappop(self._queue)
            place = self._places.get(chunk)
            if place is None or place.queued_tick != tick:
                continue  # left behind by a chunk that was removed
            place.queued_tick = None
            if place.holds:
                continue  # comes back with its last unhold
            if place.tick == tick:
                del self._places[chunk]
                return chunk, tick
            self._enqueue(chunk)
        return None

    def _enqueue(self, chunk: bytes) -> None:
        place = self._places[chunk]
        if place.holds == 0 and place.queued_tick is None:
            place.queued_tick = place.tick
            heapq.heappush(self._queue, (place.tick, chunk))
