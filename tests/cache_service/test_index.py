"""The index against a flat set of committed entries."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mapflow.cache_service.core.errors import InvalidRequest
from mapflow.cache_service.core.index import PrefixIndex
from mapflow.cache_service.core.values import EntryId, Extent, Kind

A = "m@1/float32/tp0of2"
B = "m@1/float32/tp1of2"
C = "other@1/float32/tp0of1"
PARENTS = (None, 0, 1, 2, 1, 4, None, 6)
KEYS = [bytes([number]) * 16 for number in range(len(PARENTS))]


def parent_of(number: int) -> bytes | None:
    parent = PARENTS[number]
    return None if parent is None else KEYS[parent]


def run_length(index: PrefixIndex, keys: list[bytes], producer: str, layers: tuple[int, ...]) -> int:
    return len(index.run(keys, Kind.MAP, producer, layers)) // len(layers)


def publish(index: PrefixIndex, number: int, producer: str = A, layer: int = 0) -> Extent:
    extent = Extent(64 * (100 * number + layer), 64)
    index.open(KEYS[number], parent_of(number))
    index.put(EntryId(KEYS[number], Kind.MAP, producer, layer), extent)
    assert not index.close(KEYS[number])
    return extent


def test_a_run_ends_at_the_first_chunk_that_lacks_a_layer() -> None:
    index = PrefixIndex()
    for number in range(4):
        publish(index, number, layer=0)
        if number != 2:
            publish(index, number, layer=3)
    assert run_length(index, KEYS[:4], A, (0,)) == 4
    assert run_length(index, KEYS[:4], A, (3, 0)) == 2
    assert run_length(index, KEYS[:4], A, (0, 7)) == 0
    assert run_length(index, KEYS[:4], B, (0,)) == 0


def test_a_run_may_start_in_the_middle_of_a_chain() -> None:
    index = PrefixIndex()
    for number in (2, 3):  # their ancestors were never published
        publish(index, number)
    assert run_length(index, KEYS[2:4], A, (0,)) == 2
    assert run_length(index, KEYS[:4], A, (0,)) == 0


def test_extents_come_in_the_order_of_the_layers_asked_for() -> None:
    index = PrefixIndex()
    extents = {layer: publish(index, 0, layer=layer) for layer in (5, 1, 3)}
    assert index.run(KEYS[:1], Kind.MAP, A, (3, 5, 1)) == [extents[3], extents[5], extents[1]]


def test_what_is_being_written_cannot_be_found() -> None:
    index = PrefixIndex()
    assert index.open(KEYS[0], None)
    assert run_length(index, KEYS[:1], A, (0,)) == 0
    assert index.num_chunks == 0
    assert index.close(KEYS[0])
    assert KEYS[0] not in index


def test_two_writers_of_one_chunk_leave_one_after_the_other() -> None:
    index = PrefixIndex()
    assert index.open(KEYS[0], None)
    assert not index.open(KEYS[0], None)
    assert not index.close(KEYS[0])
    assert index.close(KEYS[0])


def test_producers_are_those_that_have_something() -> None:
    index = PrefixIndex()
    for producer in (A, B, C):
        publish(index, 0, producer)
    assert index.producers(Kind.MAP, "m@1") == [A, B]
    assert index.producers(Kind.MAP, "other@1") == [C]
    index.drop(KEYS[0])
    assert index.producers(Kind.MAP, "m@1") == []


def test_children_count_whether_or_not_their_parent_is_here() -> None:
    index = PrefixIndex()
    publish(index, 2)
    publish(index, 4)
    assert index.num_children(KEYS[1]) == 2
    publish(index, 1)
    index.drop(KEYS[1])
    assert index.num_children(KEYS[1]) == 2
    index.drop(KEYS[2])
    index.drop(KEYS[4])
    assert index.num_children(KEYS[1]) == 0


def test_a_chunk_has_one_parent() -> None:
    index = PrefixIndex()
    publish(index, 1)
    with pytest.raises(InvalidRequest, match=f"{KEYS[1].hex()} is {KEYS[0].hex()}, got {KEYS[6].hex()}"):
        index.open(KEYS[1], KEYS[6])
    with pytest.raises(InvalidRequest, match="got none"):
        index.open(KEYS[1], None)


@given(st.integers(1, 6))
def test_no_chunk_becomes_its_own_ancestor(length: int) -> None:
    index = PrefixIndex()
    keys = KEYS[:length]
    for parent, key in pairwise(keys):
        index.open(key, parent)
    with pytest.raises(InvalidRequest, match="descends"):
        index.open(keys[0], keys[-1])
    assert keys[0] not in index


class IndexMachine(RuleBasedStateMachine):
    """The model: a dictionary of committed entries and a list of chunks with writers."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.entries: dict[tuple[int, str, int], Extent] = {}
        self.writers: list[int] = []
        self.next_offset = 0

    def chunks(self) -> set[int]:
        return {number for number, _, _ in self.entries} | set(self.writers)

    @rule(number=st.integers(0, 7))
    def open(self, number: int) -> None:
        assert self.index.open(KEYS[number], parent_of(number)) == (number not in self.chunks())
        self.writers.append(number)

    @rule(number=st.integers(0, 7))
    def close(self, number: int) -> None:
        if number in self.writers:
            self.writers.remove(number)
            assert self.index.close(KEYS[number]) == (number not in self.chunks())

    @rule(number=st.integers(0, 7), producer=st.sampled_from([A, B, C]), layer=st.integers(0, 2))
    def put(self, number: int, producer: str, layer: int) -> None:
        if number in self.writers and (number, producer, layer) not in self.entries:
            self.next_offset += 64
            extent = Extent(self.next_offset, 64)
            self.index.put(EntryId(KEYS[number], Kind.MAP, producer, layer), extent)
            self.entries[number, producer, layer] = extent

    @rule(number=st.integers(0, 7))
    def drop(self, number: int) -> None:
        if number in self.chunks() and number not in self.writers:
            expected = {extent for entry, extent in self.entries.items() if entry[0] == number}
            dropped = self.index.drop(KEYS[number])
            assert len(dropped) == len(expected) and set(dropped) == expected
            self.entries = {entry: extent for entry, extent in self.entries.items() if entry[0] != number}

    @rule(
        path=st.sampled_from([(0, 1, 2, 3), (1, 2, 3), (0, 1, 4, 5), (6, 7), (7,)]),
        producer=st.sampled_from([A, B, C]),
        layers=st.lists(st.integers(0, 2), min_size=1, max_size=3, unique=True),
    )
    def look_up(self, path: tuple[int, ...], producer: str, layers: list[int]) -> None:
        length = 0
        while length < len(path) and all((path[length], producer, layer) in self.entries for layer in layers):
            length += 1
        expected = [self.entries[number, producer, layer] for number in path[:length] for layer in layers]
        assert self.index.run([KEYS[number] for number in path], Kind.MAP, producer, layers) == expected

    @invariant()
    def counts_agree(self) -> None:
        assert self.index.num_entries == len(self.entries)
        assert self.index.num_chunks == len({number for number, _, _ in self.entries})
        here = self.chunks()
        for number, key in enumerate(KEYS):
            assert (key in self.index) == (number in here)
            assert self.index.num_children(key) == sum(PARENTS[child] == number for child in here)
        for model in ("m@1", "other@1"):
            expected = {producer for _, producer, _ in self.entries if producer.startswith(model)}
            assert set(self.index.producers(Kind.MAP, model)) == expected


IndexMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestIndex = IndexMachine.TestCase
