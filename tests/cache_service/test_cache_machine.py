"""The whole core against a naive cache: 64-byte flags for room, a scanned list for last use, dictionaries for the rest.

The model decides by itself what each call must answer, extents included; so a blob that is evicted under a lease, room
handed out twice, a run that is too long or too short, or a parent taken before its child, shows as a difference.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from mapflow.cache_service.core.cache import Cache
from mapflow.cache_service.core.errors import NotFound, PreconditionFailed
from mapflow.cache_service.core.limits import Limits
from mapflow.cache_service.core.peers import Namespace, Publisher
from mapflow.cache_service.core.values import (
    Extent,
    Hit,
    Kind,
    NewEntry,
    Reservation,
    ReservationState,
    Want,
)

UNIT = 64
NUM_UNITS = 12
TIMEOUT_S, RESERVATION_S, MAX_LEASE_S = 8.0, 5.0, 6.0
MODEL = "m@1"
PRODUCERS = (f"{MODEL}/float32/tp0of2", f"{MODEL}/float32/tp1of2")
PARENTS = (None, 0, 1, 2, 1, 4, None, 6)
PATHS = ((0, 1, 2, 3), (0, 1, 4, 5), (1, 2, 3), (6, 7), (5,))
KEYS = [bytes([number]) * 16 for number in range(len(PARENTS))]
NAMESPACE = Namespace(format_version=1, tokenizer_fingerprint="f", chunk_tokens=512, block=64, tenant="", key_hash=1)

Entry = tuple[int, str, int]  # chunk, producer, layer


@dataclass
class Open:
    session: int
    entry: Entry
    extent: Extent
    expiry: float


@dataclass
class Lease:
    session: int
    chunks: tuple[int, ...]
    extents: tuple[Extent, ...]
    expiry: float


@dataclass
class NaiveCache:
    """What is true, kept in the plainest way."""

    now: float = 0.0
    sessions: dict[int, tuple[str, float]] = field(default_factory=dict)  # id -> producer, last sign of life
    entries: dict[Entry, Extent] = field(default_factory=dict)
    open: dict[int, Open] = field(default_factory=dict)
    leases: dict[int, Lease] = field(default_factory=dict)
    by_use: list[int] = field(default_factory=list)  # chunks, least recently used first
    evicted: int = 0

    def extents(self) -> list[Extent]:
        return [*self.entries.values(), *(reservation.extent for reservation in self.open.values())]

    def gaps(self) -> list[tuple[int, int]]:
        free = [True] * NUM_UNITS
        for extent in self.extents():
            for unit in range(extent.offset // UNIT, -(-(extent.offset + extent.num_bytes) // UNIT)):
                assert free[unit], "two extents overlap"
                free[unit] = False
        found, start = [], 0
        for unit in range(NUM_UNITS + 1):
            if unit == NUM_UNITS or not free[unit]:
                if unit > start:
                    found.append((unit - start, start))
                start = unit + 1
        return found

    def chunks(self) -> set[int]:
        return {entry[0] for entry in self.entries} | {reservation.entry[0] for reservation in self.open.values()}

    def use(self, chunk: int) -> None:
        if chunk in self.by_use:
            self.by_use.remove(chunk)
        self.by_use.append(chunk)

    def forget_empty(self) -> None:
        here = self.chunks()
        self.by_use = [chunk for chunk in self.by_use if chunk in here]

    def victim(self, writing: int) -> int | None:
        """The least recently used chunk that no lease, writer or child holds."""
        here = self.chunks() | {writing}
        busy = {chunk for lease in self.leases.values() for chunk in lease.chunks} | {writing}
        busy |= {reservation.entry[0] for reservation in self.open.values()}
        busy |= {parent for chunk in here if (parent := PARENTS[chunk]) is not None}
        return next((chunk for chunk in self.by_use if chunk not in busy), None)

    def reserve(self, session: int, entry: Entry, num_bytes: int) -> Reservation:
        """Expected answer, with id 0; the caller files a real one under its id."""
        if entry in self.entries or entry in [reservation.entry for reservation in self.open.values()]:
            return Reservation(ReservationState.EXISTS)
        if entry[0] not in self.chunks():
            self.use(entry[0])
        units = -(-num_bytes // UNIT)
        while not (fitting := [gap for gap in self.gaps() if gap[0] >= units]):
            victim = self.victim(entry[0])
            if victim is None:
                self.forget_empty()
                return Reservation(ReservationState.NO_ROOM)
            self.evicted += sum(other[0] == victim for other in self.entries)
            self.entries = {other: extent for other, extent in self.entries.items() if other[0] != victim}
            self.by_use.remove(victim)
        return Reservation(ReservationState.RESERVED, 0, Extent(min(fitting)[1] * UNIT, num_bytes))

    def expire_held(self) -> None:
        self.leases = {number: lease for number, lease in self.leases.items() if lease.expiry > self.now}
        self.open = {number: reservation for number, reservation in self.open.items() if reservation.expiry > self.now}
        self.forget_empty()

    def end_session(self, session: int) -> None:
        del self.sessions[session]
        self.leases = {number: lease for number, lease in self.leases.items() if lease.session != session}
        self.open = {number: reservation for number, reservation in self.open.items() if reservation.session != session}
        self.forget_empty()

    def run(self, path: tuple[int, ...], producer: str, layers: list[int]) -> int:
        length = 0
        while length < len(path) and all((path[length], producer, layer) in self.entries for layer in layers):
            length += 1
        return length


class CacheMachine(RuleBasedStateMachine):
    """Two or three engines that publish and read along a small tree of chunks."""

    def __init__(self) -> None:
        super().__init__()
        limits = Limits(
            arena_bytes=NUM_UNITS * UNIT,
            session_timeout_s=TIMEOUT_S,
            max_lease_s=MAX_LEASE_S,
            reservation_timeout_s=RESERVATION_S,
            max_keys=64,
        )
        self.cache = Cache(limits, boot_tag=1, now=0.0)
        self.model = NaiveCache()
        self.ended: list[int] = []

    @initialize()
    def first_session(self) -> None:
        self.open_session(PRODUCERS[0])

    @rule(producer=st.sampled_from(PRODUCERS))
    def open_session(self, producer: str) -> None:
        if len(self.model.sessions) < 3:
            number = self.cache.open_session("test", Publisher(producer, NAMESPACE), self.model.now)
            self.model.sessions[number] = (producer, self.model.now)

    def pick_session(self, data: st.DataObject) -> int | None:
        """An open session, after an empty call of it: which expires what is due and is a sign of life."""
        if not self.model.sessions:
            return None
        session = data.draw(st.sampled_from(sorted(self.model.sessions)), label="session")
        self.cache.commit(session, [], self.model.now)
        self.model.sessions[session] = (self.model.sessions[session][0], self.model.now)
        self.model.expire_held()
        return session

    @rule(
        data=st.data(),
        path=st.sampled_from(PATHS),
        layers=st.lists(st.integers(0, 1), min_size=1, max_size=2, unique=True),
        num_bytes=st.integers(1, 4 * UNIT),
    )
    def reserve(self, data: st.DataObject, path: tuple[int, ...], layers: list[int], num_bytes: int) -> None:
        if (session := self.pick_session(data)) is None:
            return
        producer = self.model.sessions[session][0]
        wanted = [(chunk, producer, layer) for chunk in path for layer in layers]
        entries = [NewEntry(KEYS[chunk], self.parent_key(chunk), layer, num_bytes) for chunk, _, layer in wanted]
        answers = self.cache.reserve(session, Kind.MAP, producer, entries, self.model.now)
        assert len(answers) == len(entries)
        without_room: set[int | None] = set()
        for entry, answer in zip(wanted, answers, strict=True):
            if PARENTS[entry[0]] in without_room:
                expected = Reservation(ReservationState.NO_ROOM)
            else:
                expected = self.model.reserve(session, entry, num_bytes)
            assert (answer.state, answer.extent) == (expected.state, expected.extent)
            if answer.extent is not None:
                self.model.open[answer.id] = Open(session, entry, answer.extent, self.model.now + RESERVATION_S)
            if answer.state is ReservationState.NO_ROOM:
                without_room.add(entry[0])

    @staticmethod
    def parent_key(chunk: int) -> bytes | None:
        parent = PARENTS[chunk]
        return None if parent is None else KEYS[parent]

    @rule(data=st.data(), commit=st.booleans())
    def finish(self, data: st.DataObject, commit: bool) -> None:
        if (session := self.pick_session(data)) is None:
            return
        own = sorted(number for number, reservation in self.model.open.items() if reservation.session == session)
        if not own:
            return
        numbers = data.draw(st.lists(st.sampled_from(own), min_size=1, unique=True), label="reservations")
        (self.cache.commit if commit else self.cache.abort)(session, numbers, self.model.now)
        for number in numbers:
            reservation = self.model.open.pop(number)
            if commit:
                self.model.entries[reservation.entry] = reservation.extent
                self.model.use(reservation.entry[0])
            self.ended.append(number)
        self.model.forget_empty()

    @rule(data=st.data())
    def commit_what_has_ended(self, data: st.DataObject) -> None:
        if self.ended and (session := self.pick_session(data)) is not None:
            with pytest.raises(NotFound):
                self.cache.commit(session, [*self.own_reservations(session), self.ended[-1]], self.model.now)

    def own_reservations(self, session: int) -> list[int]:
        return [number for number, reservation in self.model.open.items() if reservation.session == session]

    @rule(
        data=st.data(),
        path=st.sampled_from(PATHS),
        layers=st.lists(st.integers(0, 1), min_size=1, max_size=2, unique=True),
        lease_s=st.sampled_from([0.0, 1.0, MAX_LEASE_S]),
    )
    def look_up(self, data: st.DataObject, path: tuple[int, ...], layers: list[int], lease_s: float) -> None:
        if (session := self.pick_session(data)) is None:
            return
        keys, want = [KEYS[chunk] for chunk in path], Want(Kind.MAP, MODEL, tuple(layers))
        result = self.cache.lookup(session, keys, [want], lease_s, self.model.now)
        expected = set()
        for producer in PRODUCERS:
            if length := self.model.run(path, producer, layers):
                run = path[:length] if lease_s else ()
                extents = tuple(self.model.entries[chunk, producer, layer] for chunk in run for layer in layers)
                expected.add(Hit(0, producer, length, extents))
        assert len(result.hits) == len(expected) and set(result.hits) == expected
        assert bool(result.lease_id) == bool(expected and lease_s)
        if result.lease_id:
            chunks = path[: max(hit.num_chunks for hit in result.hits)]
            for chunk in reversed(chunks):
                self.model.use(chunk)
            extents = tuple(extent for hit in result.hits for extent in hit.extents)
            self.model.leases[result.lease_id] = Lease(session, chunks, extents, self.model.now + lease_s)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if (session := self.pick_session(data)) is None:
            return
        own = sorted(number for number, lease in self.model.leases.items() if lease.session == session)
        if own:
            number = data.draw(st.sampled_from(own), label="lease")
            for _ in range(2):  # the second time it has ended already
                self.cache.release(session, [number], self.model.now)
            del self.model.leases[number]

    @rule(data=st.data())
    def end_session(self, data: st.DataObject) -> None:
        if (session := self.pick_session(data)) is not None:
            for _ in range(2):
                self.cache.end_session(session)
            self.model.end_session(session)
            with pytest.raises(PreconditionFailed, match="has ended"):
                self.cache.heartbeat(session, self.model.now)

    @rule(data=st.data())
    def heartbeat(self, data: st.DataObject) -> None:
        if self.model.sessions:
            session = data.draw(st.sampled_from(sorted(self.model.sessions)), label="session")
            self.cache.heartbeat(session, self.model.now)
            self.model.sessions[session] = (self.model.sessions[session][0], self.model.now)

    @rule(passed=st.sampled_from([0.0, 0.5, 1.0, 2.0, TIMEOUT_S / 2]))
    def let_time_pass(self, passed: float) -> None:
        self.model.now += passed
        silent = {number for number, (_, seen) in self.model.sessions.items() if self.model.now - seen > TIMEOUT_S}
        assert set(self.cache.expire(self.model.now)) == silent
        self.model.expire_held()
        for session in silent:
            self.model.end_session(session)

    @invariant()
    def leased_blobs_are_where_they_were(self) -> None:
        there = set(self.model.entries.values())
        for number, lease in self.model.leases.items():
            if lease.expiry > self.model.now:
                assert set(lease.extents) <= there
                self.cache._leases.check(lease.session, number, lease.extents)

    @invariant()
    def gauges_agree(self) -> None:
        stats = self.cache.stats(self.model.now)
        assert stats.num_entries == len(self.model.entries)
        assert stats.num_chunks == len({entry[0] for entry in self.model.entries})
        assert stats.num_sessions == len(self.model.sessions)
        assert stats.num_leases == len(self.model.leases)
        assert stats.num_reservations == len(self.model.open)
        assert stats.used_bytes == sum(-(-extent.num_bytes // UNIT) * UNIT for extent in self.model.extents())
        assert stats.largest_free_bytes == max(self.model.gaps(), default=(0, 0))[0] * UNIT
        assert stats.evicted_entries == self.model.evicted
        assert self.cache.is_idle == (not self.model.leases and not self.model.open)

    def teardown(self) -> None:
        """With every session gone all that is left can make way, to the last byte, and no key is blocked."""
        for session in list(self.model.sessions):
            self.cache.end_session(session)
        session = self.cache.open_session("last", Publisher(PRODUCERS[0], NAMESPACE), self.model.now)
        whole = [NewEntry(b"w" * 16, None, 0, NUM_UNITS * UNIT)]
        (answer,) = self.cache.reserve(session, Kind.MAP, PRODUCERS[0], whole, self.model.now)
        assert answer.extent == Extent(0, NUM_UNITS * UNIT)
        self.cache.abort(session, [answer.id], self.model.now)
        assert self.cache.stats(self.model.now).used_bytes == 0
        everything = [NewEntry(key, self.parent_key(chunk), 0, 1) for chunk, key in enumerate(KEYS)]
        answers = self.cache.reserve(session, Kind.MAP, PRODUCERS[0], everything, self.model.now)
        assert {answer.state for answer in answers} == {ReservationState.RESERVED}


CacheMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
TestCache = CacheMachine.TestCase
