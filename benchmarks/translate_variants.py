"""What makes a translation good: head maps of several kinds on real weights and held-out texts, quality against bytes.

    python benchmarks/translate_variants.py --sender DIR --receiver DIR --fit texts.jsonl --texts held-out.jsonl

Each variant translates every layer from `--first-layer` on. Prints a table and writes
`benchmarks/results/translate-variants.json`: `cases` of {variant, density, bytes of maps, quality}. `tune` starts from
the same least squares as its neighbour; a quarter of the texts that are fitted decides which weights are kept.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))  # PYTHONSAFEPATH, which this project runs with, leaves it out

from translate_fits import VARIANTS, Variant, fits_of, joined, sums_of

from kernels import git_commit, versions, write_report
from mapflow.calibration.attention import ObservedModel
from mapflow.calibration.calibrate import build_plan, check_tokenizers
from mapflow.calibration.config import CalibrationConfig
from mapflow.calibration.models import read_facts
from mapflow.calibration.pair_models import PairModels
from mapflow.calibration.quality import Quality, compare, estimate
from mapflow.calibration.reuse import LayerRecord, Recorder, ReuseAttention
from mapflow.calibration.reuse_runs import mean_density
from mapflow.calibration.sensitivity import with_layers
from mapflow.calibration.texts import load_tokenizer, read_documents
from mapflow.calibration.tuning import TuningConfig, tune
from mapflow.connector.plan import Mode, Plan

BLOCK = 64
RESULT = Path(__file__).parent / "results" / "translate-variants.json"


class Altered(ReuseAttention):
    """Tiles that were altered on the way: `kind` as in `Variant`."""

    def __init__(self, kind: str, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._kind = kind

    def _tiles(self, record: LayerRecord, kept: torch.Tensor, row: int) -> torch.Tensor:
        tiles = super()._tiles(record, kept, row)
        if self._kind == "renormalised":
            tiles /= tiles.sum(-1, keepdim=True).clamp_min(1e-6)
        elif self._kind == "means":
            block = self._plan.block
            rows = torch.arange(row * block, (row + 1) * block, device=tiles.device)
            shares = record.call.probabilities(rows).unflatten(2, (row + 1, block)).sum(3).mean(1)
            left_out = (shares * ~kept[:, row, : row + 1] / block).repeat_interleave(block, 1)
            tiles += left_out[:, None]
        return tiles


class Document:
    """One text: its maps, and the receiver's logits without reuse."""

    def __init__(
        self,
        sender: ObservedModel,
        receiver: ObservedModel,
        ids: list[int],
        layers: frozenset[int],
        *,
        prefix: int,
        rows: int,
    ) -> None:
        """layers: of the sender, that will be read. prefix: rows that reuse; the last `rows` of them count."""
        self._num_rows = min(prefix, len(ids) // BLOCK * BLOCK)
        self._receiver, self._ids, self._start = receiver, ids, max(0, self._num_rows - rows)
        recorder = Recorder(layers, num_rows=self._num_rows, block=BLOCK)
        sender.run(ids, recorder)
        self._sent = {False: recorder.records, True: joined(recorder.records)}
        exact = Recorder(frozenset(), num_rows=0, block=1)
        self._exact = receiver.run(ids, exact, logits_from=self._start)

    def judge(self, plan: Plan, variant: Variant) -> tuple[Quality, dict[int, float]]:
        """Quality and densities of a variant's plan."""
        reuse = Altered(variant.kind, plan, self._sent[variant.neighbours], num_rows=self._num_rows)
        logits = self._receiver.run(self._ids, reuse, logits_from=self._start)
        next_ids, num_prefix = self._ids[self._start + 1 :], self._num_rows - self._start
        return compare(self._exact, logits, next_ids, num_prefix, mean_density(reuse.densities)), reuse.densities

    def worst_layers(self, plan: Plan) -> list[int]:
        """Layers of a plan, those first that harm most alone."""
        layers = plan.reusing_layers
        alone = {one: _without(plan, [other for other in layers if other != one]) for one in layers}
        damage = {one: self.judge(only, Variant())[0].prefix_kl for one, only in alone.items()}
        return sorted(damage, key=lambda one: -damage[one])


def map_bytes(plan: Plan, densities: dict[int, float], num_rows: int) -> int:
    """Of the tiles that cross: those of every sender head that a layer reads, one byte a value."""
    blocks = (num_rows // plan.block) * (num_rows // plan.block + 1) / 2
    heads = {layer: len(index.unique()) for layer, index in plan.head_index.items() if layer in densities}
    return round(sum(densities[layer] * blocks * count * plan.block**2 for layer, count in heads.items()))


def main() -> None:
    """Parse, fit, measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    for name in ("--sender", "--receiver", "--fit", "--texts"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("--first-layer", type=int, default=3)
    parser.add_argument("--fit-tokens", type=int, default=4096, help="of each text that is fitted")
    parser.add_argument("--row-fraction", type=float, default=0.25)
    parser.add_argument("--tune-steps", type=int, default=64)
    parser.add_argument("--tune-tokens", type=int, default=1024, help="of the pieces that weights are tuned on")
    parser.add_argument("--prefix", type=int, default=4096, help="rows that reuse")
    parser.add_argument("--suffix", type=int, default=256, help="tokens after them")
    parser.add_argument("--rows", type=int, default=1024, help="last rows of the prefix that count")
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--commit", default=None, help="the commit that is measured, where git cannot be asked")
    parser.add_argument("--output", type=Path, default=RESULT)
    arguments = parser.parse_args()
    tokenizer = load_tokenizer(arguments.receiver)
    fingerprint = check_tokenizers(arguments.sender, arguments.receiver)
    facts = [read_facts(path) for path in (arguments.sender, arguments.receiver)]
    sender, receiver = PairModels(*facts, device=arguments.device, dtype="float32").both
    fitted = read_documents(arguments.fit, tokenizer, max_tokens=arguments.fit_tokens)
    judging = fitted[3::4]
    fitted = [ids for ids in fitted if ids not in judging]
    sums = sums_of(
        facts,
        sender,
        receiver,
        fitted,
        first_layer=arguments.first_layer,
        row_fraction=arguments.row_fraction,
        device=arguments.device,
    )

    config = CalibrationConfig(
        sender=arguments.sender,
        receiver=arguments.receiver,
        texts=arguments.fit,
        out=Path("translate.safetensors"),  # names plans; never written
        mode=Mode.TRANSLATE,
    )

    steps = TuningConfig(steps=arguments.tune_steps, max_tokens=arguments.tune_tokens)

    def plan_of(variant: Variant) -> Plan:
        one, spec = replace(config, top_p=variant.top_p), facts[0].spec
        wide = replace(facts[0], spec=replace(spec, num_heads=(1 + variant.neighbours) * spec.num_heads))
        fits = fits_of(sums[variant.neighbours], variant)
        plan = build_plan(one, fingerprint, wide, facts[1], Mode.TRANSLATE, fits)
        if not variant.tuned:
            return plan
        return tune(plan, sender, receiver, fitted, judging, steps)

    plans: dict[Variant, Plan] = {}
    for variant in VARIANTS:
        whole = plans.get(replace(variant, without_worst=0))
        plans[variant] = plan_of(variant) if whole is None else whole
    length = arguments.prefix + arguments.suffix
    read = read_documents(arguments.texts, tokenizer, max_tokens=length)
    documents = [ids for ids in read if len(ids) == length][: arguments.documents]
    sizes = {name: getattr(arguments, name) for name in ("prefix", "rows")}
    read_layers = frozenset(facts[0].full_layers)
    judge = Document(sender, receiver, judging[0], read_layers, **sizes)
    worst = judge.worst_layers(plans[VARIANTS[0]])
    qualities: dict[Variant, list[Quality]] = defaultdict(list)
    num_bytes: dict[Variant, list[int]] = defaultdict(list)
    for number, ids in enumerate(documents):
        began = time.monotonic()
        document = Document(sender, receiver, ids, read_layers, **sizes)
        for variant, plan in plans.items():
            used = _without(plan, worst[: variant.without_worst])
            quality, densities = document.judge(used, variant)
            qualities[variant].append(quality)
            num_bytes[variant].append(map_bytes(used, densities, arguments.prefix))
        print(f"document {number + 1} of {len(documents)}: {time.monotonic() - began:.0f} s", flush=True)
    cases = [
        {
            "variant": variant.name,
            **asdict(variant),
            "map_bytes": round(sum(num_bytes[variant]) / len(documents)),
            **asdict(estimate(found)),
        }
        for variant, found in qualities.items()
    ]
    for case in cases:
        print(
            f"{case['variant']:44} density {case['density']:.3f}  {case['map_bytes'] / 1e6:7.1f} MB  "
            f"KL {case['prefix_kl']:.4f} ({case['low']['prefix_kl']:.4f} to {case['high']['prefix_kl']:.4f})"
        )
    sizes |= {name: getattr(arguments, name) for name in ("suffix", "first_layer", "tune_steps", "tune_tokens")}
    pair = f"{facts[0].spec.model_id} -> {facts[1].spec.model_id}"
    commit = arguments.commit or git_commit()
    report = {"pair": pair, **sizes, "worst_layers": worst[:3], "commit": commit, "versions": versions()}
    write_report({**report, "cases": cases}, arguments.output)


def _without(plan: Plan, layers: list[int]) -> Plan:
    """The plan with these layers on compute."""
    return with_layers(plan, {n: plan.layers[n] for n in plan.reusing_layers if n not in layers})


if __name__ == "__main__":
    main()
