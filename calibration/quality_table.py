"""What `evaluate` found, as tables for a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.table import Table

from mapflow.calibration.answers import all_answers
from mapflow.calibration.quality import Estimate
from mapflow.calibration.reuse_runs import Run

if TYPE_CHECKING:
    from mapflow.calibration.evaluate import Judged


def quality_table(judged: Sequence[Judged]) -> Table:
    """Every plan and its baselines, one row each."""
    table = Table(
        title="KL(exact || reused) in nats ± half of its 95 % interval, top-1 agreement with the exact receiver",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    for name in (
        "\nplan",
        "layer,\ntop-p",
        "\nmethod",
        "\ndensity",
        "\nKL",
        "\ntop-1",
        "suffix\nKL",
        "suffix\ntop-1",
    ):
        left = name in ("\nplan", "\nmethod")
        table.add_column(name, justify="left" if left else "right", no_wrap=True)
    for one in judged:
        layers = [one.plan.layers[number] for number in one.plan.reusing_layers]
        first = str(one.plan.reusing_layers[0]) if layers else "-"
        top_ps = sorted({layer.top_p for layer in layers if layer.needs_map})
        top_p = "-".join(f"{p:g}".lstrip("0") for p in dict.fromkeys((top_ps[0], top_ps[-1]))) if top_ps else "-"
        for run, quality in one.quality.items():
            name = "+".join(one.plan.reusing_modes) if run is Run.PLAN and layers else run
            table.add_row(one.plan.name, f"{first}, {top_p}", name, *_numbers(quality))
    return table


def cost_table(judged: Sequence[Judged]) -> Table:
    """What every plan costs and saves, one row each."""
    title = f"a prefill of {judged[0].context:,} tokens, estimated"
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    is_measured = any(one.measured_ms is not None for one in judged)
    measured = [f"attention at {judged[0].prefix:,}, measured"] if is_measured else []
    for name in ("plan", "layers", "of the time without reuse", "MB of maps", *measured):
        table.add_column(name, justify="left" if name in ("plan", "layers") else "right")
    for one in judged:
        count = Counter(layer.mode.value for layer in one.plan.layers)
        layers = ", ".join(f"{number} {mode}" for mode, number in sorted(count.items()))
        cells = [f"{one.cost.seconds / one.full_s:.0%}", f"{one.cost.num_bytes / 1e6:,.1f}"]
        table.add_row(one.plan.name, layers, *cells, *([_measured(one)] if is_measured else []))
    return table


def _measured(one: Judged) -> str:
    """Of the layers that reuse."""
    if one.measured_ms is None:
        return "-"
    reuse, full = one.measured_ms
    return f"{reuse:.2f} of {full:.2f} ms"


def _numbers(quality: Estimate) -> tuple[str, ...]:
    half = (quality.high.prefix_kl - quality.low.prefix_kl) / 2
    return (
        f"{quality.density:.3f}",
        f"{quality.prefix_kl:.4f} ±{half:.4f}".replace("±0.", "±."),
        f"{quality.prefix_top1:.3f}",
        f"{quality.suffix_kl:.4f}",
        f"{quality.suffix_top1:.3f}",
    )


def answers_table(judged: Sequence[Judged]) -> Table:
    """Shares of right answers and of their right tokens, one row for each plan and task."""
    title = "retrieval tasks: right answers, right tokens of answers"
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in ("plan", "task", "samples", "full", *Run):
        table.add_column(name, justify="left" if name == "task" else "right", no_wrap=True)
    table.columns[0].justify = "left"
    for one in judged:
        for task, answers in (*one.answers.items(), ("all", all_answers(one.answers.values()))):
            scores = (answers.full, *(answers.scores.get(run) for run in Run))
            cells = ("" if score is None else f"{score.right:.0%} {score.tokens:.0%}" for score in scores)
            table.add_row(one.plan.name, task, str(answers.num_samples), *cells)
    return table
