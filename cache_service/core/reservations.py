"""Reservations: room that a session is writing a blob into, until it commits or aborts.

While one is open nobody else gets room for the same entry. So that a writer who went away cannot block a key, a
reservation ends with its session and also when its time is up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mapflow.cache_service.core.errors import NotFound
from mapflow.cache_service.core.holdings import Holdings
from mapflow.cache_service.core.pool import Pool
from mapflow.cache_service.core.values import EntryId, Extent, Reservation, ReservationState


@dataclass(frozen=True, slots=True)
class _Open:
    entry: EntryId
    extent: Extent


class Reservations:
    """All open reservations in one pool."""

    def __init__(self, pool: Pool, boot_tag: int) -> None:
        self._pool = pool
        self._open: Holdings[_Open] = Holdings(boot_tag)
        self._entries: set[EntryId] = set()

    def __len__(self) -> int:
        return len(self._open)

    def reserve(
        self, session_id: int, entry: EntryId, parent: bytes | None, num_bytes: int, expires_at: float
    ) -> Reservation:
        """Room for one blob, unless it is there already, is being written, or does not fit.

        Raises:
            InvalidRequest: the chunk is here with another parent, or would become its own ancestor.
        """
        if entry in self._entries or self._pool.has(entry):
            return Reservation(ReservationState.EXISTS)
        extent = self._pool.reserve(entry, parent, num_bytes)
        if extent is None:
            return Reservation(ReservationState.NO_ROOM)
        self._entries.add(entry)
        number = self._open.add(session_id, _Open(entry, extent), expires_at)
        return Reservation(ReservationState.RESERVED, number, extent)

    def check(self, session_id: int, reservation_id: int) -> Extent:
        """The room of a reservation that is still open.

        Raises:
            NotFound: the session holds no such reservation any more.
        """
        reservation = self._open.get(session_id, reservation_id)
        if reservation is None:
            raise NotFound(f"reservation {reservation_id} is not open in session {session_id}; reserve again")
        return reservation.extent

    def commit(self, session_id: int, reservation_ids: Sequence[int]) -> list[EntryId]:
        """Publish blobs, all or none; returns which.

        Raises:
            NotFound: one of the reservations is not open in this session; then nothing is published.
        """
        numbers = list(dict.fromkeys(reservation_ids))
        for number in numbers:
            self.check(session_id, number)
        committed = []
        for number in numbers:
            done = self._close(number)
            self._pool.commit(done.entry, done.extent)
            committed.append(done.entry)
        return committed

    def abort(self, session_id: int, reservation_ids: Sequence[int]) -> None:
        """Give room back; a reservation that has ended already is no error.

        Raises:
            NotFound: an id that was never given to this session; then none is aborted.
        """
        numbers = []
        for number in dict.fromkeys(reservation_ids):
            if self._open.get(session_id, number) is not None:
                numbers.append(number)
            elif not self._open.has_ended(number):
                raise NotFound(f"reservation {number} is not one of session {session_id}")
        self._abort(numbers)

    def end_session(self, session_id: int) -> None:
        """Abort every reservation of a session."""
        self._abort(self._open.of_session(session_id))

    def expire(self, now: float) -> None:
        """Abort every reservation whose time is up."""
        self._abort(self._open.due(now))

    def _abort(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            gone = self._close(number)
            self._pool.abort(gone.entry, gone.extent)

    def _close(self, number: int) -> _Open:
        reservation = self._open.remove(number)
        self._entries.discard(reservation.entry)
        return reservation
