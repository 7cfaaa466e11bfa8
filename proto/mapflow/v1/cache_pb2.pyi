from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    KIND_UNSPECIFIED: _ClassVar[Kind]
    KIND_MAP: _ClassVar[Kind]

class KeyHash(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    KEY_HASH_UNSPECIFIED: _ClassVar[KeyHash]
    KEY_HASH_XXH3_128: _ClassVar[KeyHash]
    KEY_HASH_SHA256: _ClassVar[KeyHash]

class TileDtype(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TILE_DTYPE_UNSPECIFIED: _ClassVar[TileDtype]
    TILE_DTYPE_E4M3: _ClassVar[TileDtype]
    TILE_DTYPE_BF16: _ClassVar[TileDtype]

class ReservationState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RESERVATION_STATE_UNSPECIFIED: _ClassVar[ReservationState]
    RESERVATION_STATE_RESERVED: _ClassVar[ReservationState]
    RESERVATION_STATE_EXISTS: _ClassVar[ReservationState]
    RESERVATION_STATE_NO_ROOM: _ClassVar[ReservationState]
KIND_UNSPECIFIED: Kind
KIND_MAP: Kind
KEY_HASH_UNSPECIFIED: KeyHash
KEY_HASH_XXH3_128: KeyHash
KEY_HASH_SHA256: KeyHash
TILE_DTYPE_UNSPECIFIED: TileDtype
TILE_DTYPE_E4M3: TileDtype
TILE_DTYPE_BF16: TileDtype
RESERVATION_STATE_UNSPECIFIED: ReservationState
RESERVATION_STATE_RESERVED: ReservationState
RESERVATION_STATE_EXISTS: ReservationState
RESERVATION_STATE_NO_ROOM: ReservationState

class Namespace(_message.Message):
    __slots__ = ("format_version", "tokenizer_fingerprint", "chunk_tokens", "block", "tenant", "key_hash")
    FORMAT_VERSION_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    KEY_HASH_FIELD_NUMBER: _ClassVar[int]
    format_version: int
    tokenizer_fingerprint: str
    chunk_tokens: int
    block: int
    tenant: str
    key_hash: KeyHash
    def __init__(self, format_version: _Optional[int] = ..., tokenizer_fingerprint: _Optional[str] = ..., chunk_tokens: _Optional[int] = ..., block: _Optional[int] = ..., tenant: _Optional[str] = ..., key_hash: _Optional[_Union[KeyHash, str]] = ...) -> None: ...

class Producer(_message.Message):
    __slots__ = ("id", "model")
    ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    id: str
    model: str
    def __init__(self, id: _Optional[str] = ..., model: _Optional[str] = ...) -> None: ...

class Arena(_message.Message):
    __slots__ = ("id", "segment_name", "num_bytes")
    ID_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_NAME_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    id: int
    segment_name: str
    num_bytes: int
    def __init__(self, id: _Optional[int] = ..., segment_name: _Optional[str] = ..., num_bytes: _Optional[int] = ...) -> None: ...

class DeviceArena(_message.Message):
    __slots__ = ("arena_id", "device_uuid", "num_bytes", "handle")
    ARENA_ID_FIELD_NUMBER: _ClassVar[int]
    DEVICE_UUID_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    arena_id: int
    device_uuid: str
    num_bytes: int
    handle: bytes
    def __init__(self, arena_id: _Optional[int] = ..., device_uuid: _Optional[str] = ..., num_bytes: _Optional[int] = ..., handle: _Optional[bytes] = ...) -> None: ...

class Extent(_message.Message):
    __slots__ = ("arena_id", "offset", "num_bytes")
    ARENA_ID_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    arena_id: int
    offset: int
    num_bytes: int
    def __init__(self, arena_id: _Optional[int] = ..., offset: _Optional[int] = ..., num_bytes: _Optional[int] = ...) -> None: ...

class Extents(_message.Message):
    __slots__ = ("arena_ids", "offsets", "num_bytes")
    ARENA_IDS_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    arena_ids: _containers.RepeatedScalarFieldContainer[int]
    offsets: _containers.RepeatedScalarFieldContainer[int]
    num_bytes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, arena_ids: _Optional[_Iterable[int]] = ..., offsets: _Optional[_Iterable[int]] = ..., num_bytes: _Optional[_Iterable[int]] = ...) -> None: ...

class HandshakeRequest(_message.Message):
    __slots__ = ("format_versions",)
    FORMAT_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    format_versions: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, format_versions: _Optional[_Iterable[int]] = ...) -> None: ...

class HandshakeResponse(_message.Message):
    __slots__ = ("server_version", "boot_id", "arenas", "session_timeout_s", "max_lease_s", "max_keys", "max_blob_bytes", "device_arenas")
    SERVER_VERSION_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    ARENAS_FIELD_NUMBER: _ClassVar[int]
    SESSION_TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    MAX_LEASE_S_FIELD_NUMBER: _ClassVar[int]
    MAX_KEYS_FIELD_NUMBER: _ClassVar[int]
    MAX_BLOB_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_ARENAS_FIELD_NUMBER: _ClassVar[int]
    server_version: str
    boot_id: bytes
    arenas: _containers.RepeatedCompositeFieldContainer[Arena]
    session_timeout_s: float
    max_lease_s: float
    max_keys: int
    max_blob_bytes: int
    device_arenas: _containers.RepeatedCompositeFieldContainer[DeviceArena]
    def __init__(self, server_version: _Optional[str] = ..., boot_id: _Optional[bytes] = ..., arenas: _Optional[_Iterable[_Union[Arena, _Mapping]]] = ..., session_timeout_s: _Optional[float] = ..., max_lease_s: _Optional[float] = ..., max_keys: _Optional[int] = ..., max_blob_bytes: _Optional[int] = ..., device_arenas: _Optional[_Iterable[_Union[DeviceArena, _Mapping]]] = ...) -> None: ...

class SessionRequest(_message.Message):
    __slots__ = ("open", "heartbeat", "interests")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    INTERESTS_FIELD_NUMBER: _ClassVar[int]
    open: OpenSession
    heartbeat: Heartbeat
    interests: InterestSet
    def __init__(self, open: _Optional[_Union[OpenSession, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., interests: _Optional[_Union[InterestSet, _Mapping]] = ...) -> None: ...

class OpenSession(_message.Message):
    __slots__ = ("client_name", "namespace", "producer", "device_arena_id")
    CLIENT_NAME_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    PRODUCER_FIELD_NUMBER: _ClassVar[int]
    DEVICE_ARENA_ID_FIELD_NUMBER: _ClassVar[int]
    client_name: str
    namespace: Namespace
    producer: Producer
    device_arena_id: int
    def __init__(self, client_name: _Optional[str] = ..., namespace: _Optional[_Union[Namespace, _Mapping]] = ..., producer: _Optional[_Union[Producer, _Mapping]] = ..., device_arena_id: _Optional[int] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Interest(_message.Message):
    __slots__ = ("namespace", "model", "layers")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    namespace: Namespace
    model: str
    layers: _containers.RepeatedCompositeFieldContainer[LayerInterest]
    def __init__(self, namespace: _Optional[_Union[Namespace, _Mapping]] = ..., model: _Optional[str] = ..., layers: _Optional[_Iterable[_Union[LayerInterest, _Mapping]]] = ...) -> None: ...

class LayerInterest(_message.Message):
    __slots__ = ("layer", "heads", "tile_top_p", "tile_dtype")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    HEADS_FIELD_NUMBER: _ClassVar[int]
    TILE_TOP_P_FIELD_NUMBER: _ClassVar[int]
    TILE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    layer: int
    heads: _containers.RepeatedScalarFieldContainer[int]
    tile_top_p: float
    tile_dtype: TileDtype
    def __init__(self, layer: _Optional[int] = ..., heads: _Optional[_Iterable[int]] = ..., tile_top_p: _Optional[float] = ..., tile_dtype: _Optional[_Union[TileDtype, str]] = ...) -> None: ...

class InterestSet(_message.Message):
    __slots__ = ("interests",)
    INTERESTS_FIELD_NUMBER: _ClassVar[int]
    interests: _containers.RepeatedCompositeFieldContainer[Interest]
    def __init__(self, interests: _Optional[_Iterable[_Union[Interest, _Mapping]]] = ...) -> None: ...

class SessionResponse(_message.Message):
    __slots__ = ("opened", "heartbeat", "peers")
    OPENED_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    opened: SessionOpened
    heartbeat: Heartbeat
    peers: Peers
    def __init__(self, opened: _Optional[_Union[SessionOpened, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., peers: _Optional[_Union[Peers, _Mapping]] = ...) -> None: ...

class SessionOpened(_message.Message):
    __slots__ = ("session_id", "boot_id")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    boot_id: bytes
    def __init__(self, session_id: _Optional[int] = ..., boot_id: _Optional[bytes] = ...) -> None: ...

class Peers(_message.Message):
    __slots__ = ("publishers", "interests")
    PUBLISHERS_FIELD_NUMBER: _ClassVar[int]
    INTERESTS_FIELD_NUMBER: _ClassVar[int]
    publishers: _containers.RepeatedCompositeFieldContainer[Publisher]
    interests: _containers.RepeatedCompositeFieldContainer[Interest]
    def __init__(self, publishers: _Optional[_Iterable[_Union[Publisher, _Mapping]]] = ..., interests: _Optional[_Iterable[_Union[Interest, _Mapping]]] = ...) -> None: ...

class Publisher(_message.Message):
    __slots__ = ("producer", "namespace")
    PRODUCER_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    producer: Producer
    namespace: Namespace
    def __init__(self, producer: _Optional[_Union[Producer, _Mapping]] = ..., namespace: _Optional[_Union[Namespace, _Mapping]] = ...) -> None: ...

class LookupRequest(_message.Message):
    __slots__ = ("session_id", "keys", "key_bytes", "wants", "lease_s", "device_arena_id")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    KEY_BYTES_FIELD_NUMBER: _ClassVar[int]
    WANTS_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    DEVICE_ARENA_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    keys: bytes
    key_bytes: int
    wants: _containers.RepeatedCompositeFieldContainer[Want]
    lease_s: float
    device_arena_id: int
    def __init__(self, session_id: _Optional[int] = ..., keys: _Optional[bytes] = ..., key_bytes: _Optional[int] = ..., wants: _Optional[_Iterable[_Union[Want, _Mapping]]] = ..., lease_s: _Optional[float] = ..., device_arena_id: _Optional[int] = ...) -> None: ...

class Want(_message.Message):
    __slots__ = ("kind", "model", "layers")
    KIND_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    kind: Kind
    model: str
    layers: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, kind: _Optional[_Union[Kind, str]] = ..., model: _Optional[str] = ..., layers: _Optional[_Iterable[int]] = ...) -> None: ...

class LookupResponse(_message.Message):
    __slots__ = ("hits", "lease_id")
    HITS_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    hits: _containers.RepeatedCompositeFieldContainer[Hit]
    lease_id: int
    def __init__(self, hits: _Optional[_Iterable[_Union[Hit, _Mapping]]] = ..., lease_id: _Optional[int] = ...) -> None: ...

class Hit(_message.Message):
    __slots__ = ("want", "producer", "num_chunks", "extents", "device_offsets")
    WANT_FIELD_NUMBER: _ClassVar[int]
    PRODUCER_FIELD_NUMBER: _ClassVar[int]
    NUM_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    EXTENTS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_OFFSETS_FIELD_NUMBER: _ClassVar[int]
    want: int
    producer: str
    num_chunks: int
    extents: Extents
    device_offsets: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, want: _Optional[int] = ..., producer: _Optional[str] = ..., num_chunks: _Optional[int] = ..., extents: _Optional[_Union[Extents, _Mapping]] = ..., device_offsets: _Optional[_Iterable[int]] = ...) -> None: ...

class CallRequest(_message.Message):
    __slots__ = ("lookup", "release", "reserve", "commit", "abort")
    LOOKUP_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    RESERVE_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    lookup: LookupRequest
    release: ReleaseRequest
    reserve: ReserveRequest
    commit: CommitRequest
    abort: AbortRequest
    def __init__(self, lookup: _Optional[_Union[LookupRequest, _Mapping]] = ..., release: _Optional[_Union[ReleaseRequest, _Mapping]] = ..., reserve: _Optional[_Union[ReserveRequest, _Mapping]] = ..., commit: _Optional[_Union[CommitRequest, _Mapping]] = ..., abort: _Optional[_Union[AbortRequest, _Mapping]] = ...) -> None: ...

class CallResponse(_message.Message):
    __slots__ = ("code", "message", "lookup", "reserve")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    LOOKUP_FIELD_NUMBER: _ClassVar[int]
    RESERVE_FIELD_NUMBER: _ClassVar[int]
    code: int
    message: str
    lookup: LookupResponse
    reserve: ReserveResponse
    def __init__(self, code: _Optional[int] = ..., message: _Optional[str] = ..., lookup: _Optional[_Union[LookupResponse, _Mapping]] = ..., reserve: _Optional[_Union[ReserveResponse, _Mapping]] = ...) -> None: ...

class ReserveRequest(_message.Message):
    __slots__ = ("session_id", "kind", "producer", "entries")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    PRODUCER_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    kind: Kind
    producer: str
    entries: _containers.RepeatedCompositeFieldContainer[NewEntry]
    def __init__(self, session_id: _Optional[int] = ..., kind: _Optional[_Union[Kind, str]] = ..., producer: _Optional[str] = ..., entries: _Optional[_Iterable[_Union[NewEntry, _Mapping]]] = ...) -> None: ...

class NewEntry(_message.Message):
    __slots__ = ("key", "parent_key", "layer", "num_bytes")
    KEY_FIELD_NUMBER: _ClassVar[int]
    PARENT_KEY_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    key: bytes
    parent_key: bytes
    layer: int
    num_bytes: int
    def __init__(self, key: _Optional[bytes] = ..., parent_key: _Optional[bytes] = ..., layer: _Optional[int] = ..., num_bytes: _Optional[int] = ...) -> None: ...

class ReserveResponse(_message.Message):
    __slots__ = ("reservations",)
    RESERVATIONS_FIELD_NUMBER: _ClassVar[int]
    reservations: _containers.RepeatedCompositeFieldContainer[Reservation]
    def __init__(self, reservations: _Optional[_Iterable[_Union[Reservation, _Mapping]]] = ...) -> None: ...

class Reservation(_message.Message):
    __slots__ = ("reservation_id", "extent", "state")
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    EXTENT_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    reservation_id: int
    extent: Extent
    state: ReservationState
    def __init__(self, reservation_id: _Optional[int] = ..., extent: _Optional[_Union[Extent, _Mapping]] = ..., state: _Optional[_Union[ReservationState, str]] = ...) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ("session_id", "reservation_ids")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_IDS_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    reservation_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, session_id: _Optional[int] = ..., reservation_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class CommitResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("session_id", "reservation_ids")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_IDS_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    reservation_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, session_id: _Optional[int] = ..., reservation_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("session_id", "lease_ids")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    lease_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, session_id: _Optional[int] = ..., lease_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("session_id", "lease_id", "extents")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    EXTENTS_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    lease_id: int
    extents: _containers.RepeatedCompositeFieldContainer[Extent]
    def __init__(self, session_id: _Optional[int] = ..., lease_id: _Optional[int] = ..., extents: _Optional[_Iterable[_Union[Extent, _Mapping]]] = ...) -> None: ...

class FetchResponse(_message.Message):
    __slots__ = ("index", "data")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    index: int
    data: bytes
    def __init__(self, index: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class StoreRequest(_message.Message):
    __slots__ = ("header", "data")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    header: StoreHeader
    data: bytes
    def __init__(self, header: _Optional[_Union[StoreHeader, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...

class StoreHeader(_message.Message):
    __slots__ = ("session_id", "kind", "producer", "entry")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    PRODUCER_FIELD_NUMBER: _ClassVar[int]
    ENTRY_FIELD_NUMBER: _ClassVar[int]
    session_id: int
    kind: Kind
    producer: str
    entry: NewEntry
    def __init__(self, session_id: _Optional[int] = ..., kind: _Optional[_Union[Kind, str]] = ..., producer: _Optional[str] = ..., entry: _Optional[_Union[NewEntry, _Mapping]] = ...) -> None: ...

class StoreResponse(_message.Message):
    __slots__ = ("state",)
    STATE_FIELD_NUMBER: _ClassVar[int]
    state: ReservationState
    def __init__(self, state: _Optional[_Union[ReservationState, str]] = ...) -> None: ...

class StatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatsResponse(_message.Message):
    __slots__ = ("boot_id", "uptime_s", "arenas", "num_chunks", "num_entries", "num_reservations", "num_leases", "num_sessions", "lookup_chunks", "hit_chunks", "evicted_entries", "publishers", "device_arenas")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    ARENAS_FIELD_NUMBER: _ClassVar[int]
    NUM_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    NUM_ENTRIES_FIELD_NUMBER: _ClassVar[int]
    NUM_RESERVATIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_LEASES_FIELD_NUMBER: _ClassVar[int]
    NUM_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    LOOKUP_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    HIT_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    EVICTED_ENTRIES_FIELD_NUMBER: _ClassVar[int]
    PUBLISHERS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_ARENAS_FIELD_NUMBER: _ClassVar[int]
    boot_id: bytes
    uptime_s: float
    arenas: _containers.RepeatedCompositeFieldContainer[ArenaStats]
    num_chunks: int
    num_entries: int
    num_reservations: int
    num_leases: int
    num_sessions: int
    lookup_chunks: int
    hit_chunks: int
    evicted_entries: int
    publishers: _containers.RepeatedCompositeFieldContainer[Publisher]
    device_arenas: _containers.RepeatedCompositeFieldContainer[DeviceArenaStats]
    def __init__(self, boot_id: _Optional[bytes] = ..., uptime_s: _Optional[float] = ..., arenas: _Optional[_Iterable[_Union[ArenaStats, _Mapping]]] = ..., num_chunks: _Optional[int] = ..., num_entries: _Optional[int] = ..., num_reservations: _Optional[int] = ..., num_leases: _Optional[int] = ..., num_sessions: _Optional[int] = ..., lookup_chunks: _Optional[int] = ..., hit_chunks: _Optional[int] = ..., evicted_entries: _Optional[int] = ..., publishers: _Optional[_Iterable[_Union[Publisher, _Mapping]]] = ..., device_arenas: _Optional[_Iterable[_Union[DeviceArenaStats, _Mapping]]] = ...) -> None: ...

class ArenaStats(_message.Message):
    __slots__ = ("arena", "used_bytes", "largest_free_bytes")
    ARENA_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    LARGEST_FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    arena: Arena
    used_bytes: int
    largest_free_bytes: int
    def __init__(self, arena: _Optional[_Union[Arena, _Mapping]] = ..., used_bytes: _Optional[int] = ..., largest_free_bytes: _Optional[int] = ...) -> None: ...

class DeviceArenaStats(_message.Message):
    __slots__ = ("arena", "used_bytes", "num_copies", "promoted_entries", "no_room_entries", "failed_entries", "dropped_entries")
    ARENA_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_COPIES_FIELD_NUMBER: _ClassVar[int]
    PROMOTED_ENTRIES_FIELD_NUMBER: _ClassVar[int]
    NO_ROOM_ENTRIES_FIELD_NUMBER: _ClassVar[int]
    FAILED_ENTRIES_FIELD_NUMBER: _ClassVar[int]
    DROPPED_ENTRIES_FIELD_NUMBER: _ClassVar[int]
    arena: DeviceArena
    used_bytes: int
    num_copies: int
    promoted_entries: int
    no_room_entries: int
    failed_entries: int
    dropped_entries: int
    def __init__(self, arena: _Optional[_Union[DeviceArena, _Mapping]] = ..., used_bytes: _Optional[int] = ..., num_copies: _Optional[int] = ..., promoted_entries: _Optional[int] = ..., no_room_entries: _Optional[int] = ..., failed_entries: _Optional[int] = ..., dropped_entries: _Optional[int] = ...) -> None: ...
