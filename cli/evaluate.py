"""`mapflow evaluate`: shows the run's progress and what it found; the work is calibration's."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from mapflow.calibration.config import CalibrationError
from mapflow.calibration.evaluate import evaluate, from_layer
from mapflow.calibration.evaluation_config import EvaluationConfig
from mapflow.calibration.quality_report import quality_report
from mapflow.calibration.quality_table import answers_table, cost_table, quality_table
from mapflow.connector.plan import load_plan, with_top_p


def run_evaluation(
    config: EvaluationConfig,
    files: Sequence[Path],
    top_ps: Sequence[float],
    first_layers: Sequence[int],
    out: Path | None = None,
) -> None:
    """Judge plan files, each at several probability masses and first layers if any are given, and print tables.

    out: where the figures go as JSON; until then every text's are kept beside it, and an interrupted run goes on.

    Raises:
        CalibrationError: the plans, the pair or the texts cannot be used.
        PlanError: a file is no plan.
    """
    if out is not None and not out.parent.is_dir():
        raise CalibrationError(f"{out.parent}, where {out.name} is to be written, is no directory")
    plans = [load_plan(path) for path in files]
    plans = [with_top_p(plan, top_p) for plan in plans for top_p in top_ps] or plans
    plans = [from_layer(plan, first) for plan in plans for first in first_layers] or plans
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("texts", total=None)
        partial = None if out is None else out.with_name(f"{out.stem}.partial.jsonl")
        judged = evaluate(config, plans, lambda done, total: bar.update(task, completed=done, total=total), partial)
    console = Console()
    console.print(quality_table(judged))
    console.print(cost_table(judged))
    if config.samples_per_task:
        console.print(answers_table(judged))
    if out is not None:
        out.write_text(json.dumps(quality_report(judged, config), indent=1) + "\n", encoding="utf-8")
        console.print(f"written to {out}")
    if partial is not None:
        partial.unlink(missing_ok=True)
