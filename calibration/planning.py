"""From a fitted pair and a budget to a plan: candidates, what each does to the receiver and costs, and the choice.

The choice assumes that damages of single layers add up. They don't quite, so the plan is run end to end on the held-out
texts, and the budget of the sum corrected until the plan keeps what was asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from mapflow.calibration.cost import CostModel
from mapflow.calibration.layer_map import LayerFit
from mapflow.calibration.planner import Choice, Option, fastest, frontier, gentlest
from mapflow.calibration.sensitivity import Candidates, Judge, Measured, with_layers
from mapflow.connector.plan import LayerPlan, Mode, Plan

GUIDE_P = (0.4, 0.5, 0.6, 0.7, 0.8)
TRANSLATE_P = (0.8, 0.9, 0.97)
STATIC_BLOCKS = (2, 4, 8, 16)
_ROUNDS = 6
_POINTS = 5  # of the frontier that are measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A choice of all layers.

    Attributes:
        choice: an option of each layer.
        measured: prefix KL in nats on the held-out texts, all layers together; None where nobody measured it.
    """

    choice: Choice
    measured: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Planned:
    """What was chosen, and from what.

    Attributes:
        plan: the plan.
        point: its choice.
        options: of each layer, all of them.
        points: the frontier from no reuse to the most, some of it measured.
        seconds_full: what these layers take when all compute.
    """

    plan: Plan
    point: Point
    options: Mapping[int, Sequence[Option]]
    points: Sequence[Point]
    seconds_full: float


def candidates(
    guide: Mapping[int, LayerFit], translate: Mapping[int, LayerFit], *, sink_blocks: int, local_blocks: int
) -> Candidates:
    """What every fitted layer may do."""
    floor = {"sink_blocks": sink_blocks, "local_blocks": local_blocks}
    found = {}
    for number, fit in guide.items():
        static = [LayerPlan(mode=Mode.STATIC, sink_blocks=max(sink_blocks, 1), local_blocks=n) for n in STATIC_BLOCKS]
        guided = LayerPlan(mode=Mode.GUIDE, sender_layer=fit.sender_layer, error=fit.error, **floor)
        other = translate[number]
        translated = LayerPlan(mode=Mode.TRANSLATE, sender_layer=other.sender_layer, error=other.error, **floor)
        found[number] = [
            LayerPlan(mode=Mode.COMPUTE),
            *static,
            *(replace(guided, top_p=p) for p in GUIDE_P),
            *(replace(translated, top_p=p) for p in TRANSLATE_P),
        ]
    return found


def options_of(measured: Mapping[int, Sequence[Measured]], cost: CostModel, maps: Plan) -> dict[int, list[Option]]:
    """With what each costs."""

    def option(number: int, one: Measured) -> Option:
        costs = cost.of_layer(maps, number, one.layer, density=one.density_then)
        return Option(
            layer=one.layer,
            damage=one.damage,
            spread=one.spread,
            density=one.density,
            seconds=costs.seconds,
            num_bytes=costs.num_bytes,
        )

    return {number: [option(number, one) for one in of_layer] for number, of_layer in measured.items()}


def plan_within(
    maps: Plan,
    options: Mapping[int, Sequence[Option]],
    judge: Judge,
    *,
    max_kl: float | None = None,
    max_seconds: float | None = None,
    note: Callable[[str], None] = lambda text: None,
) -> Planned:
    """The fastest plan whose prefix KL stays within `max_kl` nats, or the best one within `max_seconds`.

    Args:
        maps: a plan that has the head maps of every layer and mode.
        options: of each layer.
        judge: the held-out texts.
        max_kl, max_seconds: one of both; seconds are those of the layers in `options`.
        note: told in one line what is being measured.
    """
    choices = frontier(options)
    known: dict[int, float] = {0: 0.0}  # place on the frontier -> measured

    def measure(place: int) -> float:
        if place not in known:
            choice = choices[place]
            known[place] = judge.judge(choice.layers)
            note(f"expected KL {choice.damage:.4f}, measured {known[place]:.4f}, {1e3 * choice.seconds:.1f} ms")
        return known[place]

    if max_kl is not None:
        place = _within(choices, max_kl, measure)
    else:
        assert max_seconds is not None
        place = choices.index(gentlest(choices, max_seconds))
    measure(place)
    for point in range(_POINTS):
        measure(round(point * (len(choices) - 1) / (_POINTS - 1)))
    points = [Point(choice=choice, measured=known.get(number)) for number, choice in enumerate(choices)]
    return Planned(
        plan=with_layers(maps, choices[place].layers),
        point=points[place],
        options=options,
        points=points,
        seconds_full=choices[0].seconds,
    )


def _within(choices: Sequence[Choice], max_kl: float, measure: Callable[[int], float]) -> int:
    """Place of the fastest choice found whose measured KL is within; the first one, which computes, always is."""
    feasible, infeasible = 0, len(choices)
    budget = max_kl
    for _ in range(_ROUNDS):
        place = choices.index(fastest(choices, budget))
        if not feasible < place < infeasible:
            place = (feasible + infeasible) // 2
            if place == feasible:
                break
        damage = measure(place)
        if damage <= max_kl:
            feasible = place
        else:
            infeasible = place
        budget = choices[place].damage * min(max(max_kl / max(damage, 1e-9), 0.25), 4.0)
    return feasible
