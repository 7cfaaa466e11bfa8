"""What e4m3 operands cost in quality: `python benchmarks/fp8_quality.py --sender DIR --receiver DIR ...`, on a CPU.

Rounds what `kernels/compress.py` and `kernels/translate.py` round, inside calibration's simulation of a plan, and
measures on held-out documents how far the receiver's next-token distributions move away from full attention: mean KL in
nats on the last reused rows (prefix) and on the tokens after them, which attend fully (suffix). Prints a table and
writes `benchmarks/results/fp8-quality.json`. Only operands are rounded; sums are float32 everywhere.

Translate takes the guide plan's layer map and head map (all sender heads), in every layer that reuses, and in the
`BEST_LAYERS` with the least calibrated error alone; "sums" are the log-sum-exps that the masses' kernel leaves for the
tiles. Baselines: "oracle", guided by the receiver's own masses, and "static", sink and local window of at least the
guide's density.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from mapflow.calibration.attention import AttentionCall, ObservedModel
from mapflow.calibration.calibrate import calibrate
from mapflow.calibration.config import CalibrationConfig
from mapflow.calibration.models import load_model, read_facts
from mapflow.calibration.quality import compare
from mapflow.calibration.reuse import LayerRecord, Recorder, ReuseAttention
from mapflow.calibration.reuse_runs import static_plan
from mapflow.calibration.texts import load_tokenizer, read_documents
from mapflow.connector.plan import LayerPlan, Mode, Plan, load_plan

RESULT = Path(__file__).parent / "results" / "fp8-quality.json"
STRIDES = (1, 2, 4, 8)
BEST_LAYERS = 5  # translation is for few layers: with all of them its own loss hides the rounding
PREFIX_ROWS = 1024  # last reused rows whose distributions count
STACKED = 128  # rows of a task of the masses' kernel, all heads of a group together
E4M3_MAX = 448.0


def through_e4m3(x: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    """To e4m3 and back, as kernels do with their bf16 operands: one scale over `dims`, largest magnitude / 448."""
    x = x.bfloat16().float()
    largest = x.abs().amax(dims, keepdim=True).clamp_min(1e-15)
    return (x * (E4M3_MAX / largest)).to(torch.float8_e4m3fn).float() * (largest / E4M3_MAX)


def e4m3_call(call: AttentionCall, num_rows: int, stride: int) -> AttentionCall:
    """The queries and keys that the masses' kernel multiplies; rows that it doesn't sample stay as they are."""
    of_task = STACKED // (1 << (call.group - 1).bit_length())  # sampled rows of a task
    query = call.query.clone()
    sampled = query[:, stride - 1 : num_rows : stride]  # a view: [num_heads, sampled rows, head_dim]
    for rows in sampled.unflatten(0, (-1, call.group)).split(of_task, 2):  # [num_kv_heads, group, of_task, head_dim]
        rows.copy_(through_e4m3(rows, (1, 2, 3)))
    return replace(call, query=query, key=through_e4m3(call.key, (1, 2)))


def e4m3_masses(record: LayerRecord, block: int, stride: int) -> LayerRecord:
    """The record with masses of rows stride - 1, 2 * stride - 1, ..., from e4m3 queries and keys."""
    mass = torch.zeros_like(record.mass)
    rounded = e4m3_call(record.call, mass.shape[1] * block, stride)
    for row in range(mass.shape[1]):
        maps = rounded.probabilities(torch.arange(row * block + stride - 1, (row + 1) * block, stride))
        mass[:, row, : row + 1] = maps.unflatten(2, (row + 1, block)).sum(3).mean(1)
    return replace(record, mass=mass)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TileCall(AttentionCall):
    """A sender layer whose probabilities are exact scores over the kernel's sums, as in stored tiles.

    Attributes:
        row_factor: f32 [num_heads, num_rows, 1], exact sum of exp(score) / the one of e4m3 queries and keys.
    """

    row_factor: torch.Tensor

    @classmethod
    def build(cls, call: AttentionCall, num_rows: int) -> TileCall:
        """For rows [0, num_rows)."""
        error = row_lse(call, num_rows) - row_lse(e4m3_call(call, num_rows, 1), num_rows)
        inherited = {field.name: getattr(call, field.name) for field in fields(call)}
        return cls(**inherited, row_factor=error.exp()[..., None])

    def probabilities(self, rows: torch.Tensor, kept: torch.Tensor | None = None) -> torch.Tensor:
        """As stored: at most 1."""
        return (AttentionCall.probabilities(self, rows, kept) * self.row_factor[:, rows]).clamp_max(1.0)


def row_lse(call: AttentionCall, num_rows: int) -> torch.Tensor:
    """Log of each row's sum of exp(score), by its most probable column: f32 [num_heads, num_rows]."""
    parts = []
    for rows in torch.arange(num_rows).split(64):
        top, column = call.probabilities(rows).max(-1)  # [num_heads, 64]
        key = call.key.repeat_interleave(call.group, 0).take_along_dim(column[..., None], 1)
        parts.append((call.query[:, rows] * key).sum(-1) * call.scaling - top.log())
    return torch.cat(parts, 1)


class Reuse(ReuseAttention):
    """Calibration's simulation, which also keeps its masks and can round the values that translate multiplies."""

    def __init__(self, *args: Any, e4m3_values: bool = False, **kwargs: Any) -> None:
        """As `ReuseAttention`."""
        super().__init__(*args, **kwargs)
        self._e4m3_values = e4m3_values
        self.masks: list[torch.Tensor] = []

    def _masked(self, call: AttentionCall, mask: torch.Tensor, output: torch.Tensor) -> None:
        self.masks.append(mask)
        super()._masked(call, mask, output)

    def _translate(self, call: AttentionCall, layer: LayerPlan, output: torch.Tensor) -> None:
        rounded = replace(call, value=through_e4m3(call.value, (1, 2))) if self._e4m3_values else call
        super()._translate(rounded, layer, output)


def translate_plan(plan: Plan, num_layers: int) -> Plan:
    """A guide plan's maps, translated in the `num_layers` layers of least error; the others compute."""
    best = sorted(plan.head_map, key=lambda number: plan.layers[number].error)[:num_layers]
    index = torch.arange(plan.sender.num_heads, dtype=torch.int32).repeat(plan.receiver.num_heads, 1)
    layers = [LayerPlan(mode=Mode.COMPUTE)] * len(plan.layers)
    for number in best:
        layers[number] = replace(plan.layers[number], mode=Mode.TRANSLATE)
    weight = {number: plan.head_map[number] for number in best}
    return replace(plan, layers=tuple(layers), head_map={}, head_index=dict.fromkeys(best, index), head_weight=weight)


def variants(
    plan: Plan, exact: Mapping[int, LayerRecord], own: Mapping[int, LayerRecord], num_rows: int
) -> Iterator[tuple[str, Reuse, bool, dict[str, float]]]:
    """Name, handler, whether the following variants are held against it, figures that need no run of the receiver.

    exact, own: records of the sender's and the receiver's layers. What was yielded last has run when the next is asked.
    """
    guide = Reuse(plan, exact, num_rows=num_rows)
    yield "guide, exact masses", guide, True, {}
    records = {}
    for stride in STRIDES:
        records[stride] = {layer: e4m3_masses(record, plan.block, stride) for layer, record in exact.items()}
        pairs = [(records[stride][layer].mass, record.mass) for layer, record in exact.items()]
        error = statistics.mean(float((mass - wanted).norm() / wanted.norm()) for mass, wanted in pairs)
        name = "guide, e4m3 masses" + (f", rows 1/{stride}" if stride > 1 else "")
        yield name, Reuse(plan, records[stride], num_rows=num_rows), False, {"mass_error": error}
    yield "oracle", Reuse(plan, exact, num_rows=num_rows, own=own), False, {}
    static = static_plan(plan, num_rows // plan.block, statistics.mean(guide.densities.values()))
    yield "static", Reuse(static, {}, num_rows=num_rows), False, {}
    stored = {layer: replace(one, call=TileCall.build(one.call, num_rows)) for layer, one in records[1].items()}
    for count in (len(plan.head_map), BEST_LAYERS):
        translate = translate_plan(plan, count)
        name = f"translate {count} layers,"
        yield f"{name} exact values", Reuse(translate, exact, num_rows=num_rows), True, {}
        yield f"{name} e4m3 values", Reuse(translate, exact, num_rows=num_rows, e4m3_values=True), False, {}
        whole = Reuse(translate, stored, num_rows=num_rows, e4m3_values=True)
        yield f"{name} e4m3 values, masses, sums", whole, False, {}


def judge_document(
    plan: Plan, sender: ObservedModel, receiver: ObservedModel, ids: list[int], num_rows: int
) -> dict[str, dict[str, float]]:
    """Variant -> its figures on one document, of which rows [0, num_rows) reuse."""
    theirs = Recorder(frozenset(plan.map_layers), num_rows=num_rows, block=plan.block)
    sender.run(ids, theirs)
    own = Recorder(frozenset(plan.head_map), num_rows=num_rows, block=plan.block)
    start = max(0, num_rows - PREFIX_ROWS)
    full = receiver.run(ids, own, logits_from=start)
    results: dict[str, dict[str, float]] = {}
    for name, handler, is_reference, figures in variants(plan, theirs.records, own.records, num_rows):
        logits = receiver.run(ids, handler, logits_from=start)
        density = statistics.mean(handler.densities.values())
        quality = compare(full, logits, ids[start + 1 :], num_rows - start, density)
        mine = {"prefix_kl": quality.prefix_kl, "suffix_kl": quality.suffix_kl, "density": quality.density} | figures
        if is_reference:
            reference, masks = mine, handler.masks
        if handler.masks:
            shares = [float((a ^ b).sum() / (a.sum() + b.sum())) for a, b in zip(handler.masks, masks)]
            mine["kept_differ"] = statistics.mean(shares)  # share of kept blocks that only one of two masks keeps
        ratios = {f"{part}_ratio": mine[part] / reference[part] for part in ("prefix_kl", "suffix_kl")}
        results[name] = mine | ratios
    return results


def summary(documents: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, dict[str, float]]]:
    """Variant -> figure -> its mean and spread over documents."""

    def spread(values: list[float]) -> dict[str, float]:
        deviation = statistics.stdev(values) if len(values) > 1 else 0.0
        figures = {"mean": statistics.mean(values), "sd": deviation, "min": min(values), "max": max(values)}
        return {name: float(f"{value:.4g}") for name, value in figures.items()}

    return {
        name: {figure: spread([one[name][figure] for one in documents]) for figure in figures}
        for name, figures in documents[0].items()
    }


def print_table(block: int, of_variants: dict[str, dict[str, dict[str, float]]]) -> None:
    """Means and standard deviations over documents; ratios are to exact operands, document by document."""
    columns = {"prefix_kl": 4, "prefix_kl_ratio": 3, "suffix_kl": 5, "suffix_kl_ratio": 3, "density": 3}
    columns |= {"kept_differ": 4, "mass_error": 4}
    print(f"\n{f'blocks of {block}':45}" + "".join(f"{name:>19}" for name in columns))
    for name, of in of_variants.items():
        cells = [
            f"{of[figure]['mean']:.{digits}f} ± {of[figure]['sd']:.{digits}f}" if figure in of else "-"
            for figure, digits in columns.items()
        ]
        print(f"{name:45}" + "".join(f"{cell:>19}" for cell in cells))


def main() -> None:
    """Parse, measure, write, print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    for name in ("--sender", "--receiver", "--texts"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("--plan", type=Path, required=True, help="guide plan of the pair; made here if there is none")
    parser.add_argument("--calibration", type=Path, help="texts to calibrate it on")
    parser.add_argument("--blocks", nargs="+", type=int, default=[64])
    parser.add_argument("--prefix", type=int, default=2048, help="rows that reuse")
    parser.add_argument("--suffix", type=int, default=256, help="tokens after them")
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--minutes", type=float, default=9.0, help="no document is begun that would end later")
    parser.add_argument("--output", type=Path, default=RESULT)
    arguments = parser.parse_args()
    started = time.monotonic()
    pair = {"sender": arguments.sender, "receiver": arguments.receiver}
    if not arguments.plan.exists():
        if arguments.calibration is None:
            parser.error(f"{arguments.plan} does not exist; name --calibration texts to make it from")
        sample = {"first_layer": 3, "max_tokens": 1024, "row_fraction": 0.25}
        calibrate(CalibrationConfig(**pair, texts=arguments.calibration, out=arguments.plan, **sample))
    plan = load_plan(arguments.plan)
    sender, receiver = (
        ObservedModel(load_model(read_facts(one), device="cpu", dtype="float32")) for one in pair.values()
    )
    num_tokens = arguments.prefix + arguments.suffix
    texts = read_documents(arguments.texts, load_tokenizer(arguments.receiver), max_tokens=num_tokens)
    texts = [ids for ids in texts if len(ids) == num_tokens][: arguments.documents]
    git = ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+"]
    commit = subprocess.run(git, cwd=RESULT.parent, capture_output=True, text=True, check=False).stdout.strip()
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
    layer = plan.layers[min(plan.head_map)]
    report: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit or "unknown",
        "versions": {"python": sys.version.split()[0], **versions},
        "models": {"sender": plan.sender.model_id, "receiver": plan.receiver.model_id},
        "plan": {name: getattr(layer, name) for name in ("top_p", "sink_blocks", "local_blocks")}
        | {"sender_layers": [one.sender_layer for one in plan.layers]},
        "prefix_tokens": arguments.prefix,
        "prefix_tokens_judged": min(PREFIX_ROWS, arguments.prefix),
        "suffix_tokens": arguments.suffix,
        "blocks": {},
    }
    results: dict[int, list[dict[str, dict[str, float]]]] = {block: [] for block in arguments.blocks}
    longest = 0.0
    for number, ids in enumerate(texts, 1):
        begun = time.monotonic()
        if begun + longest > started + 60 * arguments.minutes:
            break
        for block, of_documents in results.items():
            of_documents.append(judge_document(replace(plan, block=block), sender, receiver, ids, arguments.prefix))
            report["blocks"][block] = {"documents": number, "variants": summary(of_documents)}
        arguments.output.write_text(json.dumps(report, indent=1) + "\n")  # what was measured survives an interruption
        longest = max(longest, time.monotonic() - begun)
        print(f"document {number} of {len(texts)}, {time.monotonic() - started:.0f} s", flush=True)
    for block, of_block in report["blocks"].items():
        print_table(block, of_block["variants"])


if __name__ == "__main__":
    main()
