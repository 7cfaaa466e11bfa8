"""The daemon as an engine sees it: calls that never wait long, and a background thread that keeps a session alive.

Nothing here ever raises for a daemon that is down, slow, full or restarted, except `Unavailable` from the calls that
say so. Made for one process: create it after forking. Policy (what to look up, what to publish) is the caller's.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future

from mapflow.connector import transfer
from mapflow.connector.arena import Arena, ArenaSet
from mapflow.connector.call_stream import PendingCall
from mapflow.connector.client_config import ClientConfig
from mapflow.connector.counters import Counters, LimitedLog
from mapflow.connector.events import Connected, Disconnected, Event, PeersChanged
from mapflow.connector.lookup import Lookup
from mapflow.connector.messages import (
    DeviceArena,
    Extent,
    Interest,
    Kind,
    Lease,
    LookupResult,
    NewEntry,
    Peers,
    PendingBlob,
    PublishReport,
    Reservation,
    Want,
)
from mapflow.connector.reasons import Reason, Unavailable
from mapflow.connector.session import Session
from mapflow.v1 import cache_pb2

_log = logging.getLogger(__name__)
_STEADY_S = 1.0  # a session that lived this long makes the next attempt start from the shortest backoff


class Client:
    """One engine process's connection to the daemon of its node. Every method may be called from any thread."""

    def __init__(
        self,
        config: ClientConfig,
        *,
        counters: Counters | None = None,
        listener: Callable[[Event], None] | None = None,
    ) -> None:
        """Prepare a client; `start` connects it.

        Args:
            config: how to reach the daemon, and as whom.
            counters: where failures are counted, as (call, reason).
            listener: called on the client's thread, one event at a time; must return quickly.
        """
        self.config = config
        self.counters = counters if counters is not None else Counters()
        self._listener = listener
        self._warnings = LimitedLog(_log)
        self._lock = threading.Lock()  # guards the fields below; never held during a call or a callback
        self._session: Session | None = None
        self._attempt: Session | None = None
        self._interests: tuple[Interest, ...] | None = None
        self._lost_sessions: set[int] = set()
        self._down = Unavailable(Reason.UNREACHABLE, f"not connected to {config.endpoint} yet")
        self._arenas = ArenaSet()
        self._peers = Peers()
        self._closing = threading.Event()
        self._changed = threading.Condition(self._lock)
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()

    # Life

    def start(self) -> None:
        """Connect in the background, and stay connected. Returns at once; a missing daemon is no error."""
        if self._thread is not None or self._closing.is_set():
            return
        self._thread = threading.Thread(target=self._run, name="mapflow-client", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def close(self) -> None:
        """End the session, which releases its leases, and unmap the arenas. Takes a second at most."""
        if os.getpid() != self._pid:
            return  # the session is the parent's
        with self._lock:
            self._closing.set()
            self._down = Unavailable(Reason.CLOSED, "this client is closed")
            self._session = None
            if self._attempt is not None:
                self._attempt.end(self._down)
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(1.0)
        self._arenas.close()
        atexit.unregister(self.close)

    def wait_connected(self, timeout_s: float) -> bool:
        """Wait for a session; for tools and tests, never for schedulers."""
        with self._lock:
            return self._changed.wait_for(lambda: self._session is not None or self._closing.is_set(), timeout_s) and (
                self._session is not None
            )

    @property
    def connected(self) -> bool:
        """Whether a session is open now."""
        return self._session is not None

    @property
    def boot_id(self) -> bytes | None:
        """Start of the daemon that the session belongs to, or None without a session."""
        session = self._session
        return None if session is None else session.boot_id

    @property
    def peers(self) -> Peers:
        """Who publishes and wants what on this node; nobody, without a session."""
        return self._peers

    def set_interests(self, interests: Iterable[Interest]) -> None:
        """Replace what this client wants published; sent now, and again with every new session."""
        with self._lock:
            self._interests = tuple(interests)
            if self._session is not None:
                self._session.send_interests(self._interests)

    # Receivers

    def lookup(self, keys: Sequence[bytes], wants: Sequence[Want], lease_s: float) -> Future[LookupResult]:
        """For each want, the longest run of chunks from the first key on, under one lease. Never blocks or raises.

        The future resolves within `call_deadline_s` and an eighth of it, on another thread: to a result, or to
        `Unavailable`. Cancel it to have the lease released as soon as it arrives.

        Args:
            keys: chunk keys in prefix order; keys beyond the daemon's limit are left out.
            wants: models and layers to look for.
            lease_s: life of the lease, in seconds, cut to the daemon's limit; 0 looks only.
        """
        lookup = Lookup(
            keys=keys,
            key_bytes=self.config.namespace.key_hash.key_bytes,
            wants=wants,
            lease_s=lease_s,
            deadline_s=self.config.call_deadline_s,
            is_current=lambda session: session is self._session,
            release=lambda lease: self.release([lease]),
            fail=lambda error: self._fail("lookup", error),
        )
        return lookup.begin(self._current)

    def release(self, leases: Iterable[Lease]) -> None:
        """End leases: one message, no answer awaited. Never blocks or raises; leases of lost sessions are left out."""
        session = self._session
        if session is None or os.getpid() != self._pid:
            return
        mine = (session.boot_id, session.session_id)
        lease_ids = [lease.lease_id for lease in leases if (lease.boot_id, lease.session_id) == mine]
        if not lease_ids:
            return
        request = cache_pb2.ReleaseRequest(session_id=session.session_id, lease_ids=lease_ids)
        call = PendingCall(
            deadline=time.monotonic() + self.config.transfer_deadline_s,
            answered=lambda answer, is_late: None,
            failed=lambda error: self._fail("release", error),
        )
        with contextlib.suppress(Unavailable), self._counted("release"):
            session.calls.send(cache_pb2.CallRequest(release=request), call)

    def check_lease(self, lease: Lease) -> None:
        """Make sure that a lease, of this client or of another process on this host, is still good.

        Bytes that were read before a check that passes were protected while they were read.

        Raises:
            Unavailable: RESTARTED, SESSION_LOST, LEASE_EXPIRED, or why there is no session.
        """
        self._check_lease(self._current(), lease)

    def read(self, lease: Lease, extents: Sequence[Extent]) -> list[memoryview]:
        """The bytes of leased extents, read-only: in place where the arena is mapped, else fetched (which blocks).

        Views in place are good only while the lease is: copy and verify, then call `check_lease`.

        Raises:
            Unavailable: the lease is void, or the bytes cannot be had.
        """
        with self._counted("read"):
            session = self._current()
            self._check_lease(session, lease)
            return transfer.read(session, self._arenas, lease, extents, self.config.transfer_deadline_s)

    def device_arena(self, boot_id: bytes) -> DeviceArena | None:
        """What that start of the daemon offers on this client's GPU; None without a session with it."""
        session = self._session
        return session.device_arena if session is not None and session.boot_id == boot_id else None

    def arena_of(self, lease: Lease, extents: Sequence[Extent]) -> Arena | None:
        """The mapped arena that holds all of some leased extents; None where only `read` brings their bytes.

        Raises:
            Unavailable: the lease is void, or an extent lies outside its arena (PROTOCOL).
        """
        with self._counted("read"):
            session = self._current()
            self._check_lease(session, lease)
            return transfer.arena_of(session, self._arenas, extents)

    # Publishers

    def reserve(self, kind: Kind, producer: str, entries: Sequence[NewEntry]) -> list[Reservation]:
        """Room for blobs that the caller is about to write, one answer per entry.

        Raises:
            Unavailable: no answer.
        """
        with self._counted("reserve"):
            return transfer.reserve(self._current(), kind, producer, entries, self.config.transfer_deadline_s)

    def commit(self, reservations: Sequence[Reservation]) -> None:
        """Publish what was written.

        Raises:
            Unavailable: no answer, or reservations of another boot or session, which are void.
        """
        with self._counted("commit"):
            transfer.commit(self._current(), reservations, self.config.transfer_deadline_s)

    def abort(self, reservations: Sequence[Reservation]) -> None:
        """Give room back unpublished. Reservations of another boot or session are gone already; never raises."""
        with contextlib.suppress(Unavailable), self._counted("abort"):
            transfer.abort(self._current(), reservations, self.config.transfer_deadline_s)

    def arena(self, boot_id: bytes, arena_id: int) -> Arena:
        """The mapping of an arena.

        Raises:
            Unavailable: RESTARTED for an earlier boot's, NO_SHARED_MEMORY where it cannot be mapped.
        """
        session = self._current()
        if boot_id != session.boot_id:
            raise Unavailable(Reason.RESTARTED, "the arena belongs to an earlier start of the daemon")
        arena = self._arenas.get(boot_id, arena_id)
        if arena is None:
            raise Unavailable(Reason.NO_SHARED_MEMORY, f"arena {arena_id} is not mapped")
        return arena

    def mapped_arenas(self) -> list[tuple[bytes, Arena]]:
        """The arenas that are mapped now, each with the daemon's boot; empty without a session."""
        return self._arenas.mapped()

    def publish(self, kind: Kind, producer: str, blobs: Sequence[PendingBlob]) -> PublishReport:
        """Reserve, write in place and commit; where no memory is shared, store. Blocks; for a publisher thread.

        Raises:
            Unavailable: nothing of the last batch was published.
            Exception: whatever a blob's `write` raised; nothing of its batch was published.
        """
        with self._counted("publish"):
            session = self._current()
            return transfer.publish(session, self._arenas, kind, producer, blobs, self.config.transfer_deadline_s)

    # Inside

    def _current(self) -> Session:
        if os.getpid() != self._pid:  # gRPC's threads are not here, so no call would ever end
            raise Unavailable(Reason.CLOSED, "this client belongs to the process that this one was forked from")
        session = self._session
        if session is None:
            raise Unavailable(self._down.reason, self._down.detail)  # a new one: a traceback belongs to one raise
        return session

    @contextlib.contextmanager
    def _counted(self, call: str) -> Iterator[None]:
        try:
            yield
        except Unavailable as error:
            self._fail(call, error)
            raise

    def _fail(self, call: str, error: Unavailable) -> None:
        self.counters.add(call, error.reason)
        if error.reason is not Reason.CLOSED:
            self._warnings.warning(f"{call} {error.reason}", "cache %s failed, going on without it: %s", call, error)

    def _check_lease(self, session: Session, lease: Lease) -> None:
        now = time.monotonic()
        if lease.boot_id != session.boot_id:
            raise Unavailable(Reason.RESTARTED, "the lease belongs to an earlier start of the daemon")
        if now >= lease.expires_at:
            raise Unavailable(Reason.LEASE_EXPIRED, f"the lease ran out {now - lease.expires_at:.3f} s ago")
        if lease.session_id in self._lost_sessions or now >= session.alive_until:
            raise Unavailable(Reason.SESSION_LOST, "the session that held the lease is over")

    def _emit(self, event: Event) -> None:
        if self._listener is not None:
            try:
                self._listener(event)
            except Exception:
                _log.exception("the cache client's listener failed on %s", type(event).__name__)

    def _run(self) -> None:
        pause_s = self.config.backoff_min_s
        while not self._closing.is_set():
            opened_at = time.monotonic()
            try:
                was_open = self._connect_once()
            except Exception as error:  # a bug of ours must not end the thread that would reconnect
                _log.exception("the cache client's session failed")
                was_open = self._set_down(Unavailable(Reason.INTERNAL, repr(error)))
            if was_open and time.monotonic() - opened_at > _STEADY_S:
                pause_s = self.config.backoff_min_s
            self._closing.wait(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, self.config.backoff_max_s)

    def _connect_once(self) -> bool:
        """Live one session; returns whether it was ever open."""
        try:
            session = Session(self.config)
        except Unavailable as error:
            return self._set_down(error)
        try:
            with self._lock:
                if self._closing.is_set():
                    return False
                self._attempt = session
            try:
                session.open()
            except Unavailable as error:
                self._arenas.close()  # a dead daemon's memory must not stand in the way of the next one's
                return self._set_down(error)
            if not self._adopt(session):
                return False
            why = Unavailable(Reason.INTERNAL, "the session failed")
            try:
                why = session.serve(self._on_peers)
            finally:
                self._drop(session, why)
            return True
        finally:
            session.close()

    def _adopt(self, session: Session) -> bool:
        for refusal in self._arenas.adopt(session.boot_id, session.arenas if self.config.map_arenas else ()):
            self._fail("map", refusal)
        with self._lock:
            if self._closing.is_set():
                return False
            if self._interests is not None:
                session.send_interests(self._interests)
            self._session = session
            self._changed.notify_all()
        _log.info("connected to the cache at %s, boot %s", self.config.endpoint, session.boot_id.hex())
        self._emit(Connected(session.boot_id))
        return True

    def _drop(self, session: Session, why: Unavailable) -> None:
        session.end(why)  # so that calls in flight learn why, too
        with self._lock:
            self._session = None
            self._lost_sessions.add(session.session_id)
            self._peers = Peers()
        self._set_down(why)
        self._emit(Disconnected(why.reason))

    def _set_down(self, why: Unavailable) -> bool:
        """Remember why there is no session; returns False, for there is none."""
        if not self._closing.is_set():
            self._down = why
            self._fail("session", why)
        return False

    def _on_peers(self, peers: Peers) -> None:
        if peers.malformed:
            self.counters.add("peers", Reason.PROTOCOL, peers.malformed)
        self._peers = peers
        self._emit(PeersChanged(peers))
