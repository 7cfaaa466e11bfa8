"""Chooses what each receiver layer does: the fastest choice within a budget of damage, or the least damage in a time.

Damages of single layers add up well enough to choose by (`calibrate` checks the whole choice end to end and corrects
the budget). Choices are those on the lower convex hull of each layer's options, taken in the order of damage for each
second saved: the greedy solution of the multiple-choice knapsack's linear relaxation, which is off by one step of one
layer at most (Sinha and Zoltners, The Multiple-Choice Knapsack Problem, 1979). No models, texts or files here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from mapflow.connector.plan import LayerPlan, Mode


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """What one layer may do.

    Attributes:
        layer: its plan.
        damage: prefix KL in nats when this layer alone does it.
        seconds: what the layer then takes.
        spread: standard error of the damage, in nats.
        density: kept causal blocks / causal blocks; 1 for compute.
        num_bytes: of maps.
    """

    layer: LayerPlan
    damage: float
    seconds: float
    spread: float = 0.0
    density: float = 1.0
    num_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One option of every layer."""

    options: Mapping[int, Option]

    @property
    def layers(self) -> dict[int, LayerPlan]:
        """What each layer does."""
        return {number: option.layer for number, option in self.options.items()}

    @property
    def damage(self) -> float:
        """Expected prefix KL in nats, as the sum over layers."""
        return sum(option.damage for option in self.options.values())

    @property
    def seconds(self) -> float:
        """Of all layers."""
        return sum(option.seconds for option in self.options.values())

    @property
    def num_bytes(self) -> int:
        """Of all maps."""
        return sum(option.num_bytes for option in self.options.values())


def frontier(options: Mapping[int, Sequence[Option]]) -> list[Choice]:
    """Choices from all layers computing to the fastest, each one step of one layer further.

    options: by layer, COMPUTE among them.
    """
    hulls = {layer: hull(of_layer) for layer, of_layer in options.items()}
    steps = sorted(
        (step for layer, of_layer in hulls.items() for step in _steps(layer, of_layer)),
        key=lambda step: (step[0], step[1]),
    )
    computes = {layer: _compute(of_layer) for layer, of_layer in options.items()}
    chosen = {layer: of_layer[0] for layer, of_layer in hulls.items()}
    found = [Choice(options=computes)] + ([Choice(options=dict(chosen))] if chosen != computes else [])
    for _, layer, option in steps:
        chosen[layer] = option
        found.append(Choice(options=dict(chosen)))
    return found


def fastest(choices: Sequence[Choice], max_damage: float) -> Choice:
    """The fastest of a frontier within a damage; the slowest where none is."""
    return min((one for one in choices if one.damage <= max_damage), key=lambda one: one.seconds, default=choices[0])


def gentlest(choices: Sequence[Choice], max_seconds: float) -> Choice:
    """The one of a frontier that harms least within a time; the fastest where none is."""
    return min((one for one in choices if one.seconds <= max_seconds), key=lambda one: one.damage, default=choices[-1])


def hull(options: Sequence[Option]) -> list[Option]:
    """Options on the lower convex hull of (seconds, damage), slowest first.

    What reads maps is left out where something that reads none is as fast and, within the spread, harms no more: it
    needs no cache, and nothing that can be late.

    Raises ValueError without an option.
    """
    if not options:
        raise ValueError("options: expected at least one, got none")
    without = [one for one in options if not one.layer.needs_map]
    worthwhile = without + [one for one in options if one.layer.needs_map and not any(_serves(o, one) for o in without)]
    kept: list[Option] = []
    for one in sorted(worthwhile, key=lambda one: (one.damage, one.seconds)):
        if kept and one.seconds >= kept[-1].seconds:
            continue  # no faster than one that harms no more
        while len(kept) >= 2 and _price(kept[-2], kept[-1]) >= _price(kept[-2], one):
            kept.pop()
        kept.append(one)
    return kept


def _compute(options: Sequence[Option]) -> Option:
    return next(one for one in options if one.layer.mode is Mode.COMPUTE)


def _serves(own: Option, mapped: Option) -> bool:
    """Whether an option without maps does as well as one with."""
    return own.seconds <= mapped.seconds and own.damage <= mapped.damage + mapped.spread


def _price(slow: Option, fast: Option) -> float:
    """Damage for each second saved."""
    return (fast.damage - slow.damage) / (slow.seconds - fast.seconds)


def _steps(layer: int, options: Sequence[Option]) -> Iterator[tuple[float, int, Option]]:
    for slow, fast in pairwise(options):
        yield _price(slow, fast), layer, fast
