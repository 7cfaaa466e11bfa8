"""The flow of `mapflow calibrate`: checks the pair, sums normal equations document by document, writes the plan.

Each document goes through the receiver first, which leaves its values and attention outputs, then through the sender,
whose maps are used row by row while they exist and then forgotten. After every document the sums are saved, so that
an interrupted run resumes where it stopped and ends in the same plan.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from mapflow.calibration.config import CalibrationConfig, CalibrationError, first_line
from mapflow.calibration.cost import CostModel
from mapflow.calibration.fit_run import accumulate, resume
from mapflow.calibration.layer_map import LayerFit, fit_layers
from mapflow.calibration.models import ModelFacts, layer_shape, read_facts
from mapflow.calibration.normal_equations import NormalEquations
from mapflow.calibration.pair_models import PairModels
from mapflow.calibration.planned_run import planned
from mapflow.calibration.progress import Progress, ProgressCallback
from mapflow.calibration.texts import load_tokenizer, read_documents
from mapflow.calibration.tuning import TuningConfig, tune
from mapflow.connector.plan import LayerPlan, Mode, Plan
from mapflow.connector.tokenizer import first_difference, tokenizer_fingerprint


def calibrate(config: CalibrationConfig, progress: ProgressCallback | None = None) -> Plan:
    """Fit a plan for one pair and write it to `config.out`.

    Args:
        config: the run.
        progress: called when something has happened; an exception that it raises interrupts the run resumably.

    Raises:
        CalibrationError: the pair, the texts or the paths cannot be used; one line says why.
    """
    report = progress or (lambda _: None)
    fingerprint = check_tokenizers(config.sender, config.receiver)
    if not config.out.parent.is_dir():
        raise CalibrationError(f"the plan's folder {config.out.parent} does not exist; make it first")
    sender, receiver = read_facts(config.sender), read_facts(config.receiver)
    documents, held_out = _split(config, _documents(config, sender, receiver))
    empty = _empty_equations(config, sender, receiver)
    digest = _digest(config, fingerprint, sender, receiver, documents)
    equations, done, note = resume(config, empty, digest)
    report(Progress(done=done, total=len(documents), note=note))
    if done < len(documents) or config.is_judged:
        report(Progress(done=done, total=len(documents), note="loading the models"))
        models = PairModels(
            sender, receiver, device=config.device, dtype=config.model_dtype, one_at_a_time=config.one_at_a_time
        ).both
        accumulate(config, equations, documents, done, digest, *models, report)

    def refine(plan: Plan) -> Plan:
        if not config.tune_steps:
            return plan
        steps = TuningConfig(steps=config.tune_steps, max_tokens=config.tune_tokens)
        return tune(plan, *models, documents, held_out, steps, report)

    if config.is_planned:
        cost = CostModel(layer_shape(receiver), sender.spec, config.context)
        build = partial(build_plan, config, fingerprint, sender, receiver)
        plan = planned(config, equations, build, refine, models, held_out, cost, report)
    else:
        fits = fit_layers(equations, heads_per_head=config.heads_per_head)
        plan = refine(build_plan(config, fingerprint, sender, receiver, config.mode, fits))
    plan.save(config.out)
    config.checkpoint.unlink(missing_ok=True)
    config.run_log.unlink(missing_ok=True)
    shutil.rmtree(config.spool, ignore_errors=True)
    return plan


def _split(config: CalibrationConfig, documents: list[list[int]]) -> tuple[list[list[int]], list[list[int]]]:
    """Those that are fitted and, where a plan is judged, those that judge: every fourth, at least one."""
    if not config.is_judged:
        return documents, []
    if len(documents) < 2:
        raise CalibrationError(
            f"{config.texts} holds {len(documents)} usable document; a budget or tuning needs two or more, "
            "to fit and to judge"
        )
    held_out = documents[3::4] or documents[-1:]
    return [ids for ids in documents if ids not in held_out], held_out


def check_tokenizers(sender: Path, receiver: Path) -> str:
    """The fingerprint that both tokenizers share.

    Raises:
        CalibrationError: a tokenizer is missing, or the two differ; names the first difference.
    """
    for directory in (sender, receiver):
        if not directory.is_dir():
            raise CalibrationError(f"model directory {directory} does not exist")
    try:
        ours, theirs = tokenizer_fingerprint(sender), tokenizer_fingerprint(receiver)
        difference = None if ours == theirs else first_difference(sender, receiver)
    except (OSError, ValueError) as error:
        raise CalibrationError(first_line(error)) from error
    if ours != theirs:
        raise CalibrationError(
            f"the tokenizers of {sender} and {receiver} differ: {difference}; maps can only be shared token by token, "
            "so choose two models with one tokenizer"
        )
    return ours


def build_plan(
    config: CalibrationConfig,
    fingerprint: str,
    sender: ModelFacts,
    receiver: ModelFacts,
    mode: Mode,
    fits: Mapping[int, LayerFit],
) -> Plan:
    """Turn fits into a plan in which every layer does the same; receiver layers without a fit compute."""
    layers = [LayerPlan(mode=Mode.COMPUTE) for _ in range(receiver.spec.num_layers)]
    for number, fit in fits.items():
        layers[number] = LayerPlan(
            mode=mode,
            sender_layer=fit.sender_layer,
            top_p=config.share,
            sink_blocks=config.sink_blocks,
            local_blocks=config.local_blocks,
            error=fit.error,
        )
    translates = mode is Mode.TRANSLATE
    return Plan(
        name=config.out.stem,
        tokenizer_fingerprint=fingerprint,
        chunk_tokens=config.chunk_tokens,
        block=config.block,
        sender=sender.spec,
        receiver=receiver.spec,
        layers=tuple(layers),
        head_map={} if translates else {number: fit.weight for number, fit in fits.items()},
        head_index={number: fit.index for number, fit in fits.items()} if translates else {},
        head_weight={number: fit.weight for number, fit in fits.items()} if translates else {},
        tile_dtype=config.tile_dtype,
    )


def _documents(config: CalibrationConfig, sender: ModelFacts, receiver: ModelFacts) -> list[list[int]]:
    """Token ids of the documents that are long enough to say anything about blocks."""
    limit = min(config.max_tokens, *(f.max_positions for f in (sender, receiver) if f.max_positions is not None))
    read = read_documents(config.texts, load_tokenizer(config.receiver), max_tokens=limit)
    documents = [ids for ids in read if len(ids) >= config.block]
    total = sum(map(len, documents))
    if total < config.min_tokens:
        raise CalibrationError(
            f"{config.texts} holds {total} usable tokens in {len(documents)} documents of at least {config.block}; "
            f"calibration needs {config.min_tokens}: add texts"
        )
    largest = max(map(max, documents))
    for facts in (sender, receiver):
        if largest >= facts.vocab_size:
            raise CalibrationError(
                f"the tokenizer produces id {largest} but model {facts.directory} embeds only {facts.vocab_size} ids"
            )
    return documents


def _empty_equations(config: CalibrationConfig, sender: ModelFacts, receiver: ModelFacts) -> NormalEquations:
    first = config.resolve_first_layer(receiver.spec.num_layers)
    reusable = tuple(layer for layer in receiver.full_layers if layer >= first)
    for facts, layers in ((sender, sender.full_layers), (receiver, reusable)):
        if not layers:
            raise CalibrationError(f"model {facts.directory} has no layer with full attention to share")
    if (config.heads_per_head or 1) > sender.spec.num_heads:
        raise CalibrationError(
            f"heads_per_head is {config.heads_per_head} but the sender has {sender.spec.num_heads} heads"
        )
    return NormalEquations.zeros(
        receiver_layers=reusable,
        sender_layers=sender.full_layers,
        receiver_heads=receiver.spec.num_heads,
        receiver_kv_heads=receiver.spec.num_kv_heads,
        sender_heads=sender.spec.num_heads,
    )


def _digest(
    config: CalibrationConfig, fingerprint: str, sender: ModelFacts, receiver: ModelFacts, documents: list[list[int]]
) -> str:
    """What a checkpoint must match: configuration, models and the very tokens."""
    tokens = hashlib.sha256(repr(documents).encode()).hexdigest()
    return config.digest(fingerprint, sender.spec.model_id, receiver.spec.model_id, tokens)
