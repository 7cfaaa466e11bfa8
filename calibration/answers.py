"""Whether a receiver answers retrieval tasks under reuse as it does without."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from mapflow.calibration.attention import ObservedModel
from mapflow.calibration.retrieval import Sample, Task
from mapflow.calibration.reuse_runs import ReuseRuns, has_oracle
from mapflow.connector.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """Share of right answers to one task's samples. oracle: None for a plan without guide layers.

    `exact` is the receiver without reuse; `oracle` and `static` are as in `evaluate.Judged`.
    """

    num_samples: int
    exact: float
    reused: float
    oracle: float | None
    static: float


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
    right: dict[Task, list[list[tuple[bool, bool, bool | None, bool]]]] = defaultdict(list)
    for number, sample in enumerate(samples):
        right[sample.task].append(_judge(plans, sender, receiver, sample))
        if progress is not None:
            progress(number + 1, len(samples))
    return [
        {task: _shares([sample[place] for sample in of_task]) for task, of_task in right.items()}
        for place in range(len(plans))
    ]


def is_right(logits: torch.Tensor, sample: Sample) -> bool:
    """Whether each token of the answer is the most likely one. logits: of the row before it on, f32 [rows, vocab]."""
    answer = torch.tensor(sample.token_ids[-sample.num_answer :], device=logits.device)
    return bool((logits[:-1].argmax(-1) == answer).all())


def _judge(
    plans: Sequence[Plan], sender: ObservedModel, receiver: ObservedModel, sample: Sample
) -> list[tuple[bool, bool, bool | None, bool]]:
    before = len(sample.token_ids) - sample.num_answer - 1
    runs = ReuseRuns(plans, sender, receiver, sample.token_ids, num_rows=sample.num_rows, logits_from=before)
    exact, results = is_right(runs.exact, sample), []
    for plan in plans:
        logits, density = runs.reused(plan)
        oracle = is_right(runs.reused(plan, oracle=True)[0], sample) if has_oracle(plan) else None
        static = is_right(runs.static(plan, density)[0], sample)
        results.append((exact, is_right(logits, sample), oracle, static))
    return results


def _shares(results: Sequence[tuple[bool, bool, bool | None, bool]]) -> Answers:
    exact, reused, oracle, static = zip(*results)
    own = [one for one in oracle if one is not None]
    return Answers(
        num_samples=len(results),
        exact=sum(exact) / len(results),
        reused=sum(reused) / len(results),
        oracle=sum(own) / len(own) if own else None,
        static=sum(static) / len(results),
    )
