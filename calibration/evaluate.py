"""Offline quality of plans on held-out texts: KL and top-1 agreement of the receiver with and without reuse.

Both models run in this process under transformers, and reuse is simulated (`reuse.py`), so that a plan can be judged
before anything serves it. Each plan is held against baselines at its own settings (`reuse_runs.Run`).
"""

from __future__ import annotations

import hashlib
import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from mapflow.calibration.answers import Answers, judge_answers
from mapflow.calibration.calibrate import check_tokenizers
from mapflow.calibration.config import CalibrationError
from mapflow.calibration.cost import Cost, CostModel
from mapflow.calibration.evaluation_config import EvaluationConfig
from mapflow.calibration.models import ModelFacts, layer_shape, read_facts
from mapflow.calibration.pair_models import PairModels
from mapflow.calibration.quality import Estimate, Quality, compare, estimate
from mapflow.calibration.resume_log import ResumeLog
from mapflow.calibration.retrieval import Sample, Task, make_samples
from mapflow.calibration.reuse_runs import PairRuns, ReuseRuns, Run, Text, mean_density
from mapflow.calibration.texts import load_tokenizer, read_documents
from mapflow.connector.plan import LayerPlan, Mode, Plan

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """The quality of one plan and of its baselines, and its answers to retrieval tasks, where those were asked for.

    Attributes:
        plan: the plan.
        prefix: the most rows that reused.
        cost: of the receiver's prefill of `context` tokens under the plan, estimated.
        full_s: seconds of that prefill without reuse, estimated.
        context: its tokens.
        measured_ms: of attention in the layers that reuse, in a prefill of `prefix` tokens by the kernels, and of full
            attention in the same layers; None without a GPU.
    """

    plan: Plan
    prefix: int
    cost: Cost
    full_s: float
    context: int
    quality: Mapping[Run, Estimate]
    answers: Mapping[Task, Answers]
    measured_ms: tuple[float, float] | None = None


def evaluate(
    config: EvaluationConfig,
    plans: Sequence[Plan],
    progress: Callable[[int, int], None] | None = None,
    resume: Path | None = None,
) -> list[Judged]:
    """Judge plans of one pair that share block and chunk size.

    Args:
        config: models and texts.
        plans: the plans; one result each, in order.
        progress: called with texts done and texts in all, documents and samples of retrieval tasks.
        resume: a file where every text's outcome is kept as soon as it is known, for an evaluation of the same that
            was interrupted; whoever has the result removes it.

    Raises:
        CalibrationError: plans, models or texts that do not go together.
    """
    sender, receiver = read_facts(config.sender), read_facts(config.receiver)
    _check_plans(plans, check_tokenizers(config.sender, config.receiver), sender, receiver)
    documents = _documents(config, plans[0].chunk_tokens)
    samples = _samples(config, documents, plans[0].chunk_tokens)
    cost = CostModel(layer_shape(receiver), sender.spec, config.context)
    models = PairModels(
        sender, receiver, device=config.device, dtype=config.dtype, one_at_a_time=config.one_at_a_time
    ).both
    log = ResumeLog(resume, _digest(config, plans, documents, samples))
    qualities: list[dict[Run, list[Quality]]] = [defaultdict(list) for _ in plans]
    densities: list[list[Mapping[int, float]]] = [[] for _ in plans]
    measured: list[tuple[float, float] | None] = [None for _ in plans]
    longest = max(range(len(documents)), key=lambda number: documents[number].num_rows)
    runs = PairRuns(plans, *models, documents)
    for number, text in enumerate(documents):
        is_timed = config.device.startswith("cuda") and number == longest
        judge = partial(_outcomes, runs, number, plans, text, config.context, is_timed=is_timed)
        found = log.outcome(f"document {number}", judge)
        for position, (outcome, of_plan, of_layers) in enumerate(zip(found, qualities, densities)):
            if outcome.get("measured_ms"):
                measured[position] = tuple(outcome["measured_ms"])
            of_layers.append({int(layer): density for layer, density in outcome["densities_then"].items()})
            for run, quality in outcome["runs"].items():
                of_plan[Run(run)].append(Quality(**quality))
        if progress is not None:
            progress(number + 1, len(documents) + len(samples))

    def show(done: int, total: int) -> None:
        if progress is not None:
            progress(len(documents) + done, len(documents) + total)

    answers = judge_answers(plans, *models, samples, show, log)
    return [
        Judged(
            plan=plan,
            prefix=documents[longest].num_rows,
            cost=cost.of_plan(plan, _mean(of_layers)),
            full_s=cost.full_s,
            context=config.context,
            quality={run: estimate(found) for run, found in of_plan.items()},
            answers=answered,
            measured_ms=timed,
        )
        for plan, of_plan, of_layers, answered, timed in zip(plans, qualities, densities, answers, measured)
    ]


def _outcomes(
    runs: PairRuns, number: int, plans: Sequence[Plan], text: Text, context: int, *, is_timed: bool
) -> list[dict[str, Any]]:
    """Of every plan, on one text."""
    of_text = runs.of(number)
    return [_outcome(of_text, plan, text, context, is_timed=is_timed) for plan in plans]


def _outcome(runs: ReuseRuns, plan: Plan, text: Text, context: int, *, is_timed: bool) -> dict[str, Any]:
    """A plan's and its baselines' quality on one text, and what its layers' densities then are, as plain data."""
    found: dict[str, Any] = {"runs": {}}
    for run, logits, reuse in runs.judge(plan):
        num_prefix = text.num_rows - text.logits_from
        next_ids = text.token_ids[text.logits_from + 1 :]
        found["runs"][run.value] = asdict(
            compare(runs.exact, logits, next_ids, num_prefix, mean_density(reuse.densities))
        )
        if run is Run.PLAN:
            found["densities_then"] = reuse.densities_at(context)
    if is_timed and plan.reusing_layers:
        try:
            found["measured_ms"] = runs.time(plan)
        except ValueError as error:
            _logger.warning("plan %s is not timed: %s", plan.name, error)
    return found


def _digest(
    config: EvaluationConfig, plans: Sequence[Plan], documents: Sequence[Text], samples: Sequence[Sample]
) -> str:
    """Of all that outcomes depend on; the models' part stands in the plans."""
    facts = ([plan.digest for plan in plans], documents, samples, config.dtype, config.context)
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def _mean(densities: Sequence[Mapping[int, float]]) -> dict[int, float]:
    """Of each layer, over documents."""
    return {layer: fmean(one[layer] for one in densities) for layer in densities[0]}


def from_layer(plan: Plan, first: int) -> Plan:
    """The same plan with every layer below `first` on compute."""
    layers = (layer if number >= first else LayerPlan(mode=Mode.COMPUTE) for number, layer in enumerate(plan.layers))
    return replace(plan, layers=tuple(layers))


def check_models(plan: Plan, sender: ModelFacts, receiver: ModelFacts) -> None:
    """Make sure that a plan was made for these models.

    Raises:
        CalibrationError: it was made for another.
    """
    for facts, spec in ((sender, plan.sender), (receiver, plan.receiver)):
        if facts.spec != spec:
            raise CalibrationError(
                f"plan {plan.name} was made for {spec.model_id}, but {facts.directory} is {facts.spec.model_id}; "
                "give the directories that it was calibrated with"
            )


def _check_plans(plans: Sequence[Plan], fingerprint: str, sender: ModelFacts, receiver: ModelFacts) -> None:
    if not plans:
        raise CalibrationError("no plan to evaluate; name at least one plan file")
    for plan in plans:
        if plan.tokenizer_fingerprint != fingerprint:
            raise CalibrationError(f"plan {plan.name} was made for another tokenizer; calibrate this pair")
        check_models(plan, sender, receiver)
        if (plan.block, plan.chunk_tokens) != (plans[0].block, plans[0].chunk_tokens):
            raise CalibrationError(
                f"plan {plan.name} differs from {plans[0].name} in block or chunk size; evaluate it alone"
            )


def _documents(config: EvaluationConfig, chunk_tokens: int) -> list[Text]:
    """Texts of which whole chunks reuse, with a suffix after them."""
    read = read_documents(config.texts, load_tokenizer(config.receiver), max_tokens=config.max_tokens)
    sized = [(ids, (len(ids) - config.suffix_tokens) // chunk_tokens * chunk_tokens) for ids in read]
    usable = [(ids, rows) for ids, rows in sized if rows > 0][: config.max_documents]
    if not usable:
        least = chunk_tokens + config.suffix_tokens
        raise CalibrationError(f"{config.texts} holds no document of at least {least} tokens; use longer texts")
    return [Text(token_ids=ids, num_rows=rows, logits_from=max(0, rows - config.prefix_rows)) for ids, rows in usable]


def _samples(config: EvaluationConfig, documents: Sequence[Text], chunk_tokens: int) -> list[Sample]:
    """Retrieval tasks hidden in the documents, of as many tokens as the shortest of these reuses, and of fewer."""
    if config.samples_per_task == 0:
        return []
    tokenizer = load_tokenizer(config.receiver)

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)

    try:
        return make_samples(
            [text.token_ids for text in documents],
            encode,
            samples_per_task=config.samples_per_task,
            num_rows=min(text.num_rows for text in documents),
            chunk_tokens=chunk_tokens,
        )
    except ValueError as error:
        raise CalibrationError(f"{config.texts} has too short a text for retrieval tasks: {error}") from error
