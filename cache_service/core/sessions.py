"""Who is connected: open sessions, their last sign of life, and what each announced.

A session ends when its stream does or when it has been silent for too long. What it held is for `cache.py` to free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mapflow.cache_service.core.errors import InvalidRequest, NotFound, PreconditionFailed
from mapflow.cache_service.core.ids import IdSequence
from mapflow.cache_service.core.peers import Interest, Peers, Publisher


@dataclass(slots=True)
class _Session:
    publisher: Publisher | None
    last_seen: float
    device_arena_id: int
    interests: tuple[Interest, ...] = ()


class Sessions:
    """Open sessions of one boot, in order of opening."""

    def __init__(self, boot_tag: int, timeout_s: float, now: float) -> None:
        self._ids = IdSequence(boot_tag)
        self._timeout_s = timeout_s
        self._swept_at = now
        self._open: dict[int, _Session] = {}
        self._peers = Peers(0, (), ())
        self._device_arenas: dict[tuple[str, int], list[int]] = {}  # (model, layer) -> those that want it

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, session_id: int) -> bool:
        return session_id in self._open

    def open(self, publisher: Publisher | None, now: float, device_arena_id: int = 0) -> int:
        """Open a session, whose engine reads that device arena (0: none); returns its id."""
        number = self._ids.take()
        self._open[number] = _Session(publisher, now, device_arena_id)
        if publisher is not None:
            self._rebuild_peers()
        return number

    def touch(self, session_id: int, now: float) -> None:
        """Take a call or heartbeat as a sign of life.

        Raises:
            NotFound: there never was such a session.
            PreconditionFailed: it has ended, or belongs to another start of the daemon.
        """
        session = self._open.get(session_id)
        if session is not None:
            session.last_seen = max(session.last_seen, now)
        elif self._ids.is_foreign(session_id):
            raise PreconditionFailed(f"session {session_id} belongs to another start of the daemon; open a new one")
        elif self._ids.was_issued(session_id):
            raise PreconditionFailed(f"session {session_id} has ended; open a new one")
        else:
            raise NotFound(f"session {session_id} does not exist; open one first")

    def require_producer(self, session_id: int, producer: str) -> None:
        """Make sure that an open session announced itself as this producer.

        Raises:
            InvalidRequest: it announced another one, or none.
        """
        publisher = self._open[session_id].publisher
        if publisher is None or publisher.producer != producer:
            announced = "none" if publisher is None else repr(publisher.producer)
            raise InvalidRequest(f"producer {producer!r} is not what session {session_id} announced ({announced})")

    def set_interests(self, session_id: int, interests: Sequence[Interest]) -> None:
        """Replace what an open session wants."""
        session, wanted = self._open[session_id], tuple(interests)
        if session.interests != wanted:
            session.interests = wanted
            self._rebuild_peers()

    def close(self, session_id: int) -> None:
        """Forget an open session."""
        session = self._open.pop(session_id)
        if session.publisher is not None or session.interests:
            self._rebuild_peers()

    def silent(self, now: float) -> list[int]:
        """Open sessions that have been silent for longer than the timeout.

        Call it several times within a timeout. After a gap of more than half of one the daemon itself must have been
        held up, with signs of life waiting unread: that time counts as nobody's silence.
        """
        gap, self._swept_at = now - self._swept_at, now
        if gap > self._timeout_s / 2:
            for session in self._open.values():
                session.last_seen = min(now, session.last_seen + gap)
        return [number for number, session in self._open.items() if now - session.last_seen > self._timeout_s]

    def peers(self) -> Peers:
        """Who publishes and what is wanted now."""
        return self._peers

    def device_arenas(self, model: str, layer: int) -> Sequence[int]:
        """Device arenas read by sessions that want this layer of this model, in whatever namespace."""
        return self._device_arenas.get((model, layer), ())

    def _rebuild_peers(self) -> None:
        sessions = self._open.values()
        publishers = tuple(session.publisher for session in sessions if session.publisher is not None)
        interests = tuple(interest for session in sessions for interest in session.interests)
        self._peers = Peers(self._peers.version + 1, publishers, interests)
        self._device_arenas = {}
        for session in sessions:
            for interest in session.interests if session.device_arena_id else ():
                for layer in interest.layers:
                    arenas = self._device_arenas.setdefault((interest.model, layer.layer), [])
                    if session.device_arena_id not in arenas:
                        arenas.append(session.device_arena_id)
