"""Promotions: blobs of the host pool that are being copied into a device arena.

Decides which entries get a copy and takes the room for it; until a promotion ends, its chunk cannot be evicted. Copying
itself is for whoever takes the promotions and reports how they ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from mapflow.cache_service.core.device_tier import NO_COPY, Copies, DeviceTier
from mapflow.cache_service.core.pool import Pool
from mapflow.cache_service.core.values import EntryId, Hit, Kind, Promotion, Want


@dataclass(frozen=True, slots=True)
class _Begun:
    tier: DeviceTier
    copies: Copies
    layers: tuple[int, ...]


class Promotions:
    """All promotions that have not ended."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._last_id = 0
        self._begun: dict[int, _Begun] = {}
        self._new: list[Promotion] = []

    def begin_hits(
        self, tier: DeviceTier, keys: Sequence[bytes], wants: Sequence[Want], hits: Sequence[Hit], now: float
    ) -> None:
        """Promote the entries of a lookup's runs that have no copy; what comes first in a run goes first."""
        for hit in hits:
            if hit.device_offsets and NO_COPY not in hit.device_offsets:
                continue
            kind, producer, layers = wants[hit.want].kind, hit.producer, wants[hit.want].layers
            run = keys[: hit.num_chunks]
            missing = ((key, without) for key in run if (without := tier.missing(key, kind, producer, layers)))
            self._begin(tier, missing, kind, producer, frozenset(keys), now)

    def begin_committed(
        self, tiers: Mapping[int, DeviceTier], entries: Sequence[tuple[EntryId, Iterable[int]]], now: float
    ) -> None:
        """Promote entries that were committed together, each into the device arenas of these ids."""
        spared = frozenset(entry.key for entry, _ in entries)
        groups: dict[tuple[int, Kind, str], dict[bytes, list[int]]] = {}
        for entry, arena_ids in entries:
            for arena_id in arena_ids:
                chunks = groups.setdefault((arena_id, entry.kind, entry.producer), {})
                chunks.setdefault(entry.key, []).append(entry.layer)
        for (arena_id, kind, producer), chunks in groups.items():
            self._begin(tiers[arena_id], chunks.items(), kind, producer, spared, now)

    def take(self) -> tuple[Promotion, ...]:
        """Promotions that have begun since the last call."""
        new, self._new = tuple(self._new), []
        return new

    def finish(self, promotion_id: int) -> None:
        """The copies are made: from here on they can be read."""
        begun = self._end(promotion_id)
        begun.tier.finish(begun.copies, begun.layers)

    def fail(self, promotion_id: int) -> None:
        """The copies were not made, and nothing writes into their room any more."""
        begun = self._end(promotion_id)
        begun.tier.fail(begun.copies, begun.layers)

    def _begin(
        self,
        tier: DeviceTier,
        wanted: Iterable[tuple[bytes, list[int]]],
        kind: Kind,
        producer: str,
        spared: Set[bytes],
        now: float,
    ) -> None:
        """Begin one promotion for each chunk; where there is no room for one, those behind it get none either."""
        is_full = False
        for key, layers in wanted:
            extents = self._pool.run([key], kind, producer, layers)
            sizes = {layer: extent.num_bytes for layer, extent in zip(layers, extents)}
            begun = None if is_full else tier.begin(key, kind, producer, sizes, spared, now)
            if begun is None:
                is_full = True
                tier.count_no_room(len(layers))
                continue
            copies, offsets = begun
            self._pool.hold(key)
            self._last_id += 1
            self._begun[self._last_id] = _Begun(tier, copies, tuple(layers))
            self._new.append(Promotion(self._last_id, tier.arena_id, tuple(zip(extents, offsets))))

    def _end(self, promotion_id: int) -> _Begun:
        begun = self._begun.pop(promotion_id)
        self._pool.unpin([begun.copies.chunk])
        return begun
