"""What is in the arena: keeps index, room and eviction order in step.

A chunk is in the order exactly while it is in the index. Its holds there are its pins, its writers and its children.
Knows nothing of sessions, leases or time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mapflow.cache_service.core.eviction import EvictionOrder
from mapflow.cache_service.core.extents import ExtentAllocator
from mapflow.cache_service.core.index import PrefixIndex
from mapflow.cache_service.core.values import EntryId, Extent, Kind, Want


class Pool:
    """Committed and reserved blobs of one arena."""

    def __init__(self, num_bytes: int, on_evict: Callable[[bytes], object] = lambda chunk: None) -> None:
        """on_evict: told of every chunk that goes, after which the pool has no entries of it."""
        self.evicted_entries = 0
        self._on_evict = on_evict
        self._index = PrefixIndex()
        self._extents = ExtentAllocator(num_bytes)
        self._order = EvictionOrder()

    @property
    def num_bytes(self) -> int:
        """Bytes that can be handed out in all."""
        return self._extents.num_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes in committed or reserved extents, padding included."""
        return self._extents.used_bytes

    @property
    def largest_free_bytes(self) -> int:
        """Largest extent that could be handed out without eviction."""
        return self._extents.largest_free_bytes

    @property
    def num_chunks(self) -> int:
        """Chunks with at least one committed entry."""
        return self._index.num_chunks

    @property
    def num_entries(self) -> int:
        """Committed entries."""
        return self._index.num_entries

    def has(self, entry: EntryId) -> bool:
        """Whether the entry is committed."""
        return self._index.has(entry)

    def reserve(self, entry: EntryId, parent: bytes | None, num_bytes: int) -> Extent | None:
        """Make room for an entry, evicting as needed; None if there is none even so.

        The chunk is held from here on until `commit` or `abort`.

        Raises:
            InvalidRequest: the chunk is here with another parent, or would become its own ancestor.
        """
        self._open(entry.key, parent)
        extent = self._make_room(num_bytes)
        if extent is None:
            self._close(entry.key)
        return extent

    def commit(self, entry: EntryId, extent: Extent) -> None:
        """Publish what `reserve` made room for."""
        self._index.put(entry, extent)
        self._order.touch(entry.key)
        self._close(entry.key)

    def abort(self, entry: EntryId, extent: Extent) -> None:
        """Give back what `reserve` made room for."""
        self._extents.free(extent)
        self._close(entry.key)

    def runs(self, keys: Sequence[bytes], want: Want) -> list[tuple[str, list[Extent]]]:
        """Producers of the wanted model that have at least the first chunk, and where the entries of their run lie."""
        found = (
            (one, self.run(keys, want.kind, one, want.layers)) for one in self._index.producers(want.kind, want.model)
        )
        return [(producer, extents) for producer, extents in found if extents]

    def run(self, keys: Sequence[bytes], kind: Kind, producer: str, layers: Sequence[int]) -> list[Extent]:
        """Where the entries of a producer's run lie: chunk by chunk, in each in the order of `layers`."""
        return self._index.run(keys, kind, producer, layers)

    def pin(self, chunks: Sequence[bytes]) -> list[bytes]:
        """Mark a run of chunks as used now, and keep it from eviction; returns what is to be unpinned.

        That is the last one, as a rule: the others are its ancestors, which it holds, and whose last use is no earlier
        than its own once it is gone.
        """
        tops = self._index.tops(chunks)
        for chunk in tops:
            self._order.touch(chunk)
            self._order.hold(chunk)
        return tops

    def hold(self, chunk: bytes) -> None:
        """Keep a chunk from eviction, whenever it was used."""
        self._order.hold(chunk)

    def unpin(self, chunks: Sequence[bytes]) -> None:
        """Undo one `hold` of each, or a `pin` by what it returned."""
        for chunk in chunks:
            self._order.unhold(chunk)

    def _make_room(self, num_bytes: int) -> Extent | None:
        while (extent := self._extents.allocate(num_bytes)) is None:
            taken = self._order.take()
            if taken is None:
                return None
            self._evict(*taken)
        return extent

    def _evict(self, chunk: bytes, used_at: int) -> None:
        parent = self._index.parent(chunk)
        extents = self._index.drop(chunk)
        for extent in extents:
            self._extents.free(extent)
        self.evicted_entries += len(extents)
        self._on_evict(chunk)
        self._unhold_parent(parent, used_at)

    def _open(self, key: bytes, parent: bytes | None) -> None:
        if self._index.open(key, parent):
            self._order.add(key, holds=1 + self._index.num_children(key))
            if parent is not None and parent in self._index:
                self._order.hold(parent)
        else:
            self._order.hold(key)

    def _close(self, key: bytes) -> None:
        parent = self._index.parent(key)
        if self._index.close(key):
            self._order.remove(key)
            self._unhold_parent(parent)
        else:
            self._order.unhold(key)

    def _unhold_parent(self, parent: bytes | None, used_at: int = 0) -> None:
        if parent is not None and parent in self._index:
            self._order.unhold(parent, used_at)
