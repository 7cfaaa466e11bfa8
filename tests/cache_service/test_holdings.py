"""Ids that know their boot, and things held by a session for a while."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mapflow.cache_service.core.holdings import Holdings
from mapflow.cache_service.core.ids import IdSequence


def test_ids_tell_issued_from_never_issued_and_from_another_boot() -> None:
    ours, theirs = IdSequence(7), IdSequence(8)
    first, foreign = ours.take(), theirs.take()
    assert ours.was_issued(first) and not ours.is_foreign(first)
    assert not ours.was_issued(first + 1) and not ours.is_foreign(first + 1)
    assert not ours.was_issued(foreign) and ours.is_foreign(foreign)
    for small in (0, 1, 12345):
        assert not ours.was_issued(small) and not ours.is_foreign(small)
    assert 0 < first < 1 << 64


@pytest.mark.parametrize("tag", [0, -1, 1 << 24])
def test_a_boot_tag_fits_its_bits(tag: int) -> None:
    with pytest.raises(ValueError, match=str(tag)):
        IdSequence(tag)


class HoldingsMachine(RuleBasedStateMachine):
    """The model: a dictionary of id -> (session, value, expiry)."""

    def __init__(self) -> None:
        super().__init__()
        self.holdings: Holdings[str] = Holdings(1)
        self.model: dict[int, tuple[int, str, int]] = {}
        self.all_ids: list[int] = []
        self.now = 0

    @rule(session=st.integers(1, 3), value=st.text(max_size=2), lasts=st.integers(0, 5))
    def add(self, session: int, value: str, lasts: int) -> None:
        number = self.holdings.add(session, value, self.now + lasts)
        assert number not in self.all_ids
        self.all_ids.append(number)
        self.model[number] = (session, value, self.now + lasts)

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        if self.model:
            number = data.draw(st.sampled_from(sorted(self.model)))
            assert self.holdings.remove(number) == self.model.pop(number)[1]

    @rule(session=st.integers(1, 3))
    def end_session(self, session: int) -> None:
        expected = sorted(number for number, (owner, _, _) in self.model.items() if owner == session)
        assert self.holdings.of_session(session) == expected
        for number in expected:
            self.holdings.remove(number)
            del self.model[number]

    @rule(passed=st.integers(0, 3))
    def let_time_pass(self, passed: int) -> None:
        self.now += passed
        expected = {number for number, (_, _, expiry) in self.model.items() if expiry <= self.now}
        due = self.holdings.due(self.now)
        assert len(due) == len(expected) and set(due) == expected
        for number in due:
            self.holdings.remove(number)
            del self.model[number]

    @invariant()
    def agrees(self) -> None:
        assert len(self.holdings) == len(self.model)
        for number in self.all_ids:
            assert self.holdings.has_ended(number) == (number not in self.model)
            for session in (1, 2, 3):
                owner, value, _ = self.model.get(number, (0, "", 0))
                assert self.holdings.get(session, number) == (value if owner == session else None)


HoldingsMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestHoldings = HoldingsMachine.TestCase
