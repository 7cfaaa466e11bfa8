"""The values that engines and the daemon exchange, as plain frozen objects: no generated message leaves this library.

All of them pickle, so that a scheduler can hand them to its workers. This room translates and checks; it never sends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import repeat
from typing import NamedTuple, TypeVar

from mapflow.connector.namespace import Namespace
from mapflow.v1 import cache_pb2

NO_COPY = 2**64 - 1  # a device offset where there is no copy

_T = TypeVar("_T")


class Kind(IntEnum):
    """What an entry holds."""

    MAP = cache_pb2.KIND_MAP


class TileDtype(IntEnum):
    """Storage of a map's tiles."""

    UNSPECIFIED = cache_pb2.TILE_DTYPE_UNSPECIFIED
    E4M3 = cache_pb2.TILE_DTYPE_E4M3
    BF16 = cache_pb2.TILE_DTYPE_BF16


class ReservationState(IntEnum):
    """What the daemon says about one entry that somebody wants to publish."""

    RESERVED = cache_pb2.RESERVATION_STATE_RESERVED
    EXISTS = cache_pb2.RESERVATION_STATE_EXISTS
    NO_ROOM = cache_pb2.RESERVATION_STATE_NO_ROOM


class Extent(NamedTuple):
    """Bytes [offset, offset + num_bytes) of an arena."""

    arena_id: int
    offset: int
    num_bytes: int


class DeviceArena(NamedTuple):
    """Memory on a GPU with copies of blobs. handle: what another process opens it by."""

    arena_id: int
    num_bytes: int
    handle: bytes


@dataclass(frozen=True, slots=True)
class Producer:
    """An engine that publishes.

    Attributes:
        id: `<model id>/<dtype>/tp<rank>of<size>`.
        model: `<name>@<revision>`.
    """

    id: str
    model: str

    @classmethod
    def of(cls, model: str, dtype: str, tp_rank: int = 0, tp_size: int = 1) -> Producer:
        """The producer that holds shard `tp_rank` of `tp_size` of a model's heads."""
        return cls(id=f"{model}/{dtype}/tp{tp_rank}of{tp_size}", model=model)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInterest:
    """What a receiver wants from one sender layer.

    Attributes:
        heads: sender heads, ascending; empty means all.
        tile_top_p: mass that the kept tiles of a block row hold, in (0, 1]; 0 means block masses only.
        tile_dtype: storage of the tiles.
    """

    layer: int
    heads: tuple[int, ...] = ()
    tile_top_p: float = 0.0
    tile_dtype: TileDtype = TileDtype.UNSPECIFIED


@dataclass(frozen=True, slots=True, kw_only=True)
class Interest:
    """What one receiver wants from one sender model."""

    namespace: Namespace
    model: str
    layers: tuple[LayerInterest, ...]

    def to_proto(self) -> cache_pb2.Interest:
        """The message that registers it."""
        layers = [
            cache_pb2.LayerInterest(
                layer=layer.layer, heads=layer.heads, tile_top_p=layer.tile_top_p, tile_dtype=layer.tile_dtype.value
            )
            for layer in self.layers
        ]
        return cache_pb2.Interest(namespace=self.namespace.to_proto(), model=self.model, layers=layers)

    @classmethod
    def from_proto(cls, message: cache_pb2.Interest) -> Interest:
        """Read a peer's interest.

        Raises:
            ValueError: values that no version of ours would send.
        """
        layers = []
        for layer in message.layers:
            if not 0.0 <= layer.tile_top_p <= 1.0:
                raise ValueError(f"tile_top_p must be in [0, 1], got {layer.tile_top_p}")
            layers.append(
                LayerInterest(
                    layer=layer.layer,
                    heads=tuple(layer.heads),
                    tile_top_p=layer.tile_top_p,
                    tile_dtype=TileDtype(layer.tile_dtype),
                )
            )
        return cls(namespace=Namespace.from_proto(message.namespace), model=message.model, layers=tuple(layers))


@dataclass(frozen=True, slots=True, kw_only=True)
class Publisher:
    """An open session that publishes, and the namespace of its keys."""

    producer: Producer
    namespace: Namespace


@dataclass(frozen=True, slots=True, kw_only=True)
class Peers:
    """Everyone who publishes or wants something on this node; includes this client.

    Attributes:
        malformed: how many peers were left out because they cannot be read.
    """

    publishers: tuple[Publisher, ...] = ()
    interests: tuple[Interest, ...] = ()
    malformed: int = 0

    @classmethod
    def from_proto(cls, message: cache_pb2.Peers) -> Peers:
        """Read the daemon's list; leaves out what cannot be read."""
        publishers, interests, malformed = [], [], 0
        for publisher in message.publishers:
            try:
                namespace = Namespace.from_proto(publisher.namespace)
            except ValueError:
                malformed += 1
                continue
            producer = Producer(id=publisher.producer.id, model=publisher.producer.model)
            publishers.append(Publisher(producer=producer, namespace=namespace))
        for interest in message.interests:
            try:
                interests.append(Interest.from_proto(interest))
            except ValueError:
                malformed += 1
        return cls(publishers=tuple(publishers), interests=tuple(interests), malformed=malformed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """A model and the layers that a chunk must have to count, in the order in which extents are wanted."""

    model: str
    layers: tuple[int, ...]
    kind: Kind = Kind.MAP


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The right to read a result's extents for a while.

    Attributes:
        boot_id: start of the daemon that gave it.
        session_id: session that owns it.
        lease_id: the daemon's number for it.
        expires_at: end of its life, in seconds of `time.monotonic()` on this host; never later than the daemon's own.
    """

    boot_id: bytes
    session_id: int
    lease_id: int
    expires_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """The longest run of chunks, from the first key on, that one producer has.

    Attributes:
        want: index into the wants of the lookup.
        producer: producer id.
        num_chunks: length of the run.
        extents: [num_chunks][len(want.layers)]; empty without a lease.
        device_offsets: alike, where their copies begin in the device arena, NO_COPY where there is none; empty where
            none has one.
    """

    want: int
    producer: str
    num_chunks: int
    extents: tuple[tuple[Extent, ...], ...]
    device_offsets: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupResult:
    """The answer to a lookup; a miss has no hits and no lease. device_arena_id: what device offsets refer to."""

    boot_id: bytes
    lease: Lease | None
    hits: tuple[Hit, ...]
    device_arena_id: int = 0

    @classmethod
    def from_proto(
        cls,
        message: cache_pb2.LookupResponse,
        wants: Sequence[Want],
        num_keys: int,
        boot_id: bytes,
        lease: Lease | None,
        device_arena_id: int = 0,
    ) -> LookupResult:
        """Read an answer.

        Raises:
            ValueError: an answer that does not fit the question.
        """
        hits = []
        for hit in message.hits:
            if hit.want >= len(wants) or not 0 < hit.num_chunks <= num_keys:
                raise ValueError(f"a hit of {hit.num_chunks} of {num_keys} chunks for want {hit.want} of {len(wants)}")
            width = len(wants[hit.want].layers)
            extents = hit.extents
            columns = [list(one) for one in (extents.arena_ids, extents.offsets, extents.num_bytes)]
            if {len(column) for column in columns} != {hit.num_chunks * width if lease else 0}:
                raise ValueError(f"{len(columns[1])} extents for {hit.num_chunks} chunks of {width} layers")
            # `Extent(...)` takes four times as long, on the way to a request's first token
            flat: list[Extent] = list(map(tuple.__new__, repeat(Extent), zip(*columns)))
            copies = list(hit.device_offsets)
            if copies and len(copies) != len(flat):
                raise ValueError(f"{len(copies)} device offsets for {len(flat)} extents of {hit.num_chunks} chunks")
            hits.append(
                Hit(
                    want=hit.want,
                    producer=hit.producer,
                    num_chunks=hit.num_chunks,
                    extents=_rows(flat, width),
                    device_offsets=_rows(copies, width),
                )
            )
        return cls(boot_id=boot_id, lease=lease, hits=tuple(hits), device_arena_id=device_arena_id)


def _rows(flat: Sequence[_T], width: int) -> tuple[tuple[_T, ...], ...]:
    return tuple(zip(*[iter(flat)] * width)) if width else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NewEntry:
    """A blob that somebody is about to write.

    Attributes:
        key: chunk key.
        parent_key: key of the chunk before it; empty for the first of a chain.
        layer: sender layer.
        num_bytes: exact size of the blob.
    """

    key: bytes
    parent_key: bytes
    layer: int
    num_bytes: int

    def to_proto(self) -> cache_pb2.NewEntry:
        """The message that asks for its room."""
        return cache_pb2.NewEntry(key=self.key, parent_key=self.parent_key, layer=self.layer, num_bytes=self.num_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingBlob(NewEntry):
    """A blob to publish.

    Attributes:
        write: fills a memoryview of `num_bytes` bytes and returns how many it wrote.
        begin: called with the same memoryview before, for all blobs of a batch in turn: starts what takes time.
        end: called after all those, also where one failed: returns when what was started is over.
    """

    write: Callable[[memoryview], int]
    begin: Callable[[memoryview], None] = lambda view: None
    end: Callable[[], None] = lambda: None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """The daemon's answer for one entry; room to write only when RESERVED, and only in the boot and session named."""

    boot_id: bytes
    session_id: int
    reservation_id: int
    state: ReservationState
    extent: Extent


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishReport:
    """What became of a batch of blobs, in blobs."""

    published: int = 0
    existed: int = 0
    no_room: int = 0
