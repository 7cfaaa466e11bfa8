"""The core's rules one by one; `test_cache_machine.py` tries them in any order."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest

from mapflow.cache_service.core.cache import Cache
from mapflow.cache_service.core.errors import (
    CacheError,
    Draining,
    InvalidRequest,
    NotFound,
    PreconditionFailed,
)
from mapflow.cache_service.core.limits import Limits
from mapflow.cache_service.core.peers import Namespace, Publisher
from mapflow.cache_service.core.values import Extent, Kind, NewEntry, Reservation, ReservationState, Want

RESERVED, EXISTS, NO_ROOM = ReservationState.RESERVED, ReservationState.EXISTS, ReservationState.NO_ROOM
A, B = "m@1/float32/tp0of2", "m@1/float32/tp1of2"
KEYS = [bytes([number]) * 16 for number in range(40)]
NAMESPACE = Namespace(format_version=1, tokenizer_fingerprint="f", chunk_tokens=512, block=64, tenant="", key_hash=1)


class Engine:
    """One session of a cache, with the calls that tests make most; `now` is moved by hand."""

    def __init__(self, cache: Cache, producer: str = A) -> None:
        self.cache = cache
        self.producer = producer
        self.now = 0.0
        self.session = cache.open_session("engine", Publisher(producer, NAMESPACE), 0.0)

    def reserve(self, *chunks: int, num_bytes: int = 64, layers: Sequence[int] = (0,)) -> tuple[Reservation, ...]:
        """Room for chunks of the chain 0 -> 1 -> 2 ..."""
        entries = [
            NewEntry(KEYS[chunk], KEYS[chunk - 1] if chunk else None, layer, num_bytes)
            for chunk in chunks
            for layer in layers
        ]
        return self.cache.reserve(self.session, Kind.MAP, self.producer, entries, self.now)

    def publish(self, *chunks: int, num_bytes: int = 64, layers: Sequence[int] = (0,)) -> list[Extent]:
        answers = self.reserve(*chunks, num_bytes=num_bytes, layers=layers)
        assert {answer.state for answer in answers} == {RESERVED}
        self.cache.commit(self.session, [answer.id for answer in answers], self.now)
        return [answer.extent for answer in answers if answer.extent is not None]

    def run(self, *chunks: int, lease_s: float = 0.0, model: str = "m@1") -> tuple[int, int]:
        """Length of this producer's run of layer 0, and the id of the lease."""
        keys = [KEYS[chunk] for chunk in chunks]
        result = self.cache.lookup(self.session, keys, [Want(Kind.MAP, model, (0,))], lease_s, self.now)
        runs = [hit.num_chunks for hit in result.hits if hit.producer == self.producer]
        return (runs[0] if runs else 0), result.lease_id


def make_cache(units: int = 8) -> Cache:
    limits = Limits(
        arena_bytes=units * 64, session_timeout_s=10.0, max_lease_s=5.0, reservation_timeout_s=5.0, max_keys=32
    )
    return Cache(limits, boot_tag=3, now=0.0)


@pytest.fixture
def cache() -> Cache:
    """One with room for 8 blobs of 64 bytes."""
    return make_cache()


@pytest.fixture
def engine(cache: Cache) -> Engine:
    """A session that publishes as A."""
    return Engine(cache)


def test_a_blob_can_be_found_once_it_is_committed_and_not_before(engine: Engine) -> None:
    (answer,) = engine.reserve(0)
    assert engine.run(0) == (0, 0)
    engine.cache.commit(engine.session, [answer.id], 0.0)
    assert engine.run(0) == (1, 0)


def test_a_miss_is_a_result(engine: Engine) -> None:
    assert engine.run(0, 1, lease_s=1.0) == (0, 0)
    assert engine.cache.stats(0.0).num_leases == 0


def test_every_producer_of_a_model_answers_for_itself(cache: Cache, engine: Engine) -> None:
    other = Engine(cache, B)
    first = engine.publish(0, 1)
    second = other.publish(0)
    result = cache.lookup(engine.session, KEYS[:3], [Want(Kind.MAP, "m@1", (0,))], 1.0, 0.0)
    assert [(hit.producer, hit.num_chunks, list(hit.extents)) for hit in result.hits] == [(A, 2, first), (B, 1, second)]
    stats = cache.stats(0.0)
    assert (stats.lookups, stats.lookup_chunks, stats.hit_chunks) == (1, 3, 2)


def test_each_want_is_answered_on_its_own(engine: Engine) -> None:
    engine.publish(0, layers=(0, 1))
    engine.publish(1, layers=(1,))
    wants = [Want(Kind.MAP, "m@1", (0,)), Want(Kind.MAP, "none@1", (0,)), Want(Kind.MAP, "m@1", (1,))]
    result = engine.cache.lookup(engine.session, KEYS[:2], wants, 0.0, 0.0)
    assert [(hit.want, hit.num_chunks, hit.extents) for hit in result.hits] == [(0, 1, ()), (2, 2, ())]
    stats = engine.cache.stats(0.0)
    assert (stats.lookup_chunks, stats.hit_chunks) == (6, 3)


def test_an_entry_that_exists_or_is_being_written_gets_no_room(cache: Cache, engine: Engine) -> None:
    twin = Engine(cache, A)
    engine.publish(0)
    engine.reserve(1)
    assert [answer.state for answer in twin.reserve(0, 1, 2)] == [EXISTS, EXISTS, RESERVED]
    assert cache.stats(0.0).num_reservations == 2


def test_the_same_entry_twice_in_one_request_gets_room_once(engine: Engine) -> None:
    assert [answer.state for answer in engine.reserve(0, 0)] == [RESERVED, EXISTS]


def test_leaves_go_first_and_the_oldest_chain_before_the_newer(engine: Engine) -> None:
    engine.publish(0, 1, 2, 3)
    for number in range(20, 24):  # chunks 20.. form a chain without its start
        engine.publish(number)
    engine.publish(30)
    assert engine.run(0, 1, 2, 3)[0] == 3
    engine.publish(31)
    engine.publish(32)
    assert engine.run(0, 1, 2, 3)[0] == 1
    assert engine.run(20, 21, 22, 23)[0] == 4


def test_a_leased_lookup_counts_as_use_and_a_look_does_not(engine: Engine) -> None:
    for number in (0, 10, 20, 30):
        engine.publish(number, num_bytes=128)
    engine.run(0)
    _, lease = engine.run(10, lease_s=1.0)
    engine.cache.release(engine.session, [lease], 0.0)
    engine.publish(35, num_bytes=128)
    engine.publish(37, num_bytes=128)
    assert [engine.run(number)[0] for number in (0, 10, 20, 30)] == [0, 1, 0, 1]


def test_leased_blobs_stay_and_the_rest_makes_way(engine: Engine) -> None:
    engine.publish(0, 10, 20, 30, num_bytes=128)
    _, lease = engine.run(10, lease_s=5.0)
    _, other = engine.run(20, lease_s=5.0)
    answers = engine.reserve(5, 15, 25, num_bytes=128)
    assert [answer.state for answer in answers] == [RESERVED, RESERVED, NO_ROOM]
    assert [engine.run(number)[0] for number in (0, 10, 20, 30)] == [0, 1, 1, 0]
    engine.cache.release(engine.session, [lease, other], 0.0)
    assert engine.reserve(25, num_bytes=128)[0].state is RESERVED


def test_two_leases_on_one_chunk_must_both_end(cache: Cache, engine: Engine) -> None:
    reader = Engine(cache, B)
    engine.publish(0, num_bytes=512)
    _, first = engine.run(0, lease_s=5.0)
    keys, want = KEYS[:1], [Want(Kind.MAP, "m@1", (0,))]
    second = cache.lookup(reader.session, keys, want, 5.0, 0.0).lease_id
    cache.release(engine.session, [first], 0.0)
    assert engine.reserve(9)[0].state is NO_ROOM
    cache.release(reader.session, [second], 0.0)
    assert engine.reserve(9)[0].state is RESERVED


def test_nothing_is_evicted_for_a_chunk_whose_parent_found_no_room(engine: Engine) -> None:
    engine.publish(0, 1, 2, 3, 4, 5, 6, 7)
    states = [answer.state for answer in engine.reserve(8, 9, 10, 11)]
    assert states == [NO_ROOM] * 4  # 8 may not push out 7, its parent; so 9 would be out of reach
    assert engine.run(*range(8))[0] == 8
    assert engine.cache.stats(0.0).evicted_entries == 0


def test_a_lease_ends_with_its_time(engine: Engine) -> None:
    (extent,) = engine.publish(0)
    _, lease = engine.run(0, lease_s=2.0)
    engine.cache.check_lease(engine.session, lease, [extent], 1.999)
    with pytest.raises(NotFound, match="not in force"):
        engine.cache.check_lease(engine.session, lease, [extent], 2.0)
    engine.cache.release(engine.session, [lease], 2.0)


def test_a_lease_covers_what_was_found_and_belongs_to_its_session(cache: Cache, engine: Engine) -> None:
    stranger = Engine(cache, B)
    found, beyond = engine.publish(0), engine.publish(1)
    _, lease = engine.run(0, lease_s=2.0)
    cache.check_lease(engine.session, lease, found, 0.0)
    with pytest.raises(NotFound, match="does not cover"):
        cache.check_lease(engine.session, lease, beyond, 0.0)
    with pytest.raises(NotFound):
        cache.check_lease(stranger.session, lease, found, 0.0)
    with pytest.raises(NotFound):
        cache.release(stranger.session, [lease], 0.0)
    assert cache.stats(0.0).num_leases == 1


def test_a_reservation_of_a_silent_writer_does_not_block_its_key(cache: Cache, engine: Engine) -> None:
    twin = Engine(cache, A)
    (answer,) = engine.reserve(0)
    twin.now = 4.999
    assert twin.reserve(0)[0].state is EXISTS
    twin.now = 5.0
    assert twin.reserve(0)[0].state is RESERVED
    with pytest.raises(NotFound, match="not open"):
        cache.commit(engine.session, [answer.id], 5.0)
    cache.abort(engine.session, [answer.id], 5.0)


def test_a_reservation_dies_with_its_session(cache: Cache, engine: Engine) -> None:
    twin = Engine(cache, A)
    engine.reserve(0)
    cache.end_session(engine.session, 0.0)
    assert twin.reserve(0)[0].state is RESERVED
    assert cache.stats(0.0).used_bytes == 64


@pytest.mark.parametrize(("lease_s", "until"), [(9.0, 5.0), (3.0, 3.0)])
def test_leased_chunks_stay_for_a_while_when_their_session_ends(lease_s: float, until: float) -> None:
    """A GPU may still be copying them: for the grace, at most until the lease would have ended."""
    limits = Limits(
        arena_bytes=64,
        session_timeout_s=99.0,
        max_lease_s=9.0,
        reservation_timeout_s=99.0,
        max_keys=32,
        read_grace_s=5.0,
    )
    cache = Cache(limits, boot_tag=3, now=0.0)
    writer, reader = Engine(cache, A), Engine(cache, B)
    writer.publish(0)
    cache.lookup(reader.session, KEYS[:1], [Want(Kind.MAP, "m@1", (0,))], lease_s, 0.0)
    cache.end_session(reader.session, 0.0)
    assert cache.stats(0.0).num_leases == 0
    writer.now = until - 0.1
    assert writer.reserve(7)[0].state is NO_ROOM
    writer.now = until
    assert writer.reserve(7)[0].state is RESERVED


def test_committed_blobs_outlive_their_session(cache: Cache, engine: Engine) -> None:
    reader = Engine(cache, B)
    engine.publish(0)
    cache.end_session(engine.session, 0.0)
    assert [
        hit.producer for hit in cache.lookup(reader.session, KEYS[:1], [Want(Kind.MAP, "m@1", (0,))], 0.0, 0.0).hits
    ] == [A]


def test_commit_is_all_or_nothing(engine: Engine) -> None:
    first, second = engine.reserve(0, 1)
    with pytest.raises(NotFound):
        engine.cache.commit(engine.session, [first.id, second.id, second.id + 1], 0.0)
    assert engine.run(0) == (0, 0)
    engine.cache.commit(engine.session, [first.id, second.id, first.id], 0.0)
    assert engine.run(0, 1)[0] == 2


def test_nobody_else_can_commit_or_abort_a_reservation(cache: Cache, engine: Engine) -> None:
    twin = Engine(cache, A)
    (answer,) = engine.reserve(0)
    with pytest.raises(NotFound):
        cache.commit(twin.session, [answer.id], 0.0)
    with pytest.raises(NotFound):
        cache.abort(twin.session, [answer.id], 0.0)
    assert cache.check_reservation(engine.session, answer.id, 0.0) == answer.extent


def test_a_refused_entry_takes_the_rest_of_its_request_with_it(engine: Engine) -> None:
    engine.publish(1)
    entries = [NewEntry(KEYS[5], None, 0, 64), NewEntry(KEYS[1], KEYS[9], 1, 64)]
    with pytest.raises(InvalidRequest, match="parent_key"):
        engine.cache.reserve(engine.session, Kind.MAP, A, entries, 0.0)
    stats = engine.cache.stats(0.0)
    assert (stats.num_reservations, stats.used_bytes) == (0, 64)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (NewEntry(KEYS[0], None, 0, 0), r"num_bytes must be in \[1, 512\]"),
        (NewEntry(KEYS[0], None, 0, 513), r"num_bytes must be in \[1, 512\] .*513"),
        (NewEntry(b"short", None, 0, 1), "key must have 16 or 32 bytes, got 5"),
        (NewEntry(KEYS[0], b"long" * 9, 0, 1), "parent_key must have 16 or 32 bytes, got 36"),
        (NewEntry(KEYS[0], KEYS[0], 0, 1), "descends"),
    ],
)
def test_malformed_entries_are_refused(engine: Engine, entry: NewEntry, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        engine.cache.reserve(engine.session, Kind.MAP, A, [entry], 0.0)
    assert engine.cache.stats(0.0).used_bytes == 0


def test_the_largest_blob_fills_the_arena(engine: Engine) -> None:
    assert engine.publish(0, num_bytes=512) == [Extent(0, 512)]


@pytest.mark.parametrize(
    ("keys", "want", "lease_s", "message"),
    [
        ([], Want(Kind.MAP, "m", (0,)), 0.0, "1 to 32 in one request, got 0"),
        (KEYS[:33], Want(Kind.MAP, "m", (0,)), 0.0, "got 33"),
        ([KEYS[0], KEYS[0]], Want(Kind.MAP, "m", (0,)), 0.0, "same key twice"),
        (KEYS[:1], Want(Kind.MAP, "", (0,)), 0.0, "want.model"),
        (KEYS[:1], Want(Kind.MAP, "m", ()), 0.0, "want.layers"),
        (KEYS[:1], Want(Kind.MAP, "m", (1, 1)), 0.0, "want.layers"),
        (KEYS[:1], Want(Kind.MAP, "m", (0,)), 5.1, r"lease_s must be in \[0, 5.0\], got 5.1"),
        (KEYS[:1], Want(Kind.MAP, "m", (0,)), -1.0, "lease_s"),
        (KEYS[:1], Want(Kind.MAP, "m", (0,)), math.nan, "lease_s"),
    ],
)
def test_malformed_lookups_are_refused(
    engine: Engine, keys: list[bytes], want: Want, lease_s: float, message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        engine.cache.lookup(engine.session, keys, [want], lease_s, 0.0)


def test_a_request_has_a_limit_of_entries(engine: Engine) -> None:
    with pytest.raises(InvalidRequest, match="at most 32 in one request, got 33"):
        engine.reserve(*range(33))


def test_only_the_announced_producer_can_publish(cache: Cache, engine: Engine) -> None:
    reader = cache.open_session("reader", None, 0.0)
    entry = [NewEntry(KEYS[0], None, 0, 1)]
    with pytest.raises(InvalidRequest, match=f"{B}.*announced.*{A}"):
        cache.reserve(engine.session, Kind.MAP, B, entry, 0.0)
    with pytest.raises(InvalidRequest, match="none"):
        cache.reserve(reader, Kind.MAP, A, entry, 0.0)


def test_draining_refuses_new_work_and_lets_the_rest_finish(engine: Engine) -> None:
    cache, session = engine.cache, engine.session
    engine.publish(0)
    _, lease = engine.run(0, lease_s=5.0)
    first, second = engine.reserve(1, 2)
    cache.drain()
    calls: list[Callable[[], object]] = [
        lambda: cache.open_session("late", None, 0.0),
        lambda: engine.run(0),
        lambda: engine.reserve(3),
    ]
    for call in calls:
        with pytest.raises(Draining):
            call()
    assert not cache.is_idle
    cache.heartbeat(session, 0.0)
    cache.commit(session, [first.id], 0.0)
    cache.abort(session, [second.id], 0.0)
    cache.release(session, [lease], 0.0)
    assert cache.is_idle


def test_sessions_that_are_unknown_ended_or_of_another_boot_are_told_apart(cache: Cache, engine: Engine) -> None:
    foreign = Cache(
        Limits(arena_bytes=64, session_timeout_s=1.0, max_lease_s=1.0, reservation_timeout_s=1.0, max_keys=1),
        boot_tag=4,
        now=0.0,
    ).open_session("x", None, 0.0)
    cache.end_session(engine.session, 0.0)
    cases: list[tuple[int, type[CacheError], str]] = [
        (0, NotFound, "does not exist"),
        (engine.session + 1, NotFound, "does not exist"),
        (engine.session, PreconditionFailed, "has ended"),
        (foreign, PreconditionFailed, "another start"),
    ]
    for session, error, message in cases:
        with pytest.raises(error, match=message):
            cache.heartbeat(session, 0.0)
        with pytest.raises(error, match=message):
            cache.lookup(session, KEYS[:1], [Want(Kind.MAP, "m@1", (0,))], 0.0, 0.0)


def test_formats_are_compared_only_if_any_is_named(cache: Cache) -> None:
    cache.check_formats([])
    cache.check_formats([7, 1])
    with pytest.raises(PreconditionFailed, match=r"\[7, 8\]"):
        cache.check_formats([7, 8])


def test_a_client_has_a_name(cache: Cache) -> None:
    with pytest.raises(InvalidRequest, match="client_name"):
        cache.open_session("", None, 0.0)
