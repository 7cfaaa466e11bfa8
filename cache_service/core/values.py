"""The nouns of the cache: what requests are made of and what decisions look like.

Frozen values only; no behaviour beyond what can be said about one value alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum


class Kind(IntEnum):
    """What an entry holds; numbers as in the protocol."""

    MAP = 1

    __hash__ = int.__hash__  # an enum's own is Python, and every look-up of a shelf would pay for it


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes [offset, offset + num_bytes) of the arena; the offset is aligned to 64."""

    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class EntryId:
    """One blob: the map of one chunk, one producer and one layer."""

    key: bytes
    kind: Kind
    producer: str
    layer: int


@dataclass(frozen=True, slots=True)
class NewEntry:
    """A blob to make room for; `parent` is the key of the chunk before it, None for the first of a chain."""

    key: bytes
    parent: bytes | None
    layer: int
    num_bytes: int


class ReservationState(Enum):
    """What became of a request for room."""

    RESERVED = "reserved"
    EXISTS = "exists"
    NO_ROOM = "no_room"


@dataclass(frozen=True, slots=True)
class Reservation:
    """Answer to one NewEntry; id 0 and no extent unless the state is RESERVED."""

    state: ReservationState
    id: int = 0
    extent: Extent | None = None


@dataclass(frozen=True, slots=True)
class Want:
    """Layers of one model that a chunk must have to count."""

    kind: Kind
    model: str
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Hit:
    """A run of `num_chunks` chunks of one producer for want number `want`.

    Attributes:
        extents: chunk by chunk, in each chunk in the order of the want's layers; empty without a lease.
        device_offsets: for each extent where its copy begins in the caller's device arena, 2**64 - 1 without one; empty
            if none has one.
    """

    want: int
    producer: str
    num_chunks: int
    extents: tuple[Extent, ...] = ()
    device_offsets: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Promotion:
    """Copies to be made for one chunk: where each blob lies, and where its copy begins in the device arena."""

    id: int
    arena_id: int
    pairs: tuple[tuple[Extent, int], ...]


@dataclass(frozen=True, slots=True)
class LookupResult:
    """Every run found, and the lease over all of their extents (0: nothing leased)."""

    hits: tuple[Hit, ...]
    lease_id: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceArenaStats:
    """Gauges and counters of one device arena; the words are those of the protocol's DeviceArenaStats."""

    arena_id: int
    arena_bytes: int
    used_bytes: int
    num_copies: int
    promoted_entries: int
    no_room_entries: int
    failed_entries: int
    dropped_entries: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """Gauges of this moment and counters of this boot; the words are those of the protocol's StatsResponse."""

    uptime_s: float
    arena_bytes: int
    used_bytes: int
    largest_free_bytes: int
    num_chunks: int
    num_entries: int
    num_reservations: int
    num_leases: int
    num_sessions: int
    lookups: int
    lookup_chunks: int
    hit_chunks: int
    evicted_entries: int
    expired_sessions: int
    device_arenas: tuple[DeviceArenaStats, ...] = ()


def model_of(producer: str) -> str:
    """The model id inside a producer id `<model>/<dtype>/tp<rank>of<size>`."""
    return producer.rsplit("/", 2)[0]
