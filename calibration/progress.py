"""What a long calibration tells its caller on the way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where a stage of a run stands.

    Attributes:
        done: steps that are behind, those of an earlier, interrupted run included.
        total: steps in all; 0 where only the note matters.
        stage: what a step is: "documents" that are fitted, "documents through the receiver" before them where models
            are loaded one at a time, "single layers" that are run under one option, or "tuning".
        remaining_s: seconds still expected of this stage; None before the first step of this run.
        note: one line for the user, empty when there is nothing new to say.
    """

    done: int = 0
    total: int = 0
    stage: str = "documents"
    remaining_s: float | None = None
    note: str = ""


ProgressCallback = Callable[[Progress], None]
