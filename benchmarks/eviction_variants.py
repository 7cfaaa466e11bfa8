"""Other orders of eviction, for `hit_rate.py`: simulated, leaves first, as the daemon's own is.

A chunk's rank is set when it is published or found; the leaf with the lowest goes first, and passes its rank on to its
parent if that has a lower one. The rank of the last one that went is the age.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence

Rank = Callable[[int, float, int, int], float]
"""Of a chunk, by the number of accesses so far, the age, its place in its chain, and how often it was found."""

_BONUS, _DEPTH = 20_000, 200  # accesses that being found once more, and standing one place higher, are worth

VARIANTS: Mapping[str, Rank] = {
    "least recently used": lambda now, age, depth, found: now,
    "least frequently used, aged": lambda now, age, depth, found: age + found,
    "recently used, found before": lambda now, age, depth, found: now + _BONUS * min(found, 1),
    "recently used, shallow": lambda now, age, depth, found: now - _DEPTH * depth,
    "recently used, shallow, found before": lambda now, age, depth, found: (
        now - _DEPTH * depth + _BONUS * min(found, 4)
    ),
}


class Simulation:
    """A cache of so many chunks."""

    def __init__(self, room: int, rank: Rank) -> None:
        self._room, self._rank_of = room, rank
        self._rank: dict[int, float] = {}  # of the chunks that are here
        self._parent: dict[int, int | None] = {}
        self._children: dict[int, int] = {}  # how many of a chunk's are here
        self._found: dict[int, int] = {}
        self._leaves: list[tuple[float, int]] = []  # heap, some out of date
        self._now, self._age = 0, 0.0

    def request(self, chunks: Sequence[int]) -> int:
        """Look a chain up, and publish what is missing; returns how many were found."""
        length = next((place for place, chunk in enumerate(chunks) if chunk not in self._rank), len(chunks))
        held = set(chunks)
        for depth, chunk in enumerate(chunks):
            self._now += 1
            if depth < length:
                self._found[chunk] = self._found.get(chunk, 0) + 1
            elif chunk not in self._rank and not self._enter(chunk, chunks[depth - 1] if depth else None, held):
                break
            self._rank[chunk] = self._rank_of(self._now, self._age, depth, self._found.get(chunk, 0))
            self._offer(chunk)
        return length

    def _enter(self, chunk: int, parent: int | None, held: set[int]) -> bool:
        while len(self._rank) >= self._room:
            if not self._evict(held):
                return False
        self._parent[chunk] = parent
        if parent is not None:
            self._children[parent] = self._children.get(parent, 0) + 1
        return True

    def _evict(self, held: set[int]) -> bool:
        spared = []
        victim = None
        while self._leaves and victim is None:
            rank, chunk = heapq.heappop(self._leaves)
            if self._rank.get(chunk) != rank or self._children.get(chunk):
                continue
            if chunk in held:
                spared.append((rank, chunk))
            else:
                victim = chunk
        for one in spared:
            heapq.heappush(self._leaves, one)
        if victim is None:
            return False
        rank = self._rank.pop(victim)
        self._age = max(self._age, rank)
        parent = self._parent[victim]
        if parent is not None:
            self._children[parent] -= 1
            if parent in self._rank:
                self._rank[parent] = max(self._rank[parent], rank)
                self._offer(parent)
        return True

    def _offer(self, chunk: int) -> None:
        if not self._children.get(chunk):
            heapq.heappush(self._leaves, (self._rank[chunk], chunk))


def simulated(requests: Sequence[Sequence[int]], room: int, rank: Rank) -> float:
    """Share of chunks that look-ups find."""
    simulation = Simulation(room, rank)
    return sum(map(simulation.request, requests)) / sum(map(len, requests))
