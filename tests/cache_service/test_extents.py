"""The allocator against a naive model: one flag per 64 bytes, and a scan for the smallest gap that fits."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, MultipleResults, RuleBasedStateMachine, consumes, invariant, multiple, rule

from mapflow.cache_service.core.extents import ALIGNMENT, ExtentAllocator, padded
from mapflow.cache_service.core.values import Extent

NUM_UNITS = 24


@pytest.mark.parametrize(("num_bytes", "expected"), [(1, 64), (63, 64), (64, 64), (65, 128), (1 << 40, 1 << 40)])
def test_padded_is_the_next_multiple_of_64(num_bytes: int, expected: int) -> None:
    assert padded(num_bytes) == expected


def test_takes_the_smallest_gap_that_fits_and_of_equals_the_lowest() -> None:
    allocator = ExtentAllocator(10 * 64)
    taken = [allocator.allocate(size * 64) for size in (2, 1, 1, 1, 1, 1, 3)]
    for number in (0, 2, 4):  # gaps of 2, 1 and 1 units
        extent = taken[number]
        assert extent is not None
        allocator.free(extent)
    assert allocator.allocate(64) == taken[2]
    assert allocator.allocate(64) == taken[4]
    assert allocator.allocate(64) == Extent(0, 64)


def test_freed_neighbours_become_one_gap_in_any_order() -> None:
    for order in ([0, 1, 2], [2, 1, 0], [0, 2, 1], [1, 0, 2]):
        allocator = ExtentAllocator(3 * 64)
        extents = [allocator.allocate(64) for _ in range(3)]
        for number in order:
            extent = extents[number]
            assert extent is not None
            allocator.free(extent)
        assert allocator.largest_free_bytes == 3 * 64


def test_a_tail_shorter_than_the_alignment_is_never_handed_out() -> None:
    allocator = ExtentAllocator(64 + 63)
    assert allocator.num_bytes == 64
    assert allocator.allocate(65) is None
    assert allocator.allocate(64) == Extent(0, 64)
    assert allocator.allocate(1) is None


def test_an_arena_smaller_than_the_alignment_has_no_room() -> None:
    allocator = ExtentAllocator(63)
    assert allocator.largest_free_bytes == 0
    assert allocator.allocate(1) is None


@pytest.mark.parametrize("num_bytes", [0, -1])
def test_an_extent_has_at_least_one_byte(num_bytes: int) -> None:
    with pytest.raises(ValueError, match=str(num_bytes)):
        ExtentAllocator(1024).allocate(num_bytes)


def test_only_what_is_out_can_be_given_back() -> None:
    allocator = ExtentAllocator(1024)
    extent = allocator.allocate(100)
    assert extent is not None
    with pytest.raises(KeyError):
        allocator.free(Extent(extent.offset, 99))
    with pytest.raises(KeyError):
        allocator.free(Extent(64, 64))
    allocator.free(extent)
    with pytest.raises(KeyError):
        allocator.free(extent)
    assert allocator.used_bytes == 0


class AllocatorMachine(RuleBasedStateMachine):
    """Random allocations and frees; the model knows for each unit of 64 bytes whose it is."""

    extents: Bundle[Extent] = Bundle("extents")

    def __init__(self) -> None:
        super().__init__()
        self.allocator = ExtentAllocator(NUM_UNITS * ALIGNMENT + 17)
        self.owner: list[Extent | None] = [None] * NUM_UNITS

    def gaps(self) -> list[tuple[int, int]]:
        """(size, start) of every maximal run of free units."""
        found, start = [], None
        for unit in range(NUM_UNITS + 1):
            free = unit < NUM_UNITS and self.owner[unit] is None
            if free and start is None:
                start = unit
            elif not free and start is not None:
                found.append((unit - start, start))
                start = None
        return found

    @rule(target=extents, num_bytes=st.integers(1, 8 * ALIGNMENT))
    def allocate(self, num_bytes: int) -> MultipleResults[Extent] | Extent:
        units = -(-num_bytes // ALIGNMENT)
        fitting = [gap for gap in self.gaps() if gap[0] >= units]
        extent = self.allocator.allocate(num_bytes)
        if not fitting:
            assert extent is None
            return multiple()
        start = min(fitting)[1]
        assert extent == Extent(start * ALIGNMENT, num_bytes)
        for unit in range(start, start + units):
            assert self.owner[unit] is None, "handed out twice"
            self.owner[unit] = extent
        return extent

    @rule(extent=consumes(extents))
    def free(self, extent: Extent) -> None:
        self.allocator.free(extent)
        self.owner = [None if owner == extent else owner for owner in self.owner]

    @invariant()
    def no_byte_is_lost(self) -> None:
        taken = sum(owner is not None for owner in self.owner)
        assert self.allocator.used_bytes == taken * ALIGNMENT
        assert self.allocator.largest_free_bytes == max(self.gaps(), default=(0, 0))[0] * ALIGNMENT

    def teardown(self) -> None:
        for extent in {owner for owner in self.owner if owner is not None}:
            self.allocator.free(extent)
        assert self.allocator.used_bytes == 0
        assert self.allocator.allocate(NUM_UNITS * ALIGNMENT) == Extent(0, NUM_UNITS * ALIGNMENT)


AllocatorMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAllocator = AllocatorMachine.TestCase
