"""Whether a receiver answers retrieval tasks under reuse as it does without."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from mapflow.calibration.attention import ObservedModel
from mapflow.calibration.resume_log import ResumeLog
from mapflow.calibration.retrieval import Sample, Task
from mapflow.calibration.reuse_runs import PairRuns, Run, Text
from mapflow.connector.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """Share of right answers to one task's samples: without reuse (`full`), and of each run."""

    num_samples: int
    full: float
    shares: Mapping[Run, float]


def judge_answers(
    plans: Sequence[Plan],
    sender: ObservedModel,
    receiver: ObservedModel,
    samples: Sequence[Sample],
    progress: Callable[[int, int], None] | None = None,
    log: ResumeLog | None = None,
) -> list[Mapping[Task, Answers]]:
    """For each plan, by task. Plans share a block; samples' prefixes are whole blocks.

    progress: called with samples done and samples in all. log: has the samples that need not be run, and is given those
    that are.
    """
    full: dict[Task, list[bool]] = defaultdict(list)
    right: list[dict[Task, dict[Run, list[bool]]]] = [defaultdict(lambda: defaultdict(list)) for _ in plans]
    log = ResumeLog(None, "") if log is None else log
    runs = PairRuns(plans, sender, receiver, [_text(sample) for sample in samples])
    for number, sample in enumerate(samples):
        found = log.outcome(f"sample {number}", partial(_answer, runs, number, sample, plans))
        full[sample.task].append(found["full"])
        for of_plan, answers in zip(right, found["plans"]):
            for run, answer in answers.items():
                of_plan[sample.task][Run(run)].append(answer)
        if progress is not None:
            progress(number + 1, len(samples))
    return [
        {
            task: Answers(
                num_samples=len(full[task]),
                full=sum(full[task]) / len(full[task]),
                shares={run: sum(found) / len(found) for run, found in by_run.items()},
            )
            for task, by_run in of_plan.items()
        }
        for of_plan in right
    ]


def _answer(runs: PairRuns, number: int, sample: Sample, plans: Sequence[Plan]) -> dict[str, Any]:
    """Whether each run answers a sample right, as plain data."""
    found = runs.of(number)
    answers = [{run: is_right(logits, sample) for run, logits, _ in found.judge(plan)} for plan in plans]
    return {"full": is_right(found.exact, sample), "plans": answers}


def _text(sample: Sample) -> Text:
    before = len(sample.token_ids) - sample.num_answer - 1
    return Text(token_ids=sample.token_ids, num_rows=sample.num_rows, logits_from=before)


def is_right(logits: torch.Tensor, sample: Sample) -> bool:
    """Whether each token of the answer is the most likely one. logits: of the row before it on, f32 [rows, vocab]."""
    answer = torch.tensor(sample.token_ids[-sample.num_answer :], device=logits.device)
    return bool((logits[:-1].argmax(-1) == answer).all())
