"""A plan within a budget: whatever single damages say, the measured one is kept."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

torch = pytest.importorskip("torch")

from mapflow.calibration.planner import Option  # noqa: E402
from mapflow.calibration.planning import plan_within  # noqa: E402
from mapflow.connector.plan import LayerPlan, Mode, ModelSpec, Plan  # noqa: E402

NUM_LAYERS = 6
SPEC = ModelSpec(name="m", revision="r", num_layers=NUM_LAYERS, num_heads=2, num_kv_heads=2, head_dim=8)
MAPS = Plan(
    name="p",
    tokenizer_fingerprint="0" * 32,
    chunk_tokens=128,
    block=64,
    sender=SPEC,
    receiver=SPEC,
    layers=tuple(LayerPlan(mode=Mode.COMPUTE) for _ in range(NUM_LAYERS)),
    head_map={number: torch.eye(2) for number in range(NUM_LAYERS)},
)


class _Judge:
    """Damages that add up to more, or less, than their sum."""

    def __init__(self, factor: float) -> None:
        self.factor, self.asked = factor, 0

    def judge(self, layers: Mapping[int, LayerPlan]) -> float:
        self.asked += 1
        return self.factor * sum(damage(number, one) for number, one in layers.items())


def damage(number: int, layer: LayerPlan) -> float:
    return 0.0 if layer.mode is Mode.COMPUTE else 0.01 * (number + 1) * (1.0 - layer.top_p)


def options() -> dict[int, list[Option]]:
    found: dict[int, list[Option]] = {}
    for number in range(NUM_LAYERS):
        layers = [LayerPlan(mode=Mode.COMPUTE)]
        layers += [LayerPlan(mode=Mode.GUIDE, sender_layer=number, top_p=p) for p in (0.5, 0.7, 0.9)]
        seconds = [1.0, 0.5, 0.6, 0.7]
        found[number] = [
            Option(layer=one, damage=damage(number, one), seconds=s) for one, s in zip(layers, seconds, strict=True)
        ]
    return found


@pytest.mark.parametrize("factor", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("max_kl", [0.0, 0.01, 0.04, 1.0])
def test_the_measured_damage_stays_within(factor: float, max_kl: float) -> None:
    judge = _Judge(factor)
    found = plan_within(MAPS, options(), judge, max_kl=max_kl)  # type: ignore[arg-type]
    measured = found.point.measured
    assert measured is not None and measured <= max_kl
    faster = [one for one in found.points if one.choice.seconds < found.point.choice.seconds]
    over = [one for one in faster if factor * one.choice.damage > max_kl]
    assert len(faster) - len(over) <= 1, "not one step more would have been within"
    assert judge.asked <= 6 + 5
    assert [layer.mode for layer in found.plan.layers] == [
        one.layer.mode for one in found.point.choice.options.values()
    ]


def test_the_best_plan_within_a_time() -> None:
    found = plan_within(MAPS, options(), _Judge(1.0), max_seconds=4.5)  # type: ignore[arg-type]
    assert found.point.choice.seconds <= 4.5 and found.point.measured is not None
    assert found.seconds_full == 6.0
    assert set(found.plan.head_map) == {n for n, one in enumerate(found.plan.layers) if one.mode is Mode.GUIDE}


def test_a_time_that_nothing_keeps_takes_the_fastest() -> None:
    found = plan_within(MAPS, options(), _Judge(1.0), max_seconds=0.1)  # type: ignore[arg-type]
    assert found.point.choice.seconds == 6 * 0.5
