"""The planner against brute force, and its rules: nothing that another option beats, no map that is not worth one."""

from __future__ import annotations

import itertools
import random

import pytest

pytest.importorskip("torch")

from mapflow.calibration.planner import Choice, Option, fastest, frontier, gentlest, hull
from mapflow.connector.plan import LayerPlan, Mode

COMPUTE, STATIC = LayerPlan(mode=Mode.COMPUTE), LayerPlan(mode=Mode.STATIC)
GUIDE, TRANSLATE = (LayerPlan(mode=mode, sender_layer=0) for mode in (Mode.GUIDE, Mode.TRANSLATE))


def option(layer: LayerPlan, damage: float, seconds: float) -> Option:
    return Option(layer=layer, damage=damage, seconds=seconds)


def test_an_option_that_another_beats_is_not_on_the_hull() -> None:
    full, static = option(COMPUTE, 0.0, 10.0), option(STATIC, 0.01, 4.0)
    worse, concave, fast = option(GUIDE, 0.02, 5.0), option(GUIDE, 0.5, 3.9), option(TRANSLATE, 0.6, 1.0)
    assert hull([worse, fast, concave, static, full]) == [full, static, fast]


@pytest.mark.parametrize(("damage", "taken"), [(0.01, STATIC), (0.0119, STATIC), (0.0121, GUIDE)])
def test_where_static_is_as_good_within_the_spread_it_is_taken(damage: float, taken: LayerPlan) -> None:
    """It needs no cache."""
    guide = Option(layer=GUIDE, damage=0.01, spread=0.002, seconds=4.0)
    found = hull([guide, option(STATIC, damage, 4.0), option(COMPUTE, 0.0, 10.0)])
    assert [one.layer for one in found] == [COMPUTE, taken]


def test_no_option_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one"):
        hull([])


def layers(seed: int, num_layers: int = 4, num_options: int = 5) -> dict[int, list[Option]]:
    chance = random.Random(seed)
    return {
        layer: [option(COMPUTE, 0.0, 10.0)]
        + [option(GUIDE, chance.random() ** 3, 1.0 + 8.0 * chance.random()) for _ in range(num_options)]
        for layer in range(num_layers)
    }


@pytest.mark.parametrize("seed", range(5))
def test_a_frontier_is_no_worse_than_brute_force_by_more_than_a_step(seed: int) -> None:
    """Every choice on it is the fastest of all combinations at its own damage."""
    options = layers(seed)
    every = [Choice(options=dict(enumerate(one))) for one in itertools.product(*options.values())]
    found = frontier(options)
    assert found[0].damage == 0.0 and found[-1].seconds == min(one.seconds for one in every)
    for choice in found:
        assert choice.seconds <= min(one.seconds for one in every if one.damage <= choice.damage + 1e-12) + 1e-9
    assert all(slow.damage <= fast.damage and slow.seconds > fast.seconds for slow, fast in itertools.pairwise(found))


def test_a_frontier_begins_with_all_layers_computing() -> None:
    """Also where something faster harms nothing."""
    compute, free = option(COMPUTE, 0.0, 10.0), option(GUIDE, 0.0, 4.0)
    found = frontier({0: [free, compute], 1: [compute]})
    assert [choice.options[0] for choice in found] == [compute, free]
    assert fastest(found, 0.0) is found[1]


def test_budgets() -> None:
    found = frontier(layers(7))
    for budget in (0.0, 0.01, 0.1, 10.0):
        chosen = fastest(found, budget)
        assert chosen.damage <= budget
        assert all(one.seconds >= chosen.seconds for one in found if one.damage <= budget)
    limit = (found[0].seconds + found[-1].seconds) / 2
    chosen = gentlest(found, limit)
    assert chosen.seconds <= limit and all(one.damage >= chosen.damage for one in found if one.seconds <= limit)
    assert gentlest(found, 0.0) is found[-1]
