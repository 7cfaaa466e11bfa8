"""Whether a receiver answers retrieval tasks under reuse as it does without."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from mapflow.calibration.attention import ObservedModel
from mapflow.calibration.retrieval import Sample, Task
from mapflow.calibration.reuse_runs import ReuseRuns, Run
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
) -> list[Mapping[Task, Answers]]:
    """For each plan, by task. Plans share a block; samples' prefixes are whole blocks.

    progress: called with samples done and samples in all.
    """
    full: dict[Task, list[bool]] = defaultdict(list)
    right: list[dict[Task, dict[Run, list[bool]]]] = [defaultdict(lambda: defaultdict(list)) for _ in plans]
    other = None
    for number, sample in enumerate(samples):
        before = len(sample.token_ids) - sample.num_answer - 1
        place = {"num_rows": sample.num_rows, "logits_from": before}
        runs = ReuseRuns(plans, sender, receiver, sample.token_ids, **place, other=other)
        other = runs.sent
        full[sample.task].append(is_right(runs.exact, sample))
        for plan, of_plan in zip(plans, right):
            for run, logits, _ in runs.judge(plan):
                of_plan[sample.task][run].append(is_right(logits, sample))
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


def is_right(logits: torch.Tensor, sample: Sample) -> bool:
    """Whether each token of the answer is the most likely one. logits: of the row before it on, f32 [rows, vocab]."""
    answer = torch.tensor(sample.token_ids[-sample.num_answer :], device=logits.device)
    return bool((logits[:-1].argmax(-1) == answer).all())
