"""What is published: chunks chained by their parent's key, and in each the committed entries of every producer.

Answers which run of chunks a producer has. Knows where blobs lie only as values to hand back; decides nothing about
room, leases or eviction. A chunk whose parent was never published, or is gone, is as good as any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise

from mapflow.cache_service.core.errors import InvalidRequest
from mapflow.cache_service.core.values import EntryId, Extent, Kind, model_of


@dataclass(slots=True)
class _Chunk:
    parent: bytes | None
    num_writers: int = 0
    shelves: dict[tuple[Kind, str], dict[int, Extent]] = field(default_factory=dict)
    """(kind, producer) -> layer -> extent; no shelf is empty."""


class PrefixIndex:
    """Chunks that have at least one committed entry or one writer."""

    def __init__(self) -> None:
        self.num_chunks = 0
        """Chunks with at least one committed entry."""
        self.num_entries = 0
        self._chunks: dict[bytes, _Chunk] = {}
        self._children: dict[bytes, set[bytes]] = {}  # parent key -> keys of chunks here, whether or not the parent is
        self._producers: dict[tuple[Kind, str], dict[str, int]] = {}  # (kind, model) -> producer -> number of entries

    def __contains__(self, key: bytes) -> bool:
        return key in self._chunks

    def has(self, entry: EntryId) -> bool:
        """Whether the entry is committed."""
        chunk = self._chunks.get(entry.key)
        return chunk is not None and entry.layer in chunk.shelves.get((entry.kind, entry.producer), ())

    def parent(self, key: bytes) -> bytes | None:
        """Key of the chunk before this one, which may not be here itself."""
        return self._chunks[key].parent

    def num_children(self, key: bytes) -> int:
        """Number of chunks here that name this key as their parent."""
        return len(self._children.get(key, ()))

    def open(self, key: bytes, parent: bytes | None) -> bool:
        """Note that somebody is writing an entry of a chunk; True if the chunk is new here.

        Raises:
            InvalidRequest: the chunk is here with another parent, or would become its own ancestor.
        """
        chunk = self._chunks.get(key)
        if chunk is not None:
            if chunk.parent != parent:
                raise InvalidRequest(f"parent_key of chunk {key.hex()} is {_name(chunk.parent)}, got {_name(parent)}")
            chunk.num_writers += 1
            return False
        if parent is not None:
            self._refuse_cycle(key, parent)
            self._children.setdefault(parent, set()).add(key)
        self._chunks[key] = _Chunk(parent, num_writers=1)
        return True

    def close(self, key: bytes) -> bool:
        """Note that a writer is done; True if the chunk, being empty, is gone with it."""
        chunk = self._chunks[key]
        chunk.num_writers -= 1
        if chunk.num_writers or chunk.shelves:
            return False
        self._forget(key)
        return True

    def put(self, entry: EntryId, extent: Extent) -> None:
        """Publish an entry of a chunk that is open."""
        chunk = self._chunks[entry.key]
        self.num_chunks += not chunk.shelves
        self.num_entries += 1
        chunk.shelves.setdefault((entry.kind, entry.producer), {})[entry.layer] = extent
        counts = self._producers.setdefault((entry.kind, model_of(entry.producer)), {})
        counts[entry.producer] = counts.get(entry.producer, 0) + 1

    def drop(self, key: bytes) -> list[Extent]:
        """Remove a chunk that nobody writes, with all of its entries; returns where they lay."""
        chunk = self._chunks[key]
        assert not chunk.num_writers, "dropped under a writer"
        for (kind, producer), layers in chunk.shelves.items():
            self._uncount(kind, producer, len(layers))
        extents = [extent for layers in chunk.shelves.values() for extent in layers.values()]
        self.num_chunks -= 1
        self.num_entries -= len(extents)
        self._forget(key)
        return extents

    def producers(self, kind: Kind, model: str) -> list[str]:
        """Producers of a model that have any entry, in order of their first."""
        return list(self._producers.get((kind, model), ()))

    def run(self, keys: Sequence[bytes], kind: Kind, producer: str, layers: Sequence[int]) -> list[Extent]:
        """Where the entries of the leading `keys` lie whose `layers` that producer has all committed.

        Chunk by chunk, in each in the order of `layers`.
        """
        shelf, chunks = (kind, producer), self._chunks
        found: list[Extent] = []
        with suppress(KeyError):  # the first chunk that lacks something
            if len(layers) == 1:
                (layer,) = layers
                for key in keys:
                    found.append(chunks[key].shelves[shelf][layer])
            else:
                for key in keys:
                    own = chunks[key].shelves[shelf]
                    found += [own[layer] for layer in layers]
        return found

    def tops(self, keys: Sequence[bytes]) -> list[bytes]:
        """Those of a run of chunks here whose successor in it is none of their children; so the last one at least."""
        chunks = self._chunks
        return [key for key, after in pairwise(keys) if chunks[after].parent != key] + list(keys[-1:])

    def _refuse_cycle(self, key: bytes, parent: bytes) -> None:
        ancestor: bytes | None = parent
        while ancestor is not None:
            if ancestor == key:
                raise InvalidRequest(f"parent_key {parent.hex()} of chunk {key.hex()} descends from that chunk")
            if key not in self._children:
                return  # without descendants it has none among its ancestors
            chunk = self._chunks.get(ancestor)
            ancestor = None if chunk is None else chunk.parent

    def _forget(self, key: bytes) -> None:
        parent = self._chunks.pop(key).parent
        if parent is not None:
            siblings = self._children[parent]
            siblings.discard(key)
            if not siblings:
                del self._children[parent]

    def _uncount(self, kind: Kind, producer: str, number: int) -> None:
        counts = self._producers[kind, model_of(producer)]
        counts[producer] -= number
        if not counts[producer]:
            del counts[producer]
            if not counts:
                del self._producers[kind, model_of(producer)]


def _name(key: bytes | None) -> str:
    return "none" if key is None else key.hex()
