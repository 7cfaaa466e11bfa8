"""`mapflow calibrate` with a budget: from the sums over texts to the plan that keeps it, judged on other texts.

Also says what was seen on the way, as plain data for a file beside the plan: every option of every layer, and the
frontier between damage and time.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from mapflow.calibration.attention import ObservedModel
from mapflow.calibration.config import CalibrationConfig
from mapflow.calibration.cost import CostModel
from mapflow.calibration.layer_map import LayerFit, fit_layers
from mapflow.calibration.normal_equations import NormalEquations
from mapflow.calibration.planner import Option
from mapflow.calibration.planning import TRANSLATE_P, Planned, Point, candidates, options_of, plan_within
from mapflow.calibration.progress import Progress, ProgressCallback
from mapflow.calibration.resume_log import ResumeLog
from mapflow.calibration.sensitivity import Candidates, Judge
from mapflow.connector.plan import Mode, Plan, with_top_p

_JUDGED_ROWS = 1024


def planned(
    config: CalibrationConfig,
    equations: NormalEquations,
    build: Callable[[Mode, Mapping[int, LayerFit]], Plan],
    refine: Callable[[Plan], Plan],
    models: tuple[ObservedModel, ObservedModel],
    held_out: Sequence[Sequence[int]],
    cost: CostModel,
    report: ProgressCallback,
) -> Plan:
    """Measure what every layer's options do, choose, and write the frontier beside the plan to come.

    Args:
        config: the budget, and what options have in common.
        equations: sums over the texts that are fitted.
        build: a plan in which every fitted layer has this mode.
        refine: the same plan with better head weights.
        models: sender and receiver.
        held_out: token ids of texts that were not fitted.
        cost: of the receiver's layers.
        report: told how far the runs are, and what came out.
    """
    guide = fit_layers(equations, heads_per_head=None)
    translate = fit_layers(equations, heads_per_head=config.heads_per_head or 1)
    translating = refine(with_top_p(build(Mode.TRANSLATE, translate), statistics.median(TRANSLATE_P)))
    maps = replace(build(Mode.GUIDE, guide), head_index=translating.head_index, head_weight=translating.head_weight)
    judge = Judge(maps, *models, held_out, rows=_JUDGED_ROWS, context=config.context)
    may = candidates(guide, translate, sink_blocks=config.sink_blocks, local_blocks=config.local_blocks)
    log = ResumeLog(config.run_log, judge.digest)
    total, known, started = _num_runs(may) * judge.num_documents, len(log), time.monotonic()
    if known:
        report(Progress(note=f"resuming after {known} of {total} runs found in {config.run_log}"))

    def show(done: int) -> None:
        left_s = (time.monotonic() - started) / max(done - known, 1) * (total - done)
        report(Progress(done=done, total=total, stage="single layers", remaining_s=left_s))

    options = options_of(judge.sensitivities(may, log, show), cost, maps)
    found = plan_within(
        maps,
        options,
        judge,
        max_kl=config.max_kl,
        max_seconds=None if config.target_ttft is None else _limit(config.target_ttft, cost, len(options)),
        note=lambda text: report(Progress(note=text)),
    )
    save_frontier(frontier_file(config.out), found, cost)
    report(Progress(note=_outcome(found, cost, judge.num_documents)))
    return found.plan


def _outcome(found: Planned, cost: CostModel, num_documents: int) -> str:
    saved = found.seconds_full - found.point.choice.seconds
    return (
        f"prefix KL {found.point.measured:.4f} on {num_documents} held-out documents; saves an estimated "
        f"{1e3 * saved:.1f} of {1e3 * found.seconds_full:.1f} ms in {len(found.options)} layers at {cost.context} "
        "tokens"
    )


def _limit(share: float, cost: CostModel, num_layers: int) -> float:
    """Seconds that so many layers may take, so that the prefill takes this share of its time without reuse."""
    return num_layers * cost.layer_s - (1.0 - share) * cost.full_s


def _num_runs(may: Candidates) -> int:
    return sum(one.mode is not Mode.COMPUTE for options in may.values() for one in options)


def frontier_file(plan: Path) -> Path:
    """Where a plan's frontier lies: `NAME.frontier.json` beside it."""
    return plan.with_name(f"{plan.stem}.frontier.json")


def save_frontier(path: Path, found: Planned, cost: CostModel) -> None:
    """Write what was measured and expected; times are of the receiver's prefill, estimated."""

    def point(one: Point) -> dict[str, Any]:
        return {
            "expected_kl": one.choice.damage,
            "measured_kl": one.measured,
            "prefill_ms": 1e3 * (cost.full_s - found.seconds_full + one.choice.seconds),
            "map_bytes": one.choice.num_bytes,
            "modes": {number: layer.mode.value for number, layer in one.choice.layers.items()},
        }

    document = {
        "plan": found.plan.name,
        "pair": f"{found.plan.sender.model_id} -> {found.plan.receiver.model_id}",
        "context": cost.context,
        "full_prefill_ms": 1e3 * cost.full_s,
        "chosen": point(found.point),
        "frontier": [point(one) for one in found.points],
        "options": {number: [_option(one) for one in of_layer] for number, of_layer in found.options.items()},
    }
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _option(one: Option) -> dict[str, Any]:
    facts = {name: getattr(one, name) for name in ("damage", "spread", "density", "num_bytes")}
    return {**asdict(one.layer), "mode": one.layer.mode.value, **facts, "ms": 1e3 * one.seconds}
