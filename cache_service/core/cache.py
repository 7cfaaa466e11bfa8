"""The cache as its callers see it: one method per call of the protocol, and `expire` for the passing of time.

Composes pool, device tiers, leases, reservations and sessions, checks requests against the limits, and counts. The only
thing that servicers call. Not thread-safe; reads no clock; every time is the caller's monotonic `now`, in seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mapflow.cache_service.core.device_tier import FIRST_ARENA_ID, Copies, DeviceTier
from mapflow.cache_service.core.errors import CacheError, Draining, InvalidRequest
from mapflow.cache_service.core.leases import Leases
from mapflow.cache_service.core.limits import Limits, check_formats
from mapflow.cache_service.core.peers import Interest, Peers, Publisher, check_text
from mapflow.cache_service.core.pool import Pool
from mapflow.cache_service.core.promotions import Promotions
from mapflow.cache_service.core.reservations import Reservations
from mapflow.cache_service.core.sessions import Sessions
from mapflow.cache_service.core.values import (
    EntryId,
    Extent,
    Hit,
    Kind,
    LookupResult,
    NewEntry,
    Promotion,
    Reservation,
    ReservationState,
    Stats,
    Want,
    model_of,
)


class Cache:
    """The state of one boot of the daemon."""

    def __init__(self, limits: Limits, boot_tag: int, now: float) -> None:
        """Start empty.

        Args:
            boot_tag: in [1, 2**24), different for every start of the daemon; part of every id.
        """
        self._limits = limits
        self._started_at = now
        self._draining = False
        self._tiers = {
            arena_id: DeviceTier(arena_id, num_bytes)
            for arena_id, num_bytes in enumerate(limits.device_arena_bytes, start=FIRST_ARENA_ID)
        }
        self._pool = Pool(limits.arena_bytes, on_evict=self._drop_copies)
        self._promotions = Promotions(self._pool)
        self._leases = Leases(self._pool, boot_tag, limits.read_grace_s)
        self._reservations = Reservations(self._pool, boot_tag)
        self._sessions = Sessions(boot_tag, limits.session_timeout_s, now)
        self._lookups = 0
        self._lookup_chunks = 0
        self._hit_chunks = 0
        self._expired_sessions = 0

    @property
    def is_idle(self) -> bool:
        """Whether nobody reads or writes: no lease and no reservation is in force."""
        return not self._leases and not self._reservations

    @property
    def max_blob_bytes(self) -> int:
        """Largest blob that could ever fit: the arena."""
        return self._limits.max_blob_bytes

    def drain(self) -> None:
        """From here on refuse new sessions, lookups and reservations; what is under way may finish."""
        self._draining = True

    def check_formats(self, format_versions: Sequence[int]) -> None:
        """Make sure that a client speaks a blob format of this release, if it names any."""
        check_formats(format_versions)

    def open_session(self, client_name: str, publisher: Publisher | None, now: float, device_arena_id: int = 0) -> int:
        """Open a session, whose engine reads that device arena (0: none); returns its id."""
        self._refuse_new_work()
        check_text("client_name", client_name)
        self._tier(device_arena_id)
        return self._sessions.open(publisher, now, device_arena_id)

    def heartbeat(self, session_id: int, now: float) -> None:
        """Take a sign of life; so is every other call that names a session."""
        self._sessions.touch(session_id, now)

    def set_interests(self, session_id: int, interests: Sequence[Interest], now: float) -> None:
        """Replace what a session wants published."""
        self._sessions.touch(session_id, now)
        self._sessions.set_interests(session_id, interests)

    def end_session(self, session_id: int, now: float) -> None:
        """End a session with everything it holds; one that has ended already is no error."""
        if session_id in self._sessions:
            self._leases.end_session(session_id, now)
            self._reservations.end_session(session_id)
            self._sessions.close(session_id)

    def is_open(self, session_id: int) -> bool:
        """Whether a session is open."""
        return session_id in self._sessions

    def peers(self) -> Peers:
        """Who publishes and what is wanted now."""
        return self._sessions.peers()

    def lookup(
        self,
        session_id: int,
        keys: Sequence[bytes],
        wants: Sequence[Want],
        lease_s: float,
        now: float,
        device_arena_id: int = 0,
    ) -> LookupResult:
        """For each want the longest run of each producer from the first key on, leased for `lease_s` unless 0.

        With a lease and a device arena hits name the copies there, and what has none is promoted.
        """
        self._begin(session_id, now)
        self._refuse_new_work()
        self._limits.check_lookup(keys, wants, lease_s)
        tier = self._tier(device_arena_id)
        hits: list[Hit] = []
        copies: list[Copies] = []
        for number, want in enumerate(wants):
            longest = 0
            for producer, extents in self._pool.runs(keys, want):
                length = len(extents) // len(want.layers)
                longest = max(longest, length)
                if not lease_s:
                    hits.append(Hit(number, producer, length))
                    continue
                run = keys[:length]
                offsets, found = ([], []) if tier is None else tier.find(run, want.kind, producer, want.layers)
                copies += found
                hits.append(Hit(number, producer, length, tuple(extents), tuple(offsets) if found else ()))
            self._hit_chunks += longest
        self._lookups += 1
        self._lookup_chunks += len(keys) * len(wants)
        if not hits or not lease_s:
            return LookupResult(tuple(hits))
        chunks = keys[: max(hit.num_chunks for hit in hits)]
        leased = tuple(hit.extents for hit in hits)
        held = None if tier is None else tier.hold(copies)
        result = LookupResult(tuple(hits), self._leases.grant(session_id, chunks, leased, now + lease_s, held))
        if tier is not None:
            self._promotions.begin_hits(tier, keys, wants, hits, now)
        return result

    def release(self, session_id: int, lease_ids: Sequence[int], now: float) -> None:
        """End leases; those that have ended already are no error."""
        self._begin(session_id, now)
        self._leases.release(session_id, lease_ids)

    def check_lease(self, session_id: int, lease_id: int, extents: Iterable[Extent], now: float) -> None:
        """Make sure that a session may read extents now."""
        self._begin(session_id, now)
        self._leases.check(session_id, lease_id, extents)

    def reserve(
        self, session_id: int, kind: Kind, producer: str, entries: Sequence[NewEntry], now: float
    ) -> tuple[Reservation, ...]:
        """Room for blobs, one answer per entry; evicts what nobody uses."""
        self._begin(session_id, now)
        self._refuse_new_work()
        self._sessions.require_producer(session_id, producer)
        self._limits.check_entries(entries)
        expires_at = now + self._limits.reservation_timeout_s
        done: list[Reservation] = []
        without_room: set[bytes] = set()
        try:
            for new in entries:
                if new.parent in without_room:  # nobody could reach it, so nothing must make way for it
                    answer = Reservation(ReservationState.NO_ROOM)
                else:
                    entry_id = EntryId(new.key, kind, producer, new.layer)
                    answer = self._reservations.reserve(session_id, entry_id, new.parent, new.num_bytes, expires_at)
                if answer.state is ReservationState.NO_ROOM:
                    without_room.add(new.key)
                done.append(answer)
        except CacheError:
            self._reservations.abort(session_id, [answer.id for answer in done if answer.id])
            raise
        return tuple(done)

    def check_reservation(self, session_id: int, reservation_id: int, now: float) -> Extent:
        """The room of a reservation, if the session may still write it."""
        self._begin(session_id, now)
        return self._reservations.check(session_id, reservation_id)

    def commit(self, session_id: int, reservation_ids: Sequence[int], now: float) -> None:
        """Publish blobs, all or none; those that sessions with a device arena want are promoted there."""
        self._begin(session_id, now)
        committed = self._reservations.commit(session_id, reservation_ids)
        wanted = [
            (entry, arena_ids)
            for entry in committed
            if (arena_ids := self._sessions.device_arenas(model_of(entry.producer), entry.layer))
        ]
        self._promotions.begin_committed(self._tiers, wanted, now)

    def abort(self, session_id: int, reservation_ids: Sequence[int], now: float) -> None:
        """Give room back; reservations that have ended already are no error."""
        self._begin(session_id, now)
        self._reservations.abort(session_id, reservation_ids)

    def take_promotions(self) -> tuple[Promotion, ...]:
        """Copies to be made since the last call; each must be ended by `promoted` or `promotion_failed`."""
        return self._promotions.take()

    def promoted(self, promotion_id: int) -> None:
        """End a promotion: the copies are made, and lookups name them from here on."""
        self._promotions.finish(promotion_id)

    def promotion_failed(self, promotion_id: int) -> None:
        """End a promotion that came to nothing; nobody may write into its room after this call."""
        self._promotions.fail(promotion_id)

    def expire(self, now: float) -> tuple[int, ...]:
        """End what is over at `now`; returns the sessions that fell silent. To be called several times a timeout."""
        self._leases.expire(now)
        self._reservations.expire(now)
        silent = self._sessions.silent(now)
        for session_id in silent:
            self.end_session(session_id, now)
        self._expired_sessions += len(silent)
        return tuple(silent)

    def stats(self, now: float) -> Stats:
        """Counters and gauges."""
        return Stats(
            uptime_s=now - self._started_at,
            arena_bytes=self._limits.arena_bytes,
            used_bytes=self._pool.used_bytes,
            largest_free_bytes=self._pool.largest_free_bytes,
            num_chunks=self._pool.num_chunks,
            num_entries=self._pool.num_entries,
            num_reservations=len(self._reservations),
            num_leases=len(self._leases),
            num_sessions=len(self._sessions),
            lookups=self._lookups,
            lookup_chunks=self._lookup_chunks,
            hit_chunks=self._hit_chunks,
            evicted_entries=self._pool.evicted_entries,
            expired_sessions=self._expired_sessions,
            device_arenas=tuple(tier.stats() for tier in self._tiers.values()),
        )

    def _begin(self, session_id: int, now: float) -> None:
        self._sessions.touch(session_id, now)
        self._leases.expire(now)
        self._reservations.expire(now)

    def _refuse_new_work(self) -> None:
        if self._draining:
            raise Draining("the daemon is shutting down and takes no new work")

    def _tier(self, device_arena_id: int) -> DeviceTier | None:
        if device_arena_id and device_arena_id not in self._tiers:
            raise InvalidRequest(f"device_arena_id must be 0 or one of {list(self._tiers)}, got {device_arena_id}")
        return self._tiers.get(device_arena_id)

    def _drop_copies(self, chunk: bytes) -> None:
        for tier in self._tiers.values():
            tier.drop(chunk)
