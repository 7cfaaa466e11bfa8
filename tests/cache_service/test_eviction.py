"""The eviction order against a list that is scanned."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mapflow.cache_service.core.eviction import EvictionOrder

CHUNKS = [bytes([number]) for number in range(8)]


def take(order: EvictionOrder) -> bytes | None:
    taken = order.take()
    return None if taken is None else taken[0]


def test_use_of_what_is_gone_may_count_for_what_it_held() -> None:
    order = EvictionOrder()
    for chunk in CHUNKS[:4]:
        order.add(chunk, holds=chunk == CHUNKS[0])
    order.touch(CHUNKS[1])
    order.hold(CHUNKS[2])
    assert take(order) == CHUNKS[3]
    taken = order.take()
    assert taken is not None and taken[0] == CHUNKS[1]
    order.unhold(CHUNKS[2])
    order.unhold(CHUNKS[0], used_at=taken[1])
    assert [take(order), take(order)] == [CHUNKS[2], CHUNKS[0]]


def test_takes_the_least_recently_used_first() -> None:
    order = EvictionOrder()
    for chunk in CHUNKS[:3]:
        order.add(chunk, holds=0)
    order.touch(CHUNKS[0])
    assert [take(order) for _ in range(4)] == [CHUNKS[1], CHUNKS[2], CHUNKS[0], None]


def test_a_held_chunk_keeps_its_place_until_it_is_let_go() -> None:
    order = EvictionOrder()
    for chunk in CHUNKS[:3]:
        order.add(chunk, holds=0)
    order.hold(CHUNKS[0])
    order.hold(CHUNKS[0])
    assert take(order) == CHUNKS[1]
    order.unhold(CHUNKS[0])
    order.add(CHUNKS[3], holds=0)
    order.unhold(CHUNKS[0])
    assert [take(order), take(order), take(order)] == [CHUNKS[0], CHUNKS[2], CHUNKS[3]]


def test_a_chunk_that_was_removed_and_came_back_is_new() -> None:
    order = EvictionOrder()
    order.add(CHUNKS[0], holds=0)
    order.add(CHUNKS[1], holds=0)
    order.remove(CHUNKS[0])
    order.add(CHUNKS[0], holds=0)
    assert [take(order), take(order), take(order)] == [CHUNKS[1], CHUNKS[0], None]


def test_the_queue_does_not_grow_with_use() -> None:
    order = EvictionOrder()
    for chunk in CHUNKS:
        order.add(chunk, holds=0)
    for _ in range(1000):
        for chunk in CHUNKS:
            order.touch(chunk)
            order.hold(chunk)
            order.unhold(chunk)
    assert len(order._queue) == len(CHUNKS)


def test_one_step_does_not_look_at_everything() -> None:
    """With n chunks, n takes must look at about n queue items, not n squared."""
    order = EvictionOrder()
    num_chunks = 20_000
    for number in range(num_chunks):
        order.add(number.to_bytes(4, "big"), holds=0)
    for number in range(0, num_chunks, 2):
        order.hold(number.to_bytes(4, "big"))
    looks = 0

    class Counting(dict):  # type: ignore[type-arg]
        def get(self, *arguments: object) -> object:
            nonlocal looks
            looks += 1
            return super().get(*arguments)

    order._places = Counting(order._places)
    while order.take() is not None:
        pass
    assert looks <= num_chunks + 1


class OrderMachine(RuleBasedStateMachine):
    """The model: a list of [chunk, holds], least recently used first."""

    def __init__(self) -> None:
        super().__init__()
        self.order = EvictionOrder()
        self.model: list[list[object]] = []

    def find(self, chunk: bytes) -> list[object] | None:
        return next((item for item in self.model if item[0] == chunk), None)

    @rule(chunk=st.sampled_from(CHUNKS), holds=st.integers(0, 2))
    def add(self, chunk: bytes, holds: int) -> None:
        if self.find(chunk) is None:
            self.order.add(chunk, holds)
            self.model.append([chunk, holds])

    @rule(chunk=st.sampled_from(CHUNKS))
    def touch(self, chunk: bytes) -> None:
        if (item := self.find(chunk)) is not None:
            self.order.touch(chunk)
            self.model.remove(item)
            self.model.append(item)

    @rule(chunk=st.sampled_from(CHUNKS), change=st.sampled_from([1, -1]))
    def change_holds(self, chunk: bytes, change: int) -> None:
        item = self.find(chunk)
        if item is not None and item[1] + change >= 0:  # type: ignore[operator]
            (self.order.hold if change > 0 else self.order.unhold)(chunk)
            item[1] += change  # type: ignore[operator]

    @rule(chunk=st.sampled_from(CHUNKS))
    def remove(self, chunk: bytes) -> None:
        if (item := self.find(chunk)) is not None:
            self.order.remove(chunk)
            self.model.remove(item)

    @precondition(lambda self: self.model)
    @rule()
    def take(self) -> None:
        expected = next((item for item in self.model if item[1] == 0), None)
        assert take(self.order) == (expected and expected[0])
        if expected is not None:
            self.model.remove(expected)

    @invariant()
    def knows_the_same_chunks(self) -> None:
        assert set(self.order._places) == {item[0] for item in self.model}


OrderMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestOrder = OrderMachine.TestCase
