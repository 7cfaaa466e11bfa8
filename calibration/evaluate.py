"""Offline quality of plans on held-out texts: KL and top-1 agreement of the receiver with and without reuse.

Both models run in this process under transformers, and reuse is simulated (`reuse.py`), so that a plan can be judged
before anything serves it. Each plan is held against two baselines at its own settings: `oracle`, the receiver's own
masses in place of the sender's, and `static`, sink and local window of at least the plan's density.

    python -m mapflow.calibration.evaluate --sender DIR --receiver DIR --texts FILE PLAN...
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from mapflow.calibration.attention import ObservedModel
from mapflow.calibration.calibrate import check_tokenizers
from mapflow.calibration.config import DTYPES, CalibrationError
from mapflow.calibration.models import ModelFacts, load_model, read_facts
from mapflow.calibration.quality import Quality, compare, mean
from mapflow.calibration.reuse import Recorder, ReuseAttention
from mapflow.calibration.texts import load_tokenizer, read_documents
from mapflow.connector.plan import LayerPlan, Mode, Plan, PlanError, load_plan, with_top_p
from mapflow.kernels.mask import mask_density, static_mask


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationConfig:
    """What plans are judged on.

    Attributes:
        sender: directory of the sender.
        receiver: directory of the receiver.
        texts: held-out texts, as calibration reads them.
        max_tokens: a document's tokens beyond these are cut off.
        max_documents: documents used at most.
        prefix_rows: last reused rows whose next-token distributions count.
        suffix_tokens: least number of tokens that follow the reused rows and attend fully.
        device: torch device that runs both models.
        dtype: dtype of both models' weights.
    """

    sender: Path
    receiver: Path
    texts: Path
    max_tokens: int = 2048
    max_documents: int = 16
    prefix_rows: int = 1024
    suffix_tokens: int = 64
    device: str = "cpu"
    dtype: str = "float32"

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            CalibrationError: the first value that cannot be used.
        """
        for name in ("max_tokens", "max_documents", "prefix_rows", "suffix_tokens"):
            if getattr(self, name) < 1:
                raise CalibrationError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.dtype not in DTYPES:
            raise CalibrationError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One plan's quality and that of its baselines; `oracle` is None for a plan without guide layers."""

    plan: Plan
    reused: Quality
    oracle: Quality | None
    static: Quality


def evaluate(
    config: EvaluationConfig, plans: Sequence[Plan], progress: Callable[[int, int], None] | None = None
) -> list[Judged]:
    """Judge plans of one pair that share block and chunk size.

    Args:
        config: models and texts.
        plans: the plans; one result each, in order.
        progress: called with documents done and documents in all.

    Raises:
        CalibrationError: plans, models or texts that do not go together.
    """
    sender, receiver = read_facts(config.sender), read_facts(config.receiver)
    _check_plans(plans, check_tokenizers(config.sender, config.receiver), sender, receiver)
    documents = _documents(config, plans[0].chunk_tokens)
    models = [
        ObservedModel(load_model(facts, device=config.device, dtype=config.dtype)) for facts in (sender, receiver)
    ]
    rows: list[list[tuple[Quality, Quality | None, Quality]]] = []
    for number, (ids, num_rows) in enumerate(documents):
        rows.append(_judge_document(config, plans, models[0], models[1], ids, num_rows))
        if progress is not None:
            progress(number + 1, len(documents))
    judged = []
    for plan, results in zip(plans, zip(*rows)):
        reused, oracle, static = zip(*results)
        own = [quality for quality in oracle if quality is not None]
        judged.append(Judged(plan=plan, reused=mean(reused), oracle=mean(own) if own else None, static=mean(static)))
    return judged


def from_layer(plan: Plan, first: int) -> Plan:
    """The same plan with every layer below `first` on compute."""
    layers = (layer if number >= first else LayerPlan(mode=Mode.COMPUTE) for number, layer in enumerate(plan.layers))
    return replace(plan, layers=tuple(layers))


def _check_plans(plans: Sequence[Plan], fingerprint: str, sender: ModelFacts, receiver: ModelFacts) -> None:
    if not plans:
        raise CalibrationError("no plan to evaluate; name at least one plan file")
    for plan in plans:
        if plan.tokenizer_fingerprint != fingerprint:
            raise CalibrationError(f"plan {plan.name} was made for another tokenizer; calibrate this pair")
        for facts, spec in ((sender, plan.sender), (receiver, plan.receiver)):
            if facts.spec != spec:
                raise CalibrationError(
                    f"plan {plan.name} was made for {spec.model_id}, but {facts.directory} is {facts.spec.model_id}; "
                    "give the directories that it was calibrated with"
                )
        if (plan.block, plan.chunk_tokens) != (plans[0].block, plans[0].chunk_tokens):
            raise CalibrationError(
                f"plan {plan.name} differs from {plans[0].name} in block or chunk size; evaluate it alone"
            )


def _documents(config: EvaluationConfig, chunk_tokens: int) -> list[tuple[list[int], int]]:
    """Token ids and the number of rows to reuse: whole chunks, with a suffix after them."""
    read = read_documents(config.texts, load_tokenizer(config.receiver), max_tokens=config.max_tokens)
    sized = [(ids, (len(ids) - config.suffix_tokens) // chunk_tokens * chunk_tokens) for ids in read]
    usable = [(ids, rows) for ids, rows in sized if rows > 0][: config.max_documents]
    if not usable:
        least = chunk_tokens + config.suffix_tokens
        raise CalibrationError(f"{config.texts} holds no document of at least {least} tokens; use longer texts")
    return usable


def _judge_document(
    config: EvaluationConfig,
    plans: Sequence[Plan],
    sender: ObservedModel,
    receiver: ObservedModel,
    ids: list[int],
    num_rows: int,
) -> list[tuple[Quality, Quality | None, Quality]]:
    """Plan, oracle and static on one document, for every plan."""
    block = plans[0].block
    wanted = frozenset(layer for plan in plans for layer in plan.map_layers)
    theirs = Recorder(wanted, num_rows=num_rows, block=block)
    sender.run(ids, theirs)
    guided = frozenset(n for plan in plans for n, layer in enumerate(plan.layers) if layer.mode is Mode.GUIDE)
    own = Recorder(guided, num_rows=num_rows, block=block)
    start = max(0, num_rows - config.prefix_rows)
    exact = receiver.run(ids, own, logits_from=start)

    def judge(plan: Plan, *, oracle: bool = False) -> Quality:
        reuse = ReuseAttention(plan, theirs.records, num_rows=num_rows, own=own.records if oracle else None)
        logits = receiver.run(ids, reuse, logits_from=start)
        density = sum(reuse.densities) / len(reuse.densities) if reuse.densities else 1.0
        return compare(exact, logits, num_rows - start, density)

    results: list[tuple[Quality, Quality | None, Quality]] = []
    for plan in plans:
        reused = judge(plan)
        oracle = judge(plan, oracle=True) if any(layer.mode is Mode.GUIDE for layer in plan.layers) else None
        static = judge(static_plan(plan, num_rows // block, reused.density))
        results.append((reused, oracle, static))
    return results


def static_plan(plan: Plan, num_blocks: int, density: float) -> Plan:
    """The plan with a static mask in each reusing layer: the smallest window of at least the given density."""
    local = 1
    while local < num_blocks and _static_density(num_blocks, local) < density:
        local += 1
    static = LayerPlan(mode=Mode.STATIC, sink_blocks=1, local_blocks=local)
    return replace(plan, layers=tuple(static if layer.needs_map else layer for layer in plan.layers))


def _static_density(num_blocks: int, local_blocks: int) -> float:
    mask = static_mask(
        num_heads=1, first_block_row=0, num_block_rows=num_blocks, sink_blocks=1, local_blocks=local_blocks
    )
    return mask_density(mask, first_block_row=0)


def quality_table(judged: Sequence[Judged]) -> Table:
    """Every plan and its baselines, one row each."""
    table = Table(
        title="KL(exact || reused) in nats, top-1 agreement with the exact receiver",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    for name in (
        "\nplan",
        "from\nlayer",
        "\ntop-p",
        "\nmethod",
        "\ndensity",
        "\nKL",
        "\ntop-1",
        "suffix\nKL",
        "suffix\ntop-1",
    ):
        left = name in ("\nplan", "\nmethod")
        table.add_column(name, justify="left" if left else "right", no_wrap=True)
    for one in judged:
        reusing = [(number, layer) for number, layer in enumerate(one.plan.layers) if layer.needs_map]
        first, top_p = (str(reusing[0][0]), f"{reusing[0][1].top_p:g}") if reusing else ("-", "-")
        for kind, quality in (("plan", one.reused), ("oracle", one.oracle), ("static", one.static)):
            if quality is not None:
                name = reusing[0][1].mode.value if kind == "plan" and reusing else kind
                table.add_row(one.plan.name, first, top_p, name, *_numbers(quality))
    return table


def _numbers(quality: Quality) -> tuple[str, str, str, str, str]:
    return (
        f"{quality.density:.3f}",
        f"{quality.prefix_kl:.4f}",
        f"{quality.prefix_top1:.3f}",
        f"{quality.suffix_kl:.4f}",
        f"{quality.suffix_top1:.3f}",
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Judge plan files, each at several probability masses and first layers; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m mapflow.calibration.evaluate", description=__doc__.split("\n")[0])
    parser.add_argument("plans", nargs="+", type=Path, metavar="PLAN")
    for name in ("--sender", "--receiver", "--texts"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("--top-p", nargs="*", type=float, default=[], help="in place of the plan's own")
    parser.add_argument("--first-layer", nargs="*", type=int, default=[], help="layers below it compute")
    parser.add_argument("--max-tokens", type=int, default=2048)
    parser.add_argument("--max-documents", type=int, default=16)
    parser.add_argument("--suffix-tokens", type=int, default=64)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args(arguments)
    console = Console()
    try:
        config = EvaluationConfig(
            sender=options.sender,
            receiver=options.receiver,
            texts=options.texts,
            max_tokens=options.max_tokens,
            max_documents=options.max_documents,
            suffix_tokens=options.suffix_tokens,
            device=options.device,
            dtype=options.dtype,
        )
        plans = [load_plan(path) for path in options.plans]
        plans = [with_top_p(plan, top_p) for plan in plans for top_p in options.top_p] or plans
        plans = [from_layer(plan, first) for plan in plans for first in options.first_layer] or plans
        with console.status("loading models") as status:
            judged = evaluate(config, plans, lambda done, total: status.update(f"document {done} of {total}"))
    except (CalibrationError, PlanError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    console.print(quality_table(judged))
    return 0


if __name__ == "__main__":
    sys.exit(main())
