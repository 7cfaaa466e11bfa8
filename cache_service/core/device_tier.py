"""Copies of blobs in one device arena: where they begin, who may go first, who is reading.

The copies of one (chunk, kind, producer) come and go together. Which entries get one is `promotions.py`'s affair; each
of them lies in the host pool as well, so losing a copy loses nothing. Never touches a GPU.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import merge
from itertools import accumulate, repeat, takewhile

from mapflow.cache_service.core.extents import ExtentAllocator, padded
from mapflow.cache_service.core.values import DeviceArenaStats, Extent, Kind

FIRST_ARENA_ID = 2  # the host arena is number 1
NO_COPY = 2**64 - 1
UNREAD_S = 30.0  # copies that nobody has read yet are kept for as long


@dataclass(slots=True, eq=False)
class Copies:
    """The copies of one chunk, kind and producer.

    Attributes:
        offsets: layer -> where its copy begins; only those that can be read.
        in_flight: layer -> where its copy will begin.
        extents: the room of all of them; one extent for layers that were copied together.
        num_holds: leases that name a copy, and copies being made.
        unread_since: when the last of them was begun, unless a lease has named one since.
        last_use: turn in which nobody held them any more.
    """

    chunk: bytes
    shelf: tuple[Kind, str]
    offsets: dict[int, int] = field(default_factory=dict)
    in_flight: dict[int, int] = field(default_factory=dict)
    extents: list[Extent] = field(default_factory=list)
    num_holds: int = 0
    unread_since: float | None = None
    last_use: int = 0


@dataclass(frozen=True, slots=True)
class HeldCopies:
    """Copies that a lease names: their room is given to nobody else until `let_go`."""

    tier: DeviceTier
    copies: tuple[Copies, ...]

    def let_go(self) -> None:
        """Undo the one `DeviceTier.hold` that made it."""
        for copies in self.copies:
            self.tier.unhold(copies)


class DeviceTier:
    """All copies in one device arena.

    Copies without holds wait in one of two queues, read ones and unread ones, each by last use; so finding those that
    go first takes no search.
    """

    def __init__(self, arena_id: int, num_bytes: int) -> None:
        self.arena_id = arena_id
        self._extents = ExtentAllocator(num_bytes)
        self._chunks: dict[bytes, dict[tuple[Kind, str], Copies]] = {}
        self._read: OrderedDict[Copies, None] = OrderedDict()
        self._unread: OrderedDict[Copies, None] = OrderedDict()
        self._turn = 0
        self._num_copies = 0
        self._promoted = 0
        self._no_room = 0
        self._failed = 0
        self._dropped = 0

    def stats(self) -> DeviceArenaStats:
        """Counters and gauges."""
        return DeviceArenaStats(
            arena_id=self.arena_id,
            arena_bytes=self._extents.num_bytes,
            used_bytes=self._extents.used_bytes,
            num_copies=self._num_copies,
            promoted_entries=self._promoted,
            no_room_entries=self._no_room,
            failed_entries=self._failed,
            dropped_entries=self._dropped,
        )

    def find(
        self, keys: Sequence[bytes], kind: Kind, producer: str, layers: Sequence[int]
    ) -> tuple[list[int], list[Copies]]:
        """Where the copies of a run begin, as `Hit.device_offsets` has them, and which copies have any of them."""
        shelf, without = (kind, producer), [NO_COPY] * len(layers)
        offsets: list[int] = []
        found: list[Copies] = []
        for key in keys:
            copies = self._chunks.get(key, {}).get(shelf)
            column = without if copies is None else list(map(copies.offsets.get, layers, repeat(NO_COPY)))
            offsets += column
            if copies is not None and column != without:
                found.append(copies)
        return offsets, found

    def missing(self, key: bytes, kind: Kind, producer: str, layers: Sequence[int]) -> list[int]:
        """Those of the layers that have no copy and are not getting one."""
        copies = self._chunks.get(key, {}).get((kind, producer))
        if copies is None:
            return list(layers)
        return [layer for layer in layers if layer not in copies.offsets and layer not in copies.in_flight]

    def hold(self, found: Sequence[Copies]) -> HeldCopies:
        """Keep the room of copies for a lease that names them, and take them as read."""
        for copies in found:
            self._hold(copies)
            copies.unread_since = None
        return HeldCopies(self, tuple(found))

    def unhold(self, copies: Copies) -> None:
        """Undo one hold; without holds they are the last used ones."""
        assert copies.num_holds > 0, "unhold without hold"
        copies.num_holds -= 1
        if copies.num_holds:
            return
        if not copies.extents:
            self._forget(copies)
            return
        self._turn += 1
        copies.last_use = self._turn
        queue = self._read if copies.unread_since is None else self._unread
        queue[copies] = None

    def begin(
        self, key: bytes, kind: Kind, producer: str, sizes: Mapping[int, int], spared: Collection[bytes], now: float
    ) -> tuple[Copies, list[int]] | None:
        """Take room for copies of some layers of a chunk, all or none; they are held until `finish` or `fail`.

        Args:
            sizes: layer -> bytes; layers without a copy that are not getting one.
            spared: chunks whose copies must not make way, this one among them.

        Returns:
            The copies and where each will begin, in the order of `sizes`; None without room.
        """
        *starts, num_bytes = accumulate(map(padded, sizes.values()), initial=0)
        extent = self._make_room(num_bytes, spared, now)
        if extent is None:
            return None
        copies = self._chunks.setdefault(key, {}).setdefault((kind, producer), Copies(key, (kind, producer)))
        self._hold(copies)
        copies.extents.append(extent)
        copies.unread_since = now
        offsets = [extent.offset + start for start in starts]
        copies.in_flight.update(zip(sizes, offsets))
        return copies, offsets

    def finish(self, copies: Copies, layers: Sequence[int]) -> None:
        """From here on these copies can be read."""
        for layer in layers:
            copies.offsets[layer] = copies.in_flight.pop(layer)
        self._num_copies += len(layers)
        self._promoted += len(layers)
        self.unhold(copies)

    def fail(self, copies: Copies, layers: Sequence[int]) -> None:
        """Give the room of copies back that were begun together and not made."""
        begin = min(copies.in_flight.pop(layer) for layer in layers)
        extent = next(extent for extent in copies.extents if extent.offset == begin)
        copies.extents.remove(extent)
        self._extents.free(extent)
        self._failed += len(layers)
        self.unhold(copies)

    def count_no_room(self, num_entries: int) -> None:
        """Count entries that were not promoted."""
        self._no_room += num_entries

    def drop(self, key: bytes) -> None:
        """Give up every copy of a chunk, none of which is held."""
        for copies in list(self._chunks.get(key, {}).values()):
            self._drop(copies)

    def _make_room(self, num_bytes: int, spared: Collection[bytes], now: float) -> Extent | None:
        while (extent := self._extents.allocate(num_bytes)) is None:
            victims = self._victims(num_bytes, spared, now)
            if not victims:
                return None
            for copies in victims:
                self._drop(copies)
        return extent

    def _victims(self, num_bytes: int, spared: Collection[bytes], now: float) -> list[Copies]:
        """The least recently used copies that make up for `num_bytes`; none where they cannot."""
        victims: list[Copies] = []
        free = self._extents.num_bytes - self._extents.used_bytes
        for copies in self._by_last_use(now):
            if copies.chunk not in spared:
                victims.append(copies)
                free += sum(padded(extent.num_bytes) for extent in copies.extents)
                if free >= num_bytes:
                    return victims
        return []

    def _by_last_use(self, now: float) -> Iterator[Copies]:
        """Copies that nobody holds, without those that are still waiting for their first reader."""
        stale = takewhile(
            lambda copies: copies.unread_since is None or now - copies.unread_since > UNREAD_S, self._unread
        )
        return merge(self._read, stale, key=lambda copies: copies.last_use)

    def _hold(self, copies: Copies) -> None:
        copies.num_holds += 1
        self._read.pop(copies, None)
        self._unread.pop(copies, None)

    def _drop(self, copies: Copies) -> None:
        assert not copies.num_holds, "dropped while held"
        self._read.pop(copies, None)
        self._unread.pop(copies, None)
        for extent in copies.extents:
            self._extents.free(extent)
        self._num_copies -= len(copies.offsets)
        self._dropped += len(copies.offsets)
        self._forget(copies)

    def _forget(self, copies: Copies) -> None:
        shelves = self._chunks[copies.chunk]
        del shelves[copies.shelf]
        if not shelves:
            del self._chunks[copies.chunk]
