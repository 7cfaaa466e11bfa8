"""Whether a receiver answers retrieval tasks under reuse as it does without."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
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
class Score:
    """right: share of answers that are right as a whole. tokens: share of the answers' tokens that are."""

    right: float
    tokens: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """To samples of one task: without reuse (`full`), and of each run. prefixes: tokens that hide what is asked for."""

    num_samples: int
    num_tokens: int
    prefixes: tuple[int, ...]
    full: Score
    scores: Mapping[Run, Score]


def all_answers(answers: Collection[Answers]) -> Answers:
    """To the samples of all these tasks; of the runs that answered each of them."""
    runs = set.intersection(*(set(one.scores) for one in answers))
    return Answers(
        num_samples=sum(one.num_samples for one in answers),
        num_tokens=sum(one.num_tokens for one in answers),
        prefixes=tuple(sorted({prefix for one in answers for prefix in one.prefixes})),
        full=_mean([(one, one.full) for one in answers]),
        scores={run: _mean([(one, one.scores[run]) for one in answers]) for run in Run if run in runs},
    )


def _mean(scores: Sequence[tuple[Answers, Score]]) -> Score:
    samples, tokens = (sum(counts) for counts in zip(*((one.num_samples, one.num_tokens) for one, _ in scores)))
    return Score(
        right=sum(one.num_samples * score.right for one, score in scores) / samples,
        tokens=sum(one.num_tokens * score.tokens for one, score in scores) / tokens,
    )


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
    by_task: dict[Task, list[tuple[Sample, dict[str, Any]]]] = defaultdict(list)
    log = ResumeLog(None, "") if log is None else log
    runs = PairRuns(plans, sender, receiver, [_text(sample) for sample in samples])
    for number, sample in enumerate(samples):
        found = log.outcome(f"tokens of sample {number}", partial(_answer, runs, number, sample, plans))
        by_task[sample.task].append((sample, found))
        if progress is not None:
            progress(number + 1, len(samples))
    return [
        {
            task: _answers([(one, answer["full"], answer["plans"][position]) for one, answer in found])
            for task, found in by_task.items()
        }
        for position in range(len(plans))
    ]


def _answer(runs: PairRuns, number: int, sample: Sample, plans: Sequence[Plan]) -> dict[str, Any]:
    """How many tokens of a sample's answer each run has right, as plain data."""
    found = runs.of(number)
    answers = [{run: right_tokens(logits, sample) for run, logits, _ in found.judge(plan)} for plan in plans]
    return {"full": right_tokens(found.exact, sample), "plans": answers}


def _answers(found: Sequence[tuple[Sample, int, Mapping[str, int]]]) -> Answers:
    """Of samples with the tokens that are right without reuse, and with each run."""
    samples = [sample for sample, _, _ in found]
    return Answers(
        num_samples=len(samples),
        num_tokens=sum(sample.num_answer for sample in samples),
        prefixes=tuple(sorted({sample.num_rows for sample in samples})),
        full=_score(samples, [full for _, full, _ in found]),
        scores={Run(run): _score(samples, [right[run] for _, _, right in found]) for run in found[0][2]},
    )


def _score(samples: Sequence[Sample], right: Sequence[int]) -> Score:
    whole = sum(sample.num_answer == tokens for sample, tokens in zip(samples, right))
    return Score(right=whole / len(samples), tokens=sum(right) / sum(sample.num_answer for sample in samples))


def _text(sample: Sample) -> Text:
    before = len(sample.token_ids) - sample.num_answer - 1
    return Text(token_ids=sample.token_ids, num_rows=sample.num_rows, logits_from=before)


def right_tokens(logits: torch.Tensor, sample: Sample) -> int:
    """How many tokens of the answer are the most likely ones, each after the right ones before it.

    logits: f32 [rows, vocabulary], from the row before the answer on.
    """
    answer = torch.tensor(sample.token_ids[-sample.num_answer :], device=logits.device)
    return int((logits[:-1].argmax(-1) == answer).sum())
