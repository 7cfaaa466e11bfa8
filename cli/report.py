"""`mapflow report`: gathers what there is about a plan and writes the page; what stands on it is calibration's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from mapflow.calibration.config import CalibrationError
from mapflow.calibration.evaluate import check_models
from mapflow.calibration.example_maps import ExampleMap, example_maps
from mapflow.calibration.models import read_facts
from mapflow.calibration.pair_models import PairModels
from mapflow.calibration.planned_run import frontier_file
from mapflow.calibration.report import read_json, render
from mapflow.calibration.texts import load_tokenizer, read_documents
from mapflow.connector.plan import Plan, load_plan


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleSource:
    """Models and a text to show maps of, and where they run."""

    sender: Path
    receiver: Path
    texts: Path
    max_tokens: int
    device: str
    dtype: str


def write_report(file: Path, out: Path, *, quality: Path | None, source: ExampleSource | None) -> None:
    """Write the page about a plan file.

    Args:
        file: the plan; its frontier is taken where it lies beside it.
        out: the page.
        quality: what `evaluate --out` wrote, for this plan among others.
        source: for maps of a text; None for none.

    Raises:
        CalibrationError: a file, a model or a text cannot be used.
        PlanError: `file` is no plan.
    """
    if not out.parent.is_dir():
        raise CalibrationError(f"{out.parent}, where {out.name} is to be written, is no directory")
    plan = load_plan(file)
    beside = frontier_file(file)
    frontier = read_json(beside, "frontier") if beside.is_file() else None
    cases = [] if quality is None else read_json(quality, "cases")["cases"]
    own = [case for case in cases if case["plan"] == plan.name]
    if cases and not own:
        raise CalibrationError(f"{quality} says nothing about plan {plan.name}; evaluate it, with --out {quality}")
    examples = [] if source is None else _examples(plan, source)
    out.write_text(render(plan, file, frontier=frontier, quality=own, examples=examples), encoding="utf-8")
    Console().print(f"written to {out}")


def _examples(plan: Plan, source: ExampleSource) -> list[ExampleMap]:
    documents = read_documents(source.texts, load_tokenizer(source.receiver), max_tokens=source.max_tokens)
    longest = max(documents, key=len, default=[])
    if len(longest) < plan.block:
        raise CalibrationError(f"{source.texts} holds no document of at least {plan.block} tokens; use longer texts")
    facts = [read_facts(path) for path in (source.sender, source.receiver)]
    check_models(plan, *facts)
    models = PairModels(facts[0], facts[1], device=source.device, dtype=source.dtype)
    return example_maps(plan, *models.both, longest)
