"""Collections stay short however much the daemon holds, and what sessions leave behind is still found."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from mapflow.cache_service.garbage import Garbage


class _Node:
    """Something that cycles are made of."""

    def __init__(self) -> None:
        self.other: _Node | None = None


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    yield
    gc.unfreeze()


def test_what_has_been_there_is_not_looked_through_again() -> None:
    garbage, held = Garbage(), [[_Node()] for _ in range(1000)]
    garbage.tend(0)
    seen = {id(one) for one in gc.get_objects()}
    assert not any(id(one) in seen for one in held)
    assert gc.get_freeze_count() >= len(held)


def test_what_is_set_aside_goes_with_its_last_reference() -> None:
    garbage, node = Garbage(), _Node()
    gone = weakref.ref(node)
    garbage.tend(0)
    del node
    assert gone() is None


def test_cycles_of_the_last_second_go_with_the_next_look() -> None:
    garbage, node = Garbage(), _Node()
    node.other, gone = node, weakref.ref(node)
    del node
    garbage.tend(0)
    assert gone() is None


def test_older_cycles_go_after_a_thousand_sessions() -> None:
    garbage, node = Garbage(), _Node()
    node.other, gone = node, weakref.ref(node)
    garbage.tend(0)
    del node
    garbage.tend(999)
    assert gone() is not None
    garbage.tend(1000)
    assert gone() is None
    assert gc.get_freeze_count() > 0
