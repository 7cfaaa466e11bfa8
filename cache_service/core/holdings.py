"""Things that a session holds for a while: each has an id, one owner and an end.

Leases and reservations are such things. This room keeps track of which are in force and which are due; what giving one
up means is for its caller.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Generic, TypeVar

from mapflow.cache_service.core.ids import IdSequence

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Holding(Generic[T]):
    session_id: int
    value: T


class Holdings(Generic[T]):
    """Values by id, by session and by expiry; every operation takes O(log n) amortised."""

    def __init__(self, boot_tag: int) -> None:
        self._ids = IdSequence(boot_tag)
        self._held: dict[int, _Holding[T]] = {}
        self._by_session: dict[int, set[int]] = {}
        self._due: list[tuple[float, int]] = []  # (expiry, id), also of some that were given up early

    def __len__(self) -> int:
        return len(self._held)

    def add(self, session_id: int, value: T, expires_at: float) -> int:
        """Start holding a value; returns its id."""
        number = self._ids.take()
        self._held[number] = _Holding(session_id, value)
        self._by_session.setdefault(session_id, set()).add(number)
        heapq.heappush(self._due, (expires_at, number))
        return number

    def get(self, session_id: int, number: int) -> T | None:
        """The value of an id, if that session holds it."""
        holding = self._held.get(number)
        return holding.value if holding is not None and holding.session_id == session_id else None

    def has_ended(self, number: int) -> bool:
        """Whether the id was given out in this boot and is in force no more."""
        return number not in self._held and self._ids.was_issued(number)

    def remove(self, number: int) -> T:
        """Stop holding an id that is in force."""
        holding = self._held.pop(number)
        numbers = self._by_session[holding.session_id]
        numbers.discard(number)
        if not numbers:
            del self._by_session[holding.session_id]
        return holding.value

    def of_session(self, session_id: int) -> list[int]:
        """Ids that a session holds, oldest first."""
        return sorted(self._by_session.get(session_id, ()))

    def due(self, now: float) -> list[int]:
        """Ids in force whose end has come; each is named once, so remove them all."""
        numbers = []
        while self._due and self._due[0][0] <= now:
            _, number = heapq.heappop(self._due)
            if number in self._held:
                numbers.append(number)
        return numbers
