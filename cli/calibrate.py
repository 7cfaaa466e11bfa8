"""`mapflow calibrate`: shows the run's progress; the work is calibration's."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from mapflow.calibration import calibrate as run
from mapflow.calibration.config import CalibrationConfig
from mapflow.calibration.inspect import plan_table
from mapflow.calibration.progress import Progress as Report


def run_calibration(config: CalibrationConfig) -> None:
    """Fit, write and print a plan.

    Raises:
        CalibrationError: the pair, the texts or the paths cannot be used.
    """
    console = Console(stderr=True)
    left = TextColumn("{task.fields[left]}")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), left)
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("documents", total=None, left="")

        def show(progress: Report) -> None:
            if progress.note:
                bar.console.print(progress.note)
            left_s = "" if progress.remaining_s is None else f"about {progress.remaining_s:.0f} s left"
            if progress.total:
                bar.update(task, description=progress.stage, completed=progress.done, total=progress.total, left=left_s)

        plan = run.calibrate(config, show)
    Console().print(plan_table(plan))
    console.print(f"wrote {config.out}")
