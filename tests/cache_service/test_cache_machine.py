"""The whole core against a naive cache: 64-byte flags for room, a scanned list for last use, dictionaries for the rest.

The model decides by itself what each call must answer, extents included; so a blob that is evicted under a lease, room
handed out twice, a run that is too long or too short, or a parent taken before its child, shows as a difference.

Of device arenas it keeps the memory: what each unit holds or is getting, and who reads it. Which copies make way is for
the cache to say, but whatever a lookup names must be there, and what is held or in flight may not be written over.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from mapflow.cache_service.core.cache import Cache
from mapflow.cache_service.core.device_tier import NO_COPY, UNREAD_S
from mapflow.cache_service.core.errors import NotFound, PreconditionFailed
from mapflow.cache_service.core.limits import Limits
from mapflow.cache_service.core.peers import Interest, LayerInterest, Namespace, Publisher
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
NUM_UNITS = 6
DEVICE_UNITS = {2: 3, 3: 2}
TIMEOUT_S, RESERVATION_S, MAX_LEASE_S = 8.0, 5.0, 6.0
MODEL = "m@1"
PRODUCERS = (f"{MODEL}/float32/tp0of2", f"{MODEL}/float32/tp1of2")
PARENTS = (None, 0, 1, 2, 1, 4, None, 6)
PATHS = ((0, 1, 2, 3), (0, 1, 4, 5), (1, 2, 3), (6, 7), (5,))
KEYS = [bytes([number]) * 16 for number in range(len(PARENTS))]
NAMESPACE = Namespace(format_version=1, tokenizer_fingerprint="f", chunk_tokens=512, block=64, tenant="", key_hash=1)

Entry = tuple[int, str, int]  # chunk, producer, layer
Choose = Callable[[list[int]], int]


def parent_key(chunk: int) -> bytes | None:
    parent = PARENTS[chunk]
    return None if parent is None else KEYS[parent]


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
    copies: tuple[Copy, ...] = ()


@dataclass(frozen=True)
class Copy:
    """Bytes of a device arena that hold, or will hold, a blob: one version of an entry, which lies in `extent`."""

    arena: int
    offset: int
    entry: Entry
    extent: Extent
    version: int

    def units(self) -> set[tuple[int, int]]:
        first = self.offset // UNIT
        return {(self.arena, unit) for unit in range(first, first + -(-self.extent.num_bytes // UNIT))}


@dataclass
class NaiveCache:
    """What is true, kept in the plainest way."""

    now: float = 0.0
    sessions: dict[int, tuple[str, float]] = field(default_factory=dict)  # id -> producer, last sign of life
    devices: dict[int, int] = field(default_factory=dict)  # session -> device arena
    interests: dict[int, tuple[int, ...]] = field(default_factory=dict)  # session -> layers
    versions: dict[Entry, int] = field(default_factory=dict)  # how often each was committed
    in_flight: dict[int, tuple[Copy, ...]] = field(default_factory=dict)  # promotion -> copies
    memory: dict[tuple[int, int], Copy] = field(default_factory=dict)  # (arena, unit) -> what was copied there last
    no_room: dict[int, int] = field(default_factory=lambda: dict.fromkeys(DEVICE_UNITS, 0))
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

    def use_parent(self, child: int) -> None:
        """What a child stood on was in use when the child was."""
        parent, place = PARENTS[child], self.by_use.index(child)
        if parent in self.by_use[:place]:
            self.by_use.insert(place, parent)
            self.by_use.remove(parent)

    def forget_empty(self) -> None:
        here = self.chunks()
        self.by_use = [chunk for chunk in self.by_use if chunk in here]

    def victim(self, writing: int) -> int | None:
        """The least recently used chunk that no lease, writer or child holds."""
        here = self.chunks() | {writing}
        busy = {chunk for lease in self.leases.values() for chunk in lease.chunks} | {writing}
        busy |= {reservation.entry[0] for reservation in self.open.values()}
        busy |= {copy.entry[0] for copies in self.in_flight.values() for copy in copies}
        busy |= {parent for chunk in here if (parent := PARENTS[chunk]) is not None}
        return next((chunk for chunk in self.by_use if chunk not in busy), None)

    def reserve(self, entry: Entry, num_bytes: int) -> Reservation:
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
            self.use_parent(victim)
            self.by_use.remove(victim)
        return Reservation(ReservationState.RESERVED, 0, Extent(min(fitting)[1] * UNIT, num_bytes))

    def expire_held(self) -> None:
        self.leases = {number: lease for number, lease in self.leases.items() if lease.expiry > self.now}
        self.open = {number: reservation for number, reservation in self.open.items() if reservation.expiry > self.now}
        self.forget_empty()

    def end_session(self, session: int) -> None:
        del self.sessions[session]
        self.interests.pop(session, None)
        self.leases = {number: lease for number, lease in self.leases.items() if lease.session != session}
        self.open = {number: reservation for number, reservation in self.open.items() if reservation.session != session}
        self.forget_empty()

    def copy_of(self, arena: int, entry: Entry, offset: int) -> Copy:
        return Copy(arena, offset, entry, self.entries[entry], self.versions[entry])

    def wants(self, entry: Entry) -> list[int]:
        """Device arenas that an entry is copied to when it is committed."""
        interested = [session for session, layers in self.interests.items() if entry[2] in layers]
        return sorted({self.devices[session] for session in interested} - {0})

    def run(self, path: tuple[int, ...], producer: str, layers: list[int]) -> int:
        length = 0
        while length < len(path) and all((path[length], producer, layer) in self.entries for layer in layers):
            length += 1
        return length


class Twins:
    """The cache and its model; every action is done to both and their answers compared."""

    def __init__(self) -> None:
        limits = Limits(
            arena_bytes=NUM_UNITS * UNIT,
            session_timeout_s=TIMEOUT_S,
            max_lease_s=MAX_LEASE_S,
            reservation_timeout_s=RESERVATION_S,
            max_keys=64,
            device_arena_bytes=tuple(units * UNIT for units in DEVICE_UNITS.values()),
        )
        self.cache = Cache(limits, boot_tag=1, now=0.0)
        self.model = NaiveCache()
        self.ended: list[int] = []
        self.open_session(PRODUCERS[0])

    def open_session(self, producer: str, device: int = 0) -> None:
        if len(self.model.sessions) < 3:
            number = self.cache.open_session("test", Publisher(producer, NAMESPACE), self.model.now, device)
            self.model.sessions[number] = (producer, self.model.now)
            self.model.devices[number] = device

    def set_interests(self, session: int, layers: tuple[int, ...]) -> None:
        interest = Interest(NAMESPACE, MODEL, tuple(LayerInterest(layer, (), 0.0, 0) for layer in layers))
        self.cache.set_interests(session, [interest], self.model.now)
        self.model.interests[session] = layers

    def pick(self, choose: Choose) -> int:
        """An open session, after an empty call of it: which expires what is due and is a sign of life."""
        if not self.model.sessions:
            self.open_session(PRODUCERS[0])
        session = choose(sorted(self.model.sessions))
        self.cache.commit(session, [], self.model.now)
        self.model.sessions[session] = (self.model.sessions[session][0], self.model.now)
        self.model.expire_held()
        return session

    def reserve(self, session: int, path: tuple[int, ...], layers: list[int], num_bytes: int, commit: bool) -> None:
        producer = self.model.sessions[session][0]
        wanted = [(chunk, producer, layer) for chunk in path for layer in layers]
        entries = [NewEntry(KEYS[chunk], parent_key(chunk), layer, num_bytes) for chunk, _, layer in wanted]
        answers = self.cache.reserve(session, Kind.MAP, producer, entries, self.model.now)
        assert len(answers) == len(entries)
        without_room: set[int | None] = set()
        for entry, answer in zip(wanted, answers, strict=True):
            if PARENTS[entry[0]] in without_room:
                expected = Reservation(ReservationState.NO_ROOM)
            else:
                expected = self.model.reserve(entry, num_bytes)
            assert (answer.state, answer.extent) == (expected.state, expected.extent)
            if answer.extent is not None:
                self.model.open[answer.id] = Open(session, entry, answer.extent, self.model.now + RESERVATION_S)
            if answer.state is ReservationState.NO_ROOM:
                without_room.add(entry[0])
        if commit:
            self.finish(session, [answer.id for answer in answers if answer.id], commit=True)

    def reservations_of(self, session: int) -> list[int]:
        return sorted(number for number, reservation in self.model.open.items() if reservation.session == session)

    def finish(self, session: int, numbers: list[int], commit: bool) -> None:
        (self.cache.commit if commit else self.cache.abort)(session, numbers, self.model.now)
        wanted = []
        for number in numbers:
            reservation = self.model.open.pop(number)
            if commit:
                entry = reservation.entry
                self.model.entries[entry] = reservation.extent
                self.model.versions[entry] = self.model.versions.get(entry, 0) + 1
                self.model.use(entry[0])
                wanted += [(arena, entry) for arena in self.model.wants(entry)]
            self.ended.append(number)
        self.model.forget_empty()
        self.take_promotions(wanted)

    def take_promotions(self, wanted: list[tuple[int, Entry]]) -> None:
        """What a call has begun: each of the wanted copies or none, in room that nobody reads or writes."""
        entry_at = {extent.offset: entry for entry, extent in self.model.entries.items()}
        begun = []
        for promotion in self.cache.take_promotions():
            copies = tuple(
                self.model.copy_of(promotion.arena_id, entry_at[extent.offset], offset)
                for extent, offset in promotion.pairs
            )
            assert len({copy.entry[:2] for copy in copies}) == 1
            for copy, (extent, offset) in zip(copies, promotion.pairs, strict=True):
                assert copy.extent == extent and offset % UNIT == 0
                assert copy.units() <= {(copy.arena, unit) for unit in range(DEVICE_UNITS[copy.arena])}
                for other in self.untouchable():
                    assert not copy.units() & other.units()
                self.model.in_flight[-len(begun)] = (copy,)  # untouchable for the next one
                begun.append((copy.arena, copy.entry))
            for number in [number for number in self.model.in_flight if number <= 0]:
                del self.model.in_flight[number]
            self.model.in_flight[promotion.id] = copies
        assert len(set(begun)) == len(begun) and set(begun) <= set(wanted)
        for arena, _ in set(wanted) - set(begun):
            self.model.no_room[arena] += 1

    def untouchable(self) -> list[Copy]:
        """Copies that are being made, or that a lease names."""
        held = [copy for lease in self.model.leases.values() if lease.expiry > self.model.now for copy in lease.copies]
        return held + [copy for copies in self.model.in_flight.values() for copy in copies]

    def end_promotion(self, choose: Choose, ok: bool) -> None:
        if self.model.in_flight:
            number = choose(sorted(self.model.in_flight))
            copies = self.model.in_flight.pop(number)
            (self.cache.promoted if ok else self.cache.promotion_failed)(number)
            for copy in copies:  # a copy that failed has spoilt its room too
                for unit in copy.units():
                    self.model.memory.pop(unit, None)
                    if ok:
                        self.model.memory[unit] = copy

    def check_copies(self, device: int, hit: Hit, path: tuple[int, ...], layers: list[int]) -> list[Copy]:
        """What a hit names is there, whole, and of the blob as it is now; returns it."""
        entries = [(chunk, hit.producer, layer) for chunk in path[: hit.num_chunks] for layer in layers]
        named = []
        if hit.device_offsets:
            for entry, offset in zip(entries, hit.device_offsets, strict=True):
                if offset != NO_COPY:
                    copy = self.model.copy_of(device, entry, offset)
                    assert {self.model.memory.get(unit) for unit in copy.units()} == {copy}
                    named.append(copy)
            assert named
        return named

    def commit_what_has_ended(self, session: int) -> None:
        if self.ended:
            with pytest.raises(NotFound):
                self.cache.commit(session, [*self.reservations_of(session), self.ended[-1]], self.model.now)

    def look_up(self, session: int, path: tuple[int, ...], layers: list[int], lease_s: float, device: int) -> None:
        keys, want = [KEYS[chunk] for chunk in path], Want(Kind.MAP, MODEL, tuple(layers))
        result = self.cache.lookup(session, keys, [want], lease_s, self.model.now, device)
        expected = set()
        for producer in PRODUCERS:
            if length := self.model.run(path, producer, layers):
                run = path[:length] if lease_s else ()
                extents = tuple(self.model.entries[chunk, producer, layer] for chunk in run for layer in layers)
                expected.add(Hit(0, producer, length, extents))
        hits = {replace(hit, device_offsets=()) for hit in result.hits}
        assert len(result.hits) == len(expected) and hits == expected
        assert bool(result.lease_id) == bool(expected and lease_s)
        if not (result.lease_id and device):
            assert not any(hit.device_offsets for hit in result.hits)
        wanted: list[tuple[int, Entry]] = []
        if result.lease_id:
            chunks = path[: max(hit.num_chunks for hit in result.hits)]
            for number, chunk in enumerate(chunks):
                if number + 1 == len(chunks) or PARENTS[chunks[number + 1]] != chunk:
                    self.model.use(chunk)
            extents = tuple(extent for hit in result.hits for extent in hit.extents)
            named = [copy for hit in result.hits for copy in self.check_copies(device, hit, path, layers)]
            lease = Lease(session, chunks, extents, self.model.now + lease_s, tuple(named))
            self.model.leases[result.lease_id] = lease
            if device:
                there = {copy.entry for copy in named}
                there |= {
                    copy.entry for copies in self.model.in_flight.values() for copy in copies if copy.arena == device
                }
                runs = [(chunk, hit.producer) for hit in result.hits for chunk in path[: hit.num_chunks]]
                entries = [(chunk, producer, layer) for chunk, producer in runs for layer in layers]
                wanted = [(device, entry) for entry in entries if entry not in there]
        self.take_promotions(wanted)

    def release(self, session: int, choose: Choose) -> None:
        own = sorted(number for number, lease in self.model.leases.items() if lease.session == session)
        if own:
            number = choose(own)
            for _ in range(2):  # the second time it has ended already
                self.cache.release(session, [number], self.model.now)
            del self.model.leases[number]

    def end_session(self, session: int) -> None:
        for _ in range(2):
            self.cache.end_session(session, self.model.now)
        self.model.end_session(session)
        with pytest.raises(PreconditionFailed, match="has ended"):
            self.cache.heartbeat(session, self.model.now)

    def let_time_pass(self, passed: float) -> None:
        self.model.now += passed
        if passed > TIMEOUT_S / 2:  # the daemon must have been held up
            sessions_then = self.model.sessions.items()
            self.model.sessions = {number: (producer, seen + passed) for number, (producer, seen) in sessions_then}
        sessions = self.model.sessions.items()
        silent = {number for number, (_, seen) in sessions if self.model.now - seen > TIMEOUT_S}
        assert set(self.cache.expire(self.model.now)) == silent
        self.model.expire_held()
        for session in silent:
            self.model.end_session(session)

    def check(self) -> None:
        """Leased blobs are where they were, and every gauge agrees."""
        there = set(self.model.entries.values())
        for number, lease in self.model.leases.items():
            if lease.expiry > self.model.now:
                assert set(lease.extents) <= there
                self.cache._leases.check(lease.session, number, lease.extents)
        stats = self.cache.stats(self.model.now)
        assert stats.num_entries == len(self.model.entries)
        assert stats.num_chunks == len({entry[0] for entry in self.model.entries})
        assert stats.num_sessions == len(self.model.sessions)
        assert stats.num_leases == len(self.model.leases)
        assert stats.num_reservations == len(self.model.open)
        assert stats.used_bytes == sum(-(-extent.num_bytes // UNIT) * UNIT for extent in self.model.extents())
        assert stats.largest_free_bytes == max(self.model.gaps(), default=(0, 0))[0] * UNIT
        assert stats.evicted_entries == self.model.evicted
        for arena in stats.device_arenas:
            assert arena.no_room_entries == self.model.no_room[arena.arena_id]
            there = {copy for copy in self.model.memory.values() if copy.arena == arena.arena_id}
            assert arena.num_copies <= len(there)
            units = {unit for copy in self.untouchable() if copy.arena == arena.arena_id for unit in copy.units()}
            assert len(units) * UNIT <= arena.used_bytes <= arena.arena_bytes
        assert self.cache.is_idle == (not self.model.leases and not self.model.open)

    def finish_everything(self) -> None:
        """With every session gone all that is left can make way, to the last byte, and no key is blocked."""
        for session in list(self.model.sessions):
            self.cache.end_session(session, self.model.now)
        for number in self.model.in_flight:
            self.cache.promoted(number)
        session = self.cache.open_session("last", Publisher(PRODUCERS[0], NAMESPACE), self.model.now)
        blobs = [NewEntry(b"w" * 16, None, 0, NUM_UNITS * UNIT)]
        blobs += [NewEntry(key, parent_key(chunk), 0, 1) for chunk, key in enumerate(KEYS)]
        for blob in blobs:
            (answer,) = self.cache.reserve(session, Kind.MAP, PRODUCERS[0], [blob], self.model.now)
            assert answer.extent == Extent(0, blob.num_bytes)
            self.cache.abort(session, [answer.id], self.model.now)
            stats = self.cache.stats(self.model.now)
            assert stats.used_bytes == 0
            assert [(arena.used_bytes, arena.num_copies) for arena in stats.device_arenas] == [(0, 0)] * len(
                DEVICE_UNITS
            )


class CacheMachine(RuleBasedStateMachine):
    """Up to three engines that publish and read along a small tree of chunks."""

    paths = st.sampled_from(PATHS)
    devices = st.sampled_from((0, *DEVICE_UNITS))
    layers = st.lists(st.integers(0, 1), min_size=1, max_size=2, unique=True)

    @initialize(paths=st.lists(paths, min_size=1, max_size=4))
    def start_with_some_blobs(self, paths: list[tuple[int, ...]]) -> None:
        self.twins = Twins()
        for path in paths:
            self.twins.reserve(self.twins.pick(min), path, [0], UNIT, commit=True)

    @staticmethod
    def chooser(data: st.DataObject) -> Choose:
        return lambda numbers: data.draw(st.sampled_from(numbers))

    def pick(self, data: st.DataObject) -> int:
        return self.twins.pick(self.chooser(data))

    @rule(producer=st.sampled_from(PRODUCERS), device=devices)
    def open_session(self, producer: str, device: int) -> None:
        self.twins.open_session(producer, device)

    @rule(data=st.data(), layers=st.sampled_from([(), (0,), (1,), (0, 1)]))
    def set_interests(self, data: st.DataObject, layers: tuple[int, ...]) -> None:
        self.twins.set_interests(self.pick(data), layers)

    @rule(data=st.data(), ok=st.booleans())
    def end_promotion(self, data: st.DataObject, ok: bool) -> None:
        self.twins.end_promotion(self.chooser(data), ok)

    @rule(data=st.data(), path=paths, layers=layers, num_bytes=st.integers(1, 2 * UNIT), commit=st.booleans())
    def reserve(
        self, data: st.DataObject, path: tuple[int, ...], layers: list[int], num_bytes: int, commit: bool
    ) -> None:
        self.twins.reserve(self.pick(data), path, layers, num_bytes, commit)

    @rule(data=st.data(), commit=st.booleans())
    def finish(self, data: st.DataObject, commit: bool) -> None:
        session = self.pick(data)
        if own := self.twins.reservations_of(session):
            self.twins.finish(session, data.draw(st.lists(st.sampled_from(own), min_size=1, unique=True)), commit)

    @rule(data=st.data())
    def commit_what_has_ended(self, data: st.DataObject) -> None:
        self.twins.commit_what_has_ended(self.pick(data))

    @rule(data=st.data(), path=paths, layers=layers, lease_s=st.sampled_from([0.0, 1.0, MAX_LEASE_S]), device=devices)
    def look_up(
        self, data: st.DataObject, path: tuple[int, ...], layers: list[int], lease_s: float, device: int
    ) -> None:
        self.twins.look_up(self.pick(data), path, layers, lease_s, device)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.twins.release(self.pick(data), self.chooser(data))

    @rule(data=st.data())
    def end_session(self, data: st.DataObject) -> None:
        self.twins.end_session(self.pick(data))

    @rule(passed=st.sampled_from([0.0, 0.5, 1.0, 2.0, TIMEOUT_S / 2, 2 * UNREAD_S]))
    def let_time_pass(self, passed: float) -> None:
        self.twins.let_time_pass(passed)

    @invariant()
    def they_agree(self) -> None:
        if hasattr(self, "twins"):
            self.twins.check()

    def teardown(self) -> None:
        if hasattr(self, "twins"):
            self.twins.finish_everything()


CacheMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestCache = CacheMachine.TestCase


@pytest.mark.parametrize("seed", range(6))
def test_a_long_and_busy_life(seed: int) -> None:
    """What the machine above seldom reaches: hundreds of evictions one after the other."""
    twins, chance = Twins(), Random(seed)
    for _ in range(5000):
        session, path = twins.pick(chance.choice), chance.choice(PATHS)
        layers = chance.choice(([0], [0], [1], [0, 1], [1, 0]))
        match chance.choices(range(9), weights=(10, 3, 1, 6, 5, 1, 4, 6, 1))[0]:
            case 0:
                twins.reserve(session, path, layers, chance.randint(1, 2 * UNIT), chance.random() < 0.7)
            case 1 if own := twins.reservations_of(session):
                twins.finish(session, chance.sample(own, chance.randint(1, len(own))), chance.random() < 0.8)
            case 2:
                twins.commit_what_has_ended(session)
            case 3:
                twins.look_up(
                    session, path, layers, chance.choice((0.0, 1.0, MAX_LEASE_S)), chance.choice((0, 2, 2, 3))
                )
            case 4:
                twins.release(session, chance.choice)
            case 5:
                twins.end_session(session)
                twins.open_session(chance.choice(PRODUCERS), chance.choice((0, 2, 3)))
            case 6:
                twins.let_time_pass(chance.choice((0.0, 0.5, 1.0, TIMEOUT_S / 2, 2 * UNREAD_S)))
            case 7:
                twins.end_promotion(chance.choice, chance.random() < 0.9)
            case 8:
                twins.set_interests(session, chance.choice(((), (0,), (0, 1))))
        twins.check()
    assert twins.model.evicted > 200
    tiers = twins.cache.stats(twins.model.now).device_arenas
    assert all(min(tier.promoted_entries, tier.dropped_entries, tier.no_room_entries) > 20 for tier in tiers)
    twins.finish_everything()
