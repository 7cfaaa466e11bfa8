"""The Session stream: opening, signs of life, and news about the peers.

One `SessionHub` knows the streams of all open sessions and wakes them when something changed. What a session is and
holds, and when it has been silent for too long, is the core's affair.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from contextlib import aclosing

import structlog

from mapflow.cache_service import wire
from mapflow.cache_service.core.cache import Cache
from mapflow.cache_service.core.errors import CacheError, Draining, InvalidRequest, PreconditionFailed
from mapflow.v1 import cache_pb2

_log = structlog.get_logger(__name__)


class _Stream:
    """What the hub tells one stream."""

    def __init__(self) -> None:
        self.news = asyncio.Event()
        self.verdict: CacheError | None = None


class SessionHub:
    """All session streams of one daemon."""

    def __init__(self, cache: Cache, boot_id: bytes, clock: Callable[[], float]) -> None:
        self.num_ended = 0
        """Sessions that have ended."""
        self._cache = cache
        self._boot_id = boot_id
        self._clock = clock
        self._streams: dict[int, _Stream] = {}

    async def serve(
        self, requests: AsyncIterator[cache_pb2.SessionRequest]
    ) -> AsyncGenerator[cache_pb2.SessionResponse, None]:
        """One stream from OpenSession to its end, which frees whatever the session holds.

        Raises:
            CacheError: a message that is refused, or the session was ended from this side.
        """
        session_id = self._open(await anext(requests, None))
        stream = self._streams[session_id] = _Stream()
        self._announce()
        try:
            opened = cache_pb2.SessionOpened(session_id=session_id, boot_id=self._boot_id)
            yield cache_pb2.SessionResponse(opened=opened)
            async with aclosing(self._converse(session_id, stream, requests)) as responses:
                async for response in responses:
                    yield response
        finally:
            del self._streams[session_id]
            self._cache.end_session(session_id, self._clock())
            self.num_ended += 1
            self._announce()
            _log.info("session_ended", session_id=session_id)

    def end(self, session_ids: Iterable[int]) -> None:
        """End the streams of sessions that the core has ended because of their silence."""
        for session_id in session_ids:
            self._end(session_id, PreconditionFailed(f"session {session_id} was silent for too long; open a new one"))
        self._announce()

    def end_all(self) -> None:
        """End every stream, because the daemon stops."""
        for session_id in list(self._streams):
            self._end(session_id, Draining("the daemon is shutting down"))

    async def _converse(
        self, session_id: int, stream: _Stream, requests: AsyncIterator[cache_pb2.SessionRequest]
    ) -> AsyncGenerator[cache_pb2.SessionResponse, None]:
        told = -1  # version of the peers that this client knows
        receiving = asyncio.ensure_future(_next(requests))
        news = asyncio.ensure_future(stream.news.wait())
        try:
            while True:
                if stream.verdict is not None:
                    raise stream.verdict
                if (peers := self._cache.peers()).version != told:
                    told = peers.version
                    yield cache_pb2.SessionResponse(peers=wire.peers_message(peers))
                await asyncio.wait((receiving, news), return_when=asyncio.FIRST_COMPLETED)
                if news.done():
                    stream.news.clear()
                    news = asyncio.ensure_future(stream.news.wait())
                elif (request := receiving.result()) is None:
                    return
                else:
                    receiving = asyncio.ensure_future(_next(requests))
                    if self._take(session_id, request):
                        yield cache_pb2.SessionResponse(heartbeat=cache_pb2.Heartbeat())
        finally:
            receiving.cancel()
            news.cancel()

    def _open(self, first: cache_pb2.SessionRequest | None) -> int:
        if first is None or not first.HasField("open"):
            raise InvalidRequest("the first message of a session must be OpenSession")
        publisher = wire.publisher(first.open)
        session_id = self._cache.open_session(
            first.open.client_name, publisher, self._clock(), first.open.device_arena_id
        )
        producer = None if publisher is None else publisher.producer
        _log.info("session_opened", session_id=session_id, client_name=first.open.client_name, producer=producer)
        return session_id

    def _take(self, session_id: int, request: cache_pb2.SessionRequest) -> bool:
        """Act on a message after the first; True if it wants an answer."""
        match request.WhichOneof("message"):
            case "heartbeat":
                self._cache.heartbeat(session_id, self._clock())
                return True
            case "interests":
                self._cache.set_interests(session_id, wire.interests(request.interests), self._clock())
                self._announce()
                return False
            case other:
                raise InvalidRequest(f"expected a heartbeat or interests, got {other or 'an empty message'}")

    def _announce(self) -> None:
        for stream in self._streams.values():
            stream.news.set()

    def _end(self, session_id: int, verdict: CacheError) -> None:
        if (stream := self._streams.get(session_id)) is not None:
            stream.verdict = verdict
            stream.news.set()


async def _next(requests: AsyncIterator[cache_pb2.SessionRequest]) -> cache_pb2.SessionRequest | None:
    return await anext(requests, None)
