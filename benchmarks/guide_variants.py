"""What makes a guide good: masses of several kinds at equal density, on real weights and held-out texts.

    python benchmarks/guide_variants.py --plan guide.safetensors --sender DIR --receiver DIR --texts held-out.jsonl

Each variant keeps the blocks that its masses point to, besides the first block and the last two, in every layer that
the plan guides; p is found by bisection, so that all keep the same share of blocks. Dense arithmetic on any device, no
kernels. Prints a table and writes `benchmarks/results/guide-variants.json`: `cases` of {variant, density, quality}.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))  # PYTHONSAFEPATH, which this project runs with, leaves it out

from kernels import git_commit, versions, write_report
from mapflow.calibration.attention import AttentionCall
from mapflow.calibration.models import read_facts
from mapflow.calibration.pair_models import PairModels
from mapflow.calibration.quality import Quality, compare, estimate
from mapflow.calibration.texts import load_tokenizer, read_documents
from mapflow.connector.plan import Mode, Plan, load_plan
from mapflow.kernels.attention_map import decode_mass, encode_mass
from mapflow.kernels.mask import floor_mask, mask_density
from mapflow.kernels.top_p import select_top_p

RESULT = Path(__file__).parent / "results" / "guide-variants.json"
STATISTICS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {  # of shares [heads, rows, blocks], over rows
    "mean": lambda shares: shares.mean(1),
    "rms": lambda shares: shares.square().mean(1).sqrt(),
    "fourth moment": lambda shares: shares.pow(4).mean(1).pow(0.25),
    "largest": lambda shares: shares.amax(1),
    "rms, rows 1/2": lambda shares: shares[:, 1::2].square().mean(1).sqrt(),
    "rms, rows 1/4": lambda shares: shares[:, 3::4].square().mean(1).sqrt(),
    "rms, rows 1/8": lambda shares: shares[:, 7::8].square().mean(1).sqrt(),
}
Masses = dict[int, dict[str, torch.Tensor]]
"""Layer -> statistic -> f32 [heads, blocks, blocks]."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """How blocks are chosen. by: "share" of each row's masses, or one "threshold" for all heads and rows of a layer.

    power: of masses before shares are taken; their order stays, but not how many a row keeps. own: by the receiver's
    masses. centroids: what is left out counts as its mean key and value, weighted by its tokens.
    """

    statistic: str = "rms"
    power: float = 1.0
    own: bool = False
    by: str = "share"
    centroids: bool = False

    @property
    def name(self) -> str:
        """For tables."""
        power = "" if self.power == 1 else f"power {self.power:g}"
        kinds = ("oracle" if self.own else "guide", self.statistic, power, self.by)
        parts = (*kinds, "centroids" if self.centroids else "")
        return ", ".join(filter(None, parts))


VARIANTS = (
    *(Variant(statistic=name) for name in STATISTICS),
    *(Variant(statistic=name, power=power) for name in ("rms", "fourth moment") for power in (0.25, 0.5, 0.75)),
    Variant(by="threshold"),
    Variant(centroids=True),
    Variant(statistic="mean", own=True),
    Variant(own=True),
)


class Recorder:
    """Exact attention that leaves every statistic of some layers' rows [0, num_rows)."""

    def __init__(self, layers: frozenset[int], num_rows: int, block: int) -> None:
        self._layers, self._num_rows, self._block = layers, num_rows, block
        self.masses: Masses = {}

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """The exact output."""
        if call.layer in self._layers:
            size = self._num_rows // self._block
            found = {name: torch.zeros(call.num_heads, size, size, device=call.query.device) for name in STATISTICS}
            for row in range(size):
                rows = torch.arange(row * self._block, (row + 1) * self._block, device=call.query.device)
                shares = call.probabilities(rows).unflatten(2, (row + 1, self._block)).sum(3)
                for name, statistic in STATISTICS.items():
                    found[name][:, row, : row + 1] = statistic(shares)
            self.masses[call.layer] = {name: decode_mass(encode_mass(mass)) for name, mass in found.items()}
        return call.output()


class Masked:
    """Attention inside masks, bool [heads, blocks, blocks] by layer, for rows [0, num_rows); exact for the others."""

    def __init__(self, masks: dict[int, torch.Tensor], block: int, *, centroids: bool) -> None:
        self._masks, self._block, self._centroids = masks, block, centroids

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """The layer's output."""
        output, mask = call.output(), self._masks.get(call.layer)
        for row in range(0 if mask is None else mask.shape[1]):
            begin, end = row * self._block, (row + 1) * self._block
            output[:, begin:end] = self._row(call, mask[:, row, : row + 1], begin, end).to(output.dtype)
        return output

    def _row(self, call: AttentionCall, kept: torch.Tensor, begin: int, end: int) -> torch.Tensor:
        """One block row, f32 [heads, block, value_dim]; kept: bool [heads, blocks]."""
        key, value = (one[:, :end].float().repeat_interleave(call.group, 0) for one in (call.key, call.value))
        query = call.query[:, begin:end].float()
        scores = query @ key.transpose(1, 2) * call.scaling
        place = torch.arange(end, device=query.device)
        hidden = ~kept.repeat_interleave(self._block, 1)[:, None] | (place > place[begin:, None])
        scores = scores.masked_fill_(hidden, -torch.inf)
        if not self._centroids:
            return scores.softmax(-1) @ value
        mean_key, mean_value = (one.unflatten(1, (-1, self._block)).mean(2) for one in (key, value))
        far = query @ mean_key.transpose(1, 2) * call.scaling + torch.tensor(float(self._block)).log()
        shares = torch.cat([scores, far.masked_fill_(kept[:, None], -torch.inf)], -1).softmax(-1)
        return shares[..., :end] @ value + shares[..., end:] @ mean_value


def masks_of(plan: Plan, variant: Variant, sent: Masses, own: Masses, density: float) -> dict[int, torch.Tensor]:
    """Of every guided layer; one p, or a threshold a layer, such that the mean density is at least the one wanted."""
    masses = {}
    for number, layer in enumerate(plan.layers):
        if layer.mode is Mode.GUIDE and layer.sender_layer is not None:
            mass = own[number][variant.statistic] if variant.own else sent[layer.sender_layer][variant.statistic]
            if not variant.own:
                head_map = plan.head_map[number].to(mass.device)
                mass = torch.einsum("is,src->irc", head_map, mass).clamp_min_(0.0)
            masses[number] = mass.pow(variant.power)
    if variant.by == "threshold":
        return {number: _bisect([mass], density, _above)[0] for number, mass in masses.items()}
    found = _bisect(list(masses.values()), density, lambda mass, p: select_top_p(mass, p, first_block_row=0))
    return dict(zip(masses, found))


def _above(mass: torch.Tensor, p: float) -> torch.Tensor:
    return (mass >= 1.0 - p).tril()


def _bisect(
    masses: list[torch.Tensor], density: float, select: Callable[[torch.Tensor, float], torch.Tensor]
) -> list[torch.Tensor]:
    size = masses[0].shape[1]
    kinds: dict[str, Any] = {"first_block_row": 0, "num_block_rows": size, "num_col_blocks": size}
    floor = floor_mask(**kinds, sink_blocks=1, local_blocks=2, device=masses[0].device)
    low, high, best = 0.0, 1.0, [torch.ones_like(mass, dtype=torch.bool).tril() for mass in masses]
    for _ in range(18):
        middle = (low + high) / 2
        masks = [select(mass, middle) | floor for mass in masses]
        if sum(mask_density(mask, first_block_row=0) for mask in masks) / len(masks) < density:
            low = middle
        else:
            high, best = middle, masks
    return best


def main() -> None:
    """Parse, measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    for name in ("--plan", "--sender", "--receiver", "--texts"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("--prefix", type=int, default=4096, help="rows that reuse")
    parser.add_argument("--suffix", type=int, default=256, help="tokens after them")
    parser.add_argument("--rows", type=int, default=1024, help="last rows of the prefix that count")
    parser.add_argument("--densities", nargs="+", type=float, default=[0.165, 0.24])
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--commit", default=None, help="the commit that is measured, where git cannot be asked")
    parser.add_argument("--output", type=Path, default=RESULT)
    arguments = parser.parse_args()
    plan = load_plan(arguments.plan)
    facts = (read_facts(path) for path in (arguments.sender, arguments.receiver))
    sender, receiver = PairModels(*facts, device=arguments.device, dtype="float32").both
    length = arguments.prefix + arguments.suffix
    read = read_documents(arguments.texts, load_tokenizer(arguments.receiver), max_tokens=length)
    documents = [ids for ids in read if len(ids) == length][: arguments.documents]
    guided = frozenset(number for number, layer in enumerate(plan.layers) if layer.mode is Mode.GUIDE)
    found: dict[tuple[Variant, float], list[Quality]] = defaultdict(list)
    start = arguments.prefix - arguments.rows
    for number, ids in enumerate(documents):
        began = time.monotonic()
        sent = Recorder(frozenset(plan.map_layers), arguments.prefix, plan.block)
        sender.run(ids, sent)
        own = Recorder(guided, arguments.prefix, plan.block)
        exact = receiver.run(ids, own, logits_from=start)
        for density in arguments.densities:
            for variant in VARIANTS:
                masks = masks_of(plan, variant, sent.masses, own.masses, density)
                reused = receiver.run(ids, Masked(masks, plan.block, centroids=variant.centroids), logits_from=start)
                reached = sum(mask_density(mask, first_block_row=0) for mask in masks.values()) / len(masks)
                found[variant, density].append(compare(exact, reused, ids[start + 1 :], arguments.rows, reached))
        print(f"document {number + 1} of {len(documents)}: {time.monotonic() - began:.0f} s", flush=True)
    cases = [
        {"variant": variant.name, **asdict(variant), "wanted": density, **asdict(estimate(qualities))}
        for (variant, density), qualities in found.items()
    ]
    for case in cases:
        print(
            f"{case['variant']:32} density {case['density']:.3f}  KL {case['prefix_kl']:.4f} "
            f"({case['low']['prefix_kl']:.4f} to {case['high']['prefix_kl']:.4f})  suffix {case['suffix_kl']:.4f}"
        )
    pair = f"{plan.sender.model_id} -> {plan.receiver.model_id}"
    sizes = {"prefix": arguments.prefix, "suffix": arguments.suffix, "rows": arguments.rows, "block": plan.block}
    commit = arguments.commit or git_commit()
    write_report({"pair": pair, **sizes, "commit": commit, "versions": versions(), "cases": cases}, arguments.output)


if __name__ == "__main__":
    main()
