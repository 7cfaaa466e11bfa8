"""Reuse that makes steps slower is given up, and only that."""

from __future__ import annotations

from mapflow.connector.vllm.reuse_gain import ReuseGain

STEP = (4096, 4096)
NONE: frozenset[str] = frozenset()
GUIDE, OTHER = frozenset({"guide"}), frozenset({"other"})


def gain(with_reuse: float, without: float) -> ReuseGain:
    one = ReuseGain()
    for _ in range(2):
        one.observe(*STEP, GUIDE, with_reuse)
    one.observe(*STEP, NONE, without)
    return one


def test_a_faster_step_is_always_reused() -> None:
    one = gain(0.9, 1.0)
    assert all(one.pays(*STEP, GUIDE) for _ in range(100))


def test_a_slower_one_is_tried_again_now_and_then() -> None:
    one = gain(1.1, 1.0)
    answers = [one.pays(*STEP, GUIDE) for _ in range(320)]
    assert not any(answers[:20]) and sum(answers) == 10
    for _ in range(20):
        one.observe(*STEP, GUIDE, 0.8)  # the host is no longer busy with something else
    assert one.pays(*STEP, GUIDE)


def test_a_step_that_compiled_something_does_not_speak_against_reuse() -> None:
    one = ReuseGain()
    one.observe(*STEP, NONE, 1.0)
    one.observe(*STEP, GUIDE, 50.0)
    assert one.pays(*STEP, GUIDE)
    one.observe(*STEP, GUIDE, 0.9)
    assert one.pays(*STEP, GUIDE) and (one.saved_s(*STEP, GUIDE) or 0) > 0


def test_as_fast_as_without_is_not_worth_the_approximation() -> None:
    assert not gain(1.0, 1.0).pays(*STEP, GUIDE)


def test_nothing_is_known_of_other_sizes_and_plans() -> None:
    one = gain(1.1, 1.0)
    assert one.pays(8192, 8192, GUIDE) and one.pays(4096, 8192, GUIDE) and one.pays(*STEP, OTHER)
    assert not one.pays(4100, 4200, GUIDE)


def test_rows_are_counted() -> None:
    """Steps of about the same size: 10 % more rows take 10 % longer."""
    one = ReuseGain()
    one.observe(4096, 4096, NONE, 1.0)
    for _ in range(2):
        one.observe(4300, 4096, GUIDE, 1.02)
    assert one.pays(4200, 4096, GUIDE)


def test_where_nobody_misses_a_step_is_computed_to_see() -> None:
    one = ReuseGain()
    answers = []
    for _ in range(100):
        answers.append(one.pays(*STEP, GUIDE))
        one.observe(*STEP, GUIDE if answers[-1] else NONE, 0.5 if answers[-1] else 1.0)
    assert answers.count(False) == 1 and all(answers[:3])


def test_nonsense_is_not_learnt() -> None:
    one = ReuseGain()
    one.observe(0, 5, GUIDE, 1.0)
    one.observe(*STEP, NONE, 0.0)
    one.observe(*STEP, GUIDE, 1.0)
    assert one.pays(*STEP, GUIDE)
