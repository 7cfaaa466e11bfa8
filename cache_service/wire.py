"""Protocol messages to core values and back; the only room that knows both.

Checks what is about the encoding itself (key lengths, missing parts, unknown enum numbers); the rest is the core's.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import cast

from mapflow.cache_service.core import peers, values
from mapflow.cache_service.core.errors import InvalidRequest
from mapflow.cache_service.core.limits import KEY_BYTES
from mapflow.cache_service.promoter import DeviceMemory
from mapflow.v1 import cache_pb2

ARENA_ID = 1
_STATES = {
    values.ReservationState.RESERVED: cache_pb2.RESERVATION_STATE_RESERVED,
    values.ReservationState.EXISTS: cache_pb2.RESERVATION_STATE_EXISTS,
    values.ReservationState.NO_ROOM: cache_pb2.RESERVATION_STATE_NO_ROOM,
}


def split_keys(keys: bytes, key_bytes: int) -> list[bytes]:
    """Keys that were concatenated."""
    if key_bytes not in KEY_BYTES:
        raise InvalidRequest(f"key_bytes must be 16 or 32, got {key_bytes}")
    if len(keys) % key_bytes:
        raise InvalidRequest(f"keys has {len(keys)} bytes, which is no multiple of key_bytes ({key_bytes})")
    return list(struct.unpack(f"{key_bytes}s" * (len(keys) // key_bytes), keys))


def kind(number: int) -> values.Kind:
    """What an entry holds."""
    try:
        return values.Kind(number)
    except ValueError:
        raise InvalidRequest(f"kind must be KIND_MAP ({cache_pb2.KIND_MAP}), got {number}") from None


def want(message: cache_pb2.Want) -> values.Want:
    """One want of a lookup."""
    return values.Want(kind(message.kind), message.model, tuple(message.layers))


def new_entry(message: cache_pb2.NewEntry) -> values.NewEntry:
    """One blob to make room for."""
    return values.NewEntry(message.key, message.parent_key or None, message.layer, message.num_bytes)


def extent(message: cache_pb2.Extent) -> values.Extent:
    """Bytes of the arena."""
    if message.arena_id != ARENA_ID:
        raise InvalidRequest(f"arena_id must be {ARENA_ID}, got {message.arena_id}")
    return values.Extent(message.offset, message.num_bytes)


def namespace(message: cache_pb2.Namespace) -> peers.Namespace:
    """What an engine's keys mean."""
    return peers.Namespace(
        format_version=message.format_version,
        tokenizer_fingerprint=message.tokenizer_fingerprint,
        chunk_tokens=message.chunk_tokens,
        block=message.block,
        tenant=message.tenant,
        key_hash=message.key_hash,
    )


def publisher(message: cache_pb2.OpenSession) -> peers.Publisher | None:
    """The producer that a session announces, if it does."""
    if not message.HasField("producer"):
        return None
    result = peers.Publisher(message.producer.id, namespace(message.namespace))
    if message.producer.model != result.model:
        raise InvalidRequest(f"producer.model is {message.producer.model!r} but producer.id says {result.model!r}")
    return result


def interests(message: cache_pb2.InterestSet) -> list[peers.Interest]:
    """What a session wants published."""
    return [
        peers.Interest(namespace(interest.namespace), interest.model, tuple(map(_layer_interest, interest.layers)))
        for interest in message.interests
    ]


def _layer_interest(message: cache_pb2.LayerInterest) -> peers.LayerInterest:
    return peers.LayerInterest(message.layer, tuple(message.heads), message.tile_top_p, message.tile_dtype)


def state_message(state: values.ReservationState) -> cache_pb2.ReservationState:
    """What became of a request for room."""
    return _STATES[state]


def extent_message(value: values.Extent) -> cache_pb2.Extent:
    """Bytes of the arena."""
    return cache_pb2.Extent(arena_id=ARENA_ID, offset=value.offset, num_bytes=value.num_bytes)


def lookup_response(result: values.LookupResult) -> cache_pb2.LookupResponse:
    """What was found; filled in place, which takes half as long as a message made for each part."""
    response = cache_pb2.LookupResponse(lease_id=result.lease_id)
    for hit in result.hits:
        _fill_hit(response.hits.add(), hit)
    return response


def _fill_hit(message: cache_pb2.Hit, hit: values.Hit) -> None:
    message.want = hit.want
    message.producer = hit.producer
    message.num_chunks = hit.num_chunks
    extents = message.extents
    extents.arena_ids.extend([ARENA_ID] * len(hit.extents))
    extents.offsets.extend([extent.offset for extent in hit.extents])
    extents.num_bytes.extend([extent.num_bytes for extent in hit.extents])
    message.device_offsets.extend(hit.device_offsets)


def device_arena_message(arena_id: int, memory: DeviceMemory) -> cache_pb2.DeviceArena:
    """A device arena, as clients learn of it."""
    return cache_pb2.DeviceArena(
        arena_id=arena_id, device_uuid=memory.device_uuid, num_bytes=memory.num_bytes, handle=memory.handle
    )


def reservation_message(value: values.Reservation) -> cache_pb2.Reservation:
    """The answer to one entry of a Reserve."""
    return cache_pb2.Reservation(
        reservation_id=value.id,
        extent=None if value.extent is None else extent_message(value.extent),
        state=state_message(value.state),
    )


def peers_message(value: peers.Peers) -> cache_pb2.Peers:
    """Who publishes and what is wanted."""
    return cache_pb2.Peers(
        publishers=publisher_messages(value.publishers), interests=map(_interest_message, value.interests)
    )


def publisher_messages(publishers: Iterable[peers.Publisher]) -> list[cache_pb2.Publisher]:
    """Who publishes."""
    return [
        cache_pb2.Publisher(
            producer=cache_pb2.Producer(id=publisher.producer, model=publisher.model),
            namespace=_namespace_message(publisher.namespace),
        )
        for publisher in publishers
    ]


def _namespace_message(value: peers.Namespace) -> cache_pb2.Namespace:
    return cache_pb2.Namespace(
        format_version=value.format_version,
        tokenizer_fingerprint=value.tokenizer_fingerprint,
        chunk_tokens=value.chunk_tokens,
        block=value.block,
        tenant=value.tenant,
        key_hash=cast(cache_pb2.KeyHash, value.key_hash),
    )


def _interest_message(value: peers.Interest) -> cache_pb2.Interest:
    return cache_pb2.Interest(
        namespace=_namespace_message(value.namespace),
        model=value.model,
        layers=[
            cache_pb2.LayerInterest(
                layer=layer.layer,
                heads=layer.heads,
                tile_top_p=layer.tile_top_p,
                tile_dtype=cast(cache_pb2.TileDtype, layer.tile_dtype),
            )
            for layer in value.layers
        ],
    )


def stats_message(
    stats: values.Stats,
    peers_now: peers.Peers,
    boot_id: bytes,
    arena: cache_pb2.Arena,
    device_arenas: Sequence[cache_pb2.DeviceArena],
) -> cache_pb2.StatsResponse:
    """Counters and gauges; `device_arenas` in the order of their numbers."""
    return cache_pb2.StatsResponse(
        boot_id=boot_id,
        uptime_s=stats.uptime_s,
        arenas=[
            cache_pb2.ArenaStats(arena=arena, used_bytes=stats.used_bytes, largest_free_bytes=stats.largest_free_bytes)
        ],
        num_chunks=stats.num_chunks,
        num_entries=stats.num_entries,
        num_reservations=stats.num_reservations,
        num_leases=stats.num_leases,
        num_sessions=stats.num_sessions,
        lookup_chunks=stats.lookup_chunks,
        hit_chunks=stats.hit_chunks,
        evicted_entries=stats.evicted_entries,
        publishers=publisher_messages(peers_now.publishers),
        device_arenas=[
            cache_pb2.DeviceArenaStats(
                arena=cache_pb2.DeviceArena(
                    arena_id=device_arena.arena_id,
                    device_uuid=device_arena.device_uuid,
                    num_bytes=device_arena.num_bytes,
                ),
                used_bytes=tier.used_bytes,
                num_copies=tier.num_copies,
                promoted_entries=tier.promoted_entries,
                no_room_entries=tier.no_room_entries,
                failed_entries=tier.failed_entries,
                dropped_entries=tier.dropped_entries,
            )
            for device_arena, tier in zip(device_arenas, stats.device_arenas, strict=True)
        ],
    )
