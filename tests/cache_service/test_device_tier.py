"""Copies in device arenas, as the core decides on them; `test_cache_machine.py` tries the rules in any order."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from mapflow.cache_service.core.cache import Cache
from mapflow.cache_service.core.device_tier import NO_COPY, UNREAD_S
from mapflow.cache_service.core.errors import InvalidRequest
from mapflow.cache_service.core.limits import Limits
from mapflow.cache_service.core.peers import Interest, LayerInterest, Namespace, Publisher
from mapflow.cache_service.core.values import DeviceArenaStats, Kind, LookupResult, NewEntry, Promotion, Want

UNIT = 64
A, B = "m@1/float32/tp0of2", "m@1/float32/tp1of2"
KEYS = [bytes([number]) * 16 for number in range(40)]
NAMESPACE = Namespace(format_version=1, tokenizer_fingerprint="f", chunk_tokens=512, block=64, tenant="", key_hash=1)
OTHER = Namespace(format_version=1, tokenizer_fingerprint="g", chunk_tokens=128, block=64, tenant="x", key_hash=2)
GRACE_S = 5.0


class Engine:
    """One session of a cache, with the calls that tests make most; `now` is moved by hand."""

    def __init__(
        self, units: int = 64, device_units: Sequence[int] = (8,), producer: str = A, device_arena_id: int = 0
    ) -> None:
        limits = Limits(
            arena_bytes=units * UNIT,
            session_timeout_s=1000.0,
            max_lease_s=100.0,
            reservation_timeout_s=5.0,
            max_keys=32,
            read_grace_s=GRACE_S,
            device_arena_bytes=tuple(UNIT * size for size in device_units),
        )
        self.cache = Cache(limits, boot_tag=3, now=0.0)
        self.producer = producer
        self.now = 0.0
        self.session = self.open(device_arena_id)

    def open(self, device_arena_id: int = 0, producer: str | None = None) -> int:
        publisher = Publisher(producer or self.producer, NAMESPACE)
        return self.cache.open_session("engine", publisher, self.now, device_arena_id)

    def publish(
        self, *chunks: int, layers: Sequence[int] = (0,), num_bytes: int = UNIT, producer: str = A, session: int = 0
    ) -> None:
        """Chunks without parents."""
        session = session or self.session
        entries = [NewEntry(KEYS[chunk], None, layer, num_bytes) for chunk in chunks for layer in layers]
        answers = self.cache.reserve(session, Kind.MAP, producer, entries, self.now)
        assert all(answer.id for answer in answers)
        self.cache.commit(session, [answer.id for answer in answers], self.now)

    def look_up(
        self, *chunks: int, layers: Sequence[int] = (0,), lease_s: float = 50.0, arena: int = 2, session: int = 0
    ) -> LookupResult:
        want = Want(Kind.MAP, "m@1", tuple(layers))
        keys = [KEYS[chunk] for chunk in chunks]
        return self.cache.lookup(session or self.session, keys, [want], lease_s, self.now, arena)

    def offsets(self, *chunks: int, layers: Sequence[int] = (0,), arena: int = 2) -> tuple[int, ...]:
        """Where the copies of a run are, by a look-up whose lease ends at once; like any it promotes what has none."""
        result = self.look_up(*chunks, layers=layers, arena=arena)
        self.release(result)
        (hit,) = result.hits
        return hit.device_offsets

    def release(self, result: LookupResult) -> None:
        self.cache.release(self.session, [result.lease_id], self.now)

    def finish(self, ok: bool = True) -> tuple[Promotion, ...]:
        """End what has begun."""
        promotions = self.cache.take_promotions()
        for promotion in promotions:
            (self.cache.promoted if ok else self.cache.promotion_failed)(promotion.id)
        return promotions

    def promote(self, *chunks: int, layers: Sequence[int] = (0,), arena: int = 2) -> tuple[Promotion, ...]:
        """By a look-up whose lease ends at once."""
        self.release(self.look_up(*chunks, layers=layers, arena=arena))
        return self.finish()

    def stats(self, number: int = 0) -> DeviceArenaStats:
        return self.cache.stats(self.now).device_arenas[number]


def test_what_a_look_up_found_without_a_copy_has_one_at_the_next() -> None:
    engine = Engine()
    engine.publish(0, 1, layers=(0, 1), num_bytes=50)
    first = engine.look_up(0, 1, layers=(1, 0))
    assert first.hits[0].device_offsets == ()
    assert engine.offsets(0, 1, layers=(1, 0)) == ()  # not before they are made
    promotions = engine.finish()
    assert [promotion.arena_id for promotion in promotions] == [2, 2]
    copied = [pair for promotion in promotions for pair in promotion.pairs]
    assert [extent for extent, _ in copied] == list(first.hits[0].extents)
    assert engine.offsets(0, 1, layers=(1, 0)) == tuple(offset for _, offset in copied)
    assert engine.offsets(0, 1, layers=(0, 1)) == tuple(copied[index][1] for index in (1, 0, 3, 2))
    assert sorted(offset for _, offset in copied) == [0, UNIT, 2 * UNIT, 3 * UNIT]
    assert engine.stats() == DeviceArenaStats(
        arena_id=2,
        arena_bytes=8 * UNIT,
        used_bytes=4 * UNIT,
        num_copies=4,
        promoted_entries=4,
        no_room_entries=0,
        failed_entries=0,
        dropped_entries=0,
    )


def test_what_has_a_copy_or_is_getting_one_is_not_promoted_again() -> None:
    engine = Engine()
    engine.publish(0, layers=(0, 1))
    engine.look_up(0)
    engine.look_up(0)
    engine.look_up(0, layers=(1, 0))
    started = engine.cache.take_promotions()
    assert [len(promotion.pairs) for promotion in started] == [1, 1]
    engine.cache.promoted(started[1].id)
    assert engine.offsets(0, layers=(0, 1)) == (NO_COPY, started[1].pairs[0][1])
    engine.cache.promoted(started[0].id)
    assert engine.promote(0, layers=(0, 1)) == ()


def test_a_look_up_without_lease_or_device_arena_promotes_nothing_and_names_nothing() -> None:
    engine = Engine()
    engine.publish(0)
    engine.look_up(0, lease_s=0.0)
    engine.look_up(0, arena=0)
    assert engine.finish() == ()
    engine.promote(0)
    assert engine.look_up(0, lease_s=0.0).hits[0].device_offsets == ()
    assert engine.look_up(0, arena=0).hits[0].device_offsets == ()
    assert engine.offsets(0) == (0,)


def test_device_arenas_are_told_apart_and_unknown_ones_refused() -> None:
    engine = Engine(device_units=(8, 4))
    engine.publish(0)
    engine.promote(0, arena=3)
    assert engine.offsets(0, arena=2) == () and engine.offsets(0, arena=3) == (0,)
    assert [engine.stats(number).num_copies for number in (0, 1)] == [0, 1]
    for arena in (1, 4):
        with pytest.raises(InvalidRequest, match=rf"device_arena_id must be 0 or one of \[2, 3\], got {arena}"):
            engine.look_up(0, arena=arena)
        with pytest.raises(InvalidRequest, match=f"device_arena_id .* got {arena}"):
            engine.open(device_arena_id=arena)


def test_each_producer_has_copies_of_its_own() -> None:
    engine = Engine()
    engine.publish(0)
    engine.publish(0, producer=B, session=engine.open(producer=B))
    engine.promote(0)
    offsets = {hit.producer: hit.device_offsets for hit in engine.look_up(0).hits}
    assert set(offsets) == {A, B}
    assert {offset for column in offsets.values() for offset in column} == {0, UNIT}


def test_a_failed_promotion_gives_its_room_back_and_may_be_tried_again() -> None:
    engine = Engine(device_units=(2,))
    engine.publish(0, layers=(0, 1))
    engine.look_up(0, layers=(0, 1))
    assert engine.stats().used_bytes == 2 * UNIT
    engine.finish(ok=False)
    assert (engine.stats().used_bytes, engine.stats().failed_entries, engine.stats().num_copies) == (0, 2, 0)
    assert engine.offsets(0, layers=(0, 1)) == ()
    engine.finish()
    assert engine.offsets(0, layers=(0, 1)) == (0, UNIT)


def test_a_failure_leaves_the_copies_that_were_there() -> None:
    engine = Engine()
    engine.publish(0, layers=(0, 1))
    engine.promote(0)
    engine.look_up(0, layers=(0, 1))
    engine.finish(ok=False)
    assert engine.offsets(0, layers=(0, 1)) == (0, NO_COPY)
    assert engine.stats().used_bytes == UNIT * 2  # the look-up of `offsets` began another
    engine.finish()
    assert engine.offsets(0, layers=(0, 1)) == (0, UNIT)


def test_the_least_recently_used_copies_that_were_read_go_first() -> None:
    engine = Engine(device_units=(3,))
    engine.publish(0, 1, 2, 3)
    for chunk in (0, 1, 2):
        engine.promote(chunk)
    for chunk in (1, 0, 2):
        assert engine.offsets(chunk) != ()
    engine.promote(3)
    assert engine.stats().dropped_entries == 1
    assert [bool(engine.offsets(chunk)) for chunk in (0, 2, 3, 1)] == [True, True, True, False]


@pytest.mark.parametrize(("passed", "is_promoted"), [(UNREAD_S, False), (UNREAD_S + 1, True)])
def test_copies_that_nobody_has_read_have_their_time(passed: float, is_promoted: bool) -> None:
    engine = Engine(device_units=(2,))
    engine.publish(0, 1, 2)
    engine.promote(0, 1)
    engine.now = passed
    promotions = engine.promote(2)
    assert bool(promotions) == is_promoted
    assert engine.stats().no_room_entries == (not is_promoted)
    assert engine.stats().num_copies == 2


def test_held_copies_stay_until_the_lease_ends() -> None:
    engine = Engine(device_units=(1,))
    engine.publish(0, 1)
    engine.promote(0)
    held = engine.look_up(0)
    assert engine.promote(1) == ()
    engine.release(held)
    assert engine.promote(1)
    engine.look_up(1, lease_s=10.0)
    engine.now = 9.0
    assert engine.promote(0) == ()
    engine.now = 10.0
    assert engine.promote(0)


@pytest.mark.parametrize(("lease_s", "ends_after"), [(50.0, GRACE_S), (2.0, 2.0)])
def test_a_session_that_ends_leaves_its_copies_for_the_grace(lease_s: float, ends_after: float) -> None:
    engine = Engine(device_units=(1,))
    reader = engine.open()
    engine.publish(0, 1)
    engine.promote(0)
    engine.look_up(0, lease_s=lease_s, session=reader)
    engine.cache.end_session(reader, engine.now)
    engine.now = ends_after - 0.1
    assert engine.promote(1) == ()
    engine.now = ends_after
    assert engine.promote(1)


def test_copies_in_the_making_are_not_reused() -> None:
    engine = Engine(device_units=(1,))
    engine.publish(0, 1)
    engine.release(engine.look_up(0))
    engine.now = 2 * UNREAD_S
    engine.release(engine.look_up(1))
    assert len(engine.finish()) == 1
    assert engine.offsets(0) == (0,)


def test_a_run_does_not_push_itself_out_and_its_beginning_comes_first() -> None:
    engine = Engine(device_units=(2,))
    engine.publish(0, 1, 2, 3, 4)
    for chunk in (1, 0):
        engine.promote(chunk)
        engine.offsets(chunk)
    assert engine.promote(0, 1, 2, 3) == ()
    assert engine.stats().no_room_entries == 2
    assert engine.promote(2, 3, 4)[0].pairs[0][0] == engine.look_up(2).hits[0].extents[0]
    assert [bool(engine.offsets(chunk)) for chunk in (0, 1, 2, 3, 4)] == [False, False, True, True, False]


def test_other_layers_of_the_same_chunks_do_not_make_way() -> None:
    engine = Engine(device_units=(2,))
    engine.publish(0, 1, layers=(0, 1))
    engine.promote(0, 1)
    assert NO_COPY not in engine.offsets(0, 1)
    assert engine.promote(0, 1, layers=(1,)) == ()
    reader = engine.open(2)
    engine.cache.set_interests(reader, [interest(0, 1, 2)], engine.now)
    engine.publish(0, 1, layers=(2,))
    assert engine.finish() == ()
    engine.publish(2)
    assert len(engine.finish()) == 1
    assert engine.stats().no_room_entries == 4


def test_nothing_makes_way_for_what_does_not_fit_anyway() -> None:
    engine = Engine(device_units=(3,))
    engine.publish(0)
    engine.publish(1, layers=range(4))
    engine.promote(0)
    assert engine.offsets(0) == (0,)
    assert engine.promote(1, layers=range(4)) == ()
    assert (engine.stats().no_room_entries, engine.stats().dropped_entries) == (4, 0)
    assert engine.offsets(0) == (0,)


def test_a_chunk_that_is_evicted_takes_its_copies_along_but_never_while_they_are_made() -> None:
    engine = Engine(units=2, device_units=(2, 2))
    engine.publish(0, 1)
    for arena in (2, 3):
        engine.promote(0, arena=arena)
    engine.release(engine.look_up(1, arena=3))
    promotions = engine.cache.take_promotions()
    engine.publish(2)  # the older chunk makes way
    assert [engine.stats(number).num_copies for number in (0, 1)] == [0, 0]
    assert engine.look_up(0).hits == ()
    (answer,) = engine.cache.reserve(engine.session, Kind.MAP, A, [NewEntry(KEYS[3], None, 0, 2 * UNIT)], engine.now)
    assert not answer.id  # chunk 1 is being copied
    for promotion in promotions:
        engine.cache.promoted(promotion.id)
    assert engine.stats(1).num_copies == 1
    (answer,) = engine.cache.reserve(engine.session, Kind.MAP, A, [NewEntry(KEYS[3], None, 0, 2 * UNIT)], engine.now)
    assert answer.id
    assert (engine.stats(1).num_copies, engine.stats(1).used_bytes) == (0, 0)


def interest(*layers: int, model: str = "m@1", namespace: Namespace = OTHER) -> Interest:
    return Interest(namespace, model, tuple(LayerInterest(layer, (), 0.0, 0) for layer in layers))


def test_what_is_committed_goes_where_somebody_wants_it() -> None:
    engine = Engine(device_units=(8, 8))
    readers = [engine.open(arena) for arena in (2, 3, 2, 0)]
    engine.cache.set_interests(readers[0], [interest(0, 1)], engine.now)
    engine.cache.set_interests(readers[1], [interest(1), interest(0, model="other@1")], engine.now)
    engine.cache.set_interests(readers[2], [interest(1)], engine.now)
    engine.cache.set_interests(readers[3], [interest(2)], engine.now)
    engine.publish(0, 1, layers=(0, 1, 2))
    promotions = engine.finish()
    assert sorted((promotion.arena_id, len(promotion.pairs)) for promotion in promotions) == [
        (2, 2),
        (2, 2),
        (3, 1),
        (3, 1),
    ]
    assert NO_COPY not in engine.offsets(0, 1, layers=(0, 1), arena=2)
    assert NO_COPY not in engine.offsets(0, 1, layers=(1,), arena=3)
    for reader in readers:
        engine.cache.end_session(reader, engine.now)
    engine.finish()
    engine.publish(2, layers=(0, 1))
    assert engine.finish() == ()


def test_an_interest_that_is_withdrawn_promotes_nothing() -> None:
    engine = Engine()
    reader = engine.open(2)
    engine.cache.set_interests(reader, [interest(0)], engine.now)
    engine.cache.set_interests(reader, [], engine.now)
    engine.publish(0)
    assert engine.finish() == ()
