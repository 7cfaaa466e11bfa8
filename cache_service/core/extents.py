"""Room in the arena: which bytes are free, and which extent a new blob gets.

Best fit with immediate coalescing. Deals in offsets only: never touches the memory, never knows what lies in it.
"""

from __future__ import annotations

from sortedcontainers import SortedList

from mapflow.cache_service.core.values import Extent

ALIGNMENT = 64


def padded(num_bytes: int) -> int:
    """Bytes that a blob of `num_bytes` takes up: the next multiple of 64."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class ExtentAllocator:
    """Disjoint extents of one arena, each aligned to 64 bytes.

    A gap is a maximal run of free bytes. Gaps are found by size (to allocate), by start and by end (to merge with a
    neighbour), so that both operations take O(log n) in the number of gaps.
    """

    def __init__(self, num_bytes: int) -> None:
        """Start with one gap over the whole arena.

        Args:
            num_bytes: arena size; a tail shorter than 64 bytes is never handed out.
        """
        self.num_bytes = num_bytes // ALIGNMENT * ALIGNMENT
        self.used_bytes = 0
        self._allocated: dict[int, int] = {}  # offset -> num_bytes as asked for
        self._gap_at: dict[int, int] = {}  # start -> end
        self._gap_before: dict[int, int] = {}  # end -> start
        self._gaps: SortedList = SortedList()  # (size, start)
        if self.num_bytes:
            self._add_gap(0, self.num_bytes)

    @property
    def largest_free_bytes(self) -> int:
        """Largest extent that `allocate` could return now."""
        return self._gaps[-1][0] if self._gaps else 0

    def allocate(self, num_bytes: int) -> Extent | None:
        """The lowest of the smallest gaps that fit, or None if none does.

        Args:
            num_bytes: size of the blob, at least 1; takes up the next multiple of 64.
        """
        if num_bytes < 1:
            raise ValueError(f"an extent needs at least 1 byte, got {num_bytes}")
        size = padded(num_bytes)
        place = self._gaps.bisect_left((size, 0))
        if place == len(self._gaps):
            return None
        _, start = self._gaps[place]
        end = self._gap_at[start]
        self._remove_gap(start, end)
        if start + size < end:
            self._add_gap(start + size, end)
        self._allocated[start] = num_bytes
        self.used_bytes += size
        return Extent(start, num_bytes)

    def free(self, extent: Extent) -> None:
        """Give an extent back and merge it with the gaps that it touches.

        Raises:
            KeyError: the extent is not one that `allocate` returned and that is still out.
        """
        if self._allocated.get(extent.offset) != extent.num_bytes:
            raise KeyError(f"{extent} is not allocated")
        del self._allocated[extent.offset]
        start, end = extent.offset, extent.offset + padded(extent.num_bytes)
        self.used_bytes -= end - start
        if (before := self._gap_before.get(start)) is not None:
            self._remove_gap(before, start)
            start = before
        if (after := self._gap_at.get(end)) is not None:
            self._remove_gap(end, after)
            end = after
        self._add_gap(start, end)

    def _add_gap(self, start: int, end: int) -> None:
        self._gap_at[start] = end
        self._gap_before[end] = start
        self._gaps.add((end - start, start))

    def _remove_gap(self, start: int, end: int) -> None:
        del self._gap_at[start]
        del self._gap_before[end]
        self._gaps.remove((end - start, start))
