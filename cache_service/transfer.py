"""Bytes for clients that cannot map the arena: out of leased extents, and into reserved ones.

Before every piece it asks the core whether the lease or reservation is still in force, since an extent may belong to
somebody else a moment later. Nothing awaits between that question and the copy.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence

from mapflow.cache_service.arena import Arena
from mapflow.cache_service.core.cache import Cache
from mapflow.cache_service.core.errors import InvalidRequest
from mapflow.cache_service.core.values import Extent, Kind, NewEntry, Reservation, ReservationState

PIECE_BYTES = 1 << 20


class Transfer:
    """Copies between clients and the arena of one daemon."""

    def __init__(self, cache: Cache, arena: Arena, clock: Callable[[], float]) -> None:
        self._cache = cache
        self._arena = arena
        self._clock = clock

    async def fetch(
        self, session_id: int, lease_id: int, extents: Sequence[Extent]
    ) -> AsyncGenerator[tuple[int, bytes], None]:
        """The bytes of leased extents, as (index of the extent, next piece of at most 1 MiB).

        Raises:
            CacheError: the lease does not cover an extent, or ends in between.
        """
        self._cache.check_lease(session_id, lease_id, extents, self._clock())
        for index, extent in enumerate(extents):
            for start in range(0, extent.num_bytes, PIECE_BYTES):
                self._cache.check_lease(session_id, lease_id, (), self._clock())
                yield index, self._arena.read(extent.offset + start, min(PIECE_BYTES, extent.num_bytes - start))

    async def store(
        self, session_id: int, kind: Kind, producer: str, entry: NewEntry, pieces: AsyncIterator[bytes]
    ) -> ReservationState:
        """Reserve, write and commit one blob; anything that goes wrong in between aborts the reservation.

        Raises:
            CacheError: the request is refused, the pieces are not `entry.num_bytes` in all, or the session ends.
        """
        (reservation,) = self._cache.reserve(session_id, kind, producer, [entry], self._clock())
        if reservation.state is not ReservationState.RESERVED:
            return reservation.state
        try:
            await self._receive(session_id, reservation, pieces)
            self._cache.commit(session_id, [reservation.id], self._clock())
        except BaseException:
            if self._cache.is_open(session_id):
                self._cache.abort(session_id, [reservation.id], self._clock())
            raise
        return reservation.state

    async def _receive(self, session_id: int, reservation: Reservation, pieces: AsyncIterator[bytes]) -> None:
        assert reservation.extent is not None, "reserved without an extent"
        offset, num_bytes, received = reservation.extent.offset, reservation.extent.num_bytes, 0
        async for data in pieces:
            if received + len(data) > num_bytes:
                raise InvalidRequest(f"data exceeds the announced num_bytes ({num_bytes})")
            self._cache.check_reservation(session_id, reservation.id, self._clock())
            self._arena.write(offset + received, data)
            received += len(data)
        if received < num_bytes:
            raise InvalidRequest(f"data ended after {received} of the announced {num_bytes} bytes")
