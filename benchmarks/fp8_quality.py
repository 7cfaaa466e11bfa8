"""What e4m3 operands cost in quality: `python benchmarks/fp8_quality.py --sender DIR --receiver DIR ...`, on a CPU.

Rounds what `kernels/compress.py` and `kernels/translate.py` round, inside calibration's simulation of a plan, and
measures on held-out documents how far the receiver's next-token distributions move away from full attention: mean KL in
nats on the last reused rows (prefix) and on the tokens after them, which attend fully (suffix). Prints a table and
writes `benchmarks/results/fp8-quality.json`. Only operands are rounded; sums are float32 everywhere.

Without `--plan` a guide plan is calibrated first. Translate takes the same layer map and head map (all sender heads),
in every layer that reuses and in the `BEST_LAYERS` with the least calibrated error alone. Baselines at the plan's own
floor: `oracle`, guided by the receiver's own masses; `static`, sink and local window of at least the guide's density.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from mapflow.calibration.attention import AttentionCall, AttentionHandler
from mapflow.calibration.reuse import LayerRecord, ReuseAttention
from mapflow.connector.plan import LayerPlan, Mode, Plan
from mapflow.kernels.attention_map import decode_mass, encode_mass
from mapflow.kernels.mask import guide_mask, mask_density, static_mask

RESULT = Path(__file__).parent / "results" / "fp8-quality.json"
BEST_LAYERS = 5  # reuse by translation alone is for few layers
STRIDES = (1, 2, 4, 8)
PREFIX_ROWS = 1024  # last reused rows whose distributions count
STACKED = 128  # rows of a task of the masses' kernel, all heads of a group together
E4M3_MAX = 448.0

Records = Mapping[int, LayerRecord]


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


def sampled_masses(call: AttentionCall, num_rows: int, block: int, stride: int) -> torch.Tensor:
    """Block masses of rows stride - 1, 2 * stride - 1, ...: f32 [num_heads, num_blocks, num_blocks]."""
    mass = torch.zeros(call.num_heads, num_rows // block, num_rows // block)
    for row in range(num_rows // block):
        maps = call.probabilities(torch.arange(row * block + stride - 1, (row + 1) * block, stride))
        mass[:, row, : row + 1] = maps.unflatten(2, (row + 1, block)).sum(3).mean(1)
    return mass


def row_lse(call: AttentionCall, num_rows: int, block: int) -> torch.Tensor:
    """Log of the sum of exp(score) of each row: f32 [num_heads, num_rows], from a row's most probable column."""
    parts = []
    for rows in torch.arange(num_rows).split(block):
        top, column = call.probabilities(rows).max(-1)  # [num_heads, block]
        key = call.key.repeat_interleave(call.group, 0).take_along_dim(column[..., None], 1)
        parts.append((call.query[:, rows] * key).sum(-1) * call.scaling - top.log())
    return torch.cat(parts, 1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TileCall(AttentionCall):
    """A sender layer whose probabilities are scores over the sums that the masses' kernel left, as tiles are.

    Attributes:
        row_factor: f32 [num_heads, num_rows, 1], exact sum of exp(score) / the kernel's.
    """

    row_factor: torch.Tensor

    def probabilities(self, rows: torch.Tensor, kept: torch.Tensor | None = None) -> torch.Tensor:
        """As stored: at most 1."""
        return (AttentionCall.probabilities(self, rows, kept) * self.row_factor[:, rows]).clamp_max(1.0)


def tile_call(call: AttentionCall, num_rows: int, block: int) -> TileCall:
    """The call with the log-sum-exp of e4m3 queries and keys."""
    error = row_lse(call, num_rows, block) - row_lse(e4m3_call(call, num_rows, 1), num_rows, block)
    fields = {name: getattr(call, name) for name in AttentionCall.__dataclass_fields__}
    return TileCall(**fields, row_factor=error.exp()[..., None])


class E4m3Values:
    """Gives a translated layer's reused rows the values that the kernel multiplies; all other rows keep their own."""

    def __init__(self, reuse: ReuseAttention, plan: Plan, num_rows: int) -> None:
        """Wrap `reuse`, which simulates `plan` on rows [0, num_rows)."""
        self._reuse = reuse
        self._plan = plan
        self._num_rows = num_rows
        self.densities = reuse.densities

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """The layer's output."""
        if self._plan.layers[call.layer].mode is not Mode.TRANSLATE:
            return self._reuse.attend(call)
        output = self._reuse.attend(replace(call, value=through_e4m3(call.value, (1, 2))))
        output[:, self._num_rows :] = call.output()[:, self._num_rows :]
        return output


def translate_plan(plan: Plan, num_layers: int) -> Plan:
    """A guide plan's maps, translated in the `num_layers` layers of least error; the others compute."""
    best = sorted(plan.head_map, key=lambda number: plan.layers[number].error)[:num_layers]
    index = torch.arange(plan.sender.num_heads, dtype=torch.int32).expand(plan.receiver.num_heads, -1).contiguous()
    layers = tuple(
        replace(layer, mode=Mode.TRANSLATE) if number in best else LayerPlan(mode=Mode.COMPUTE)
        for number, layer in enumerate(plan.layers)
    )
    weights = {number: plan.head_map[number] for number in best}
    return replace(plan, layers=layers, head_map={}, head_index=dict.fromkeys(best, index), head_weight=weights)


def static_plan(plan: Plan, num_blocks: int, density: float) -> Plan:
    """Sink and the smallest local window of at least `density` in place of every guide layer."""

    def density_of(local: int) -> float:
        window = {"num_heads": 1, "num_block_rows": num_blocks, "sink_blocks": 1, "local_blocks": local}
        return mask_density(static_mask(first_block_row=0, **window), first_block_row=0)

    local = next(local for local in range(1, num_blocks + 1) if density_of(local) >= density)
    static = LayerPlan(mode=Mode.STATIC, sink_blocks=1, local_blocks=local)
    return replace(plan, layers=tuple(static if layer.needs_map else layer for layer in plan.layers), head_map={})


def masks(plan: Plan, records: Records) -> list[torch.Tensor]:
    """The mask of each guide layer."""
    return [
        guide_mask(
            decode_mass(encode_mass(records[layer.sender_layer].mass)),
            plan.head_map[number],
            layer.top_p,
            first_block_row=0,
            sink_blocks=layer.sink_blocks,
            local_blocks=layer.local_blocks,
        )
        for number, layer in enumerate(plan.layers)
        if layer.sender_layer is not None
    ]


def differences(plan: Plan, exact: Records, rounded: Records) -> dict[str, float]:
    """Share of kept blocks that only one of two masks keeps, and relative error (norm) of the masses; over layers."""
    pairs = list(zip(masks(plan, exact), masks(plan, rounded)))
    errors = [(rounded[layer].mass - exact[layer].mass).norm() / exact[layer].mass.norm() for layer in exact]
    return {
        "kept_differ": statistics.mean(float((a ^ b).sum() / (a.sum() + b.sum())) for a, b in pairs),
        "mass_error": statistics.mean(map(float, errors)),
    }


Variant = tuple[str, str, AttentionHandler, dict[str, float]]


def variants(plan: Plan, theirs: Records, own: Records, num_rows: int) -> Iterator[Variant]:
    """Name, name of what it is held against, handler, and figures that need no run of the receiver."""
    exact = "guide, exact masses"
    guide = ReuseAttention(plan, theirs, num_rows=num_rows)
    yield exact, exact, guide, {"kept_differ": 0.0, "mass_error": 0.0}
    e4m3: dict[int, dict[int, LayerRecord]] = {}
    for stride in STRIDES:
        e4m3[stride] = {
            layer: replace(
                record,
                mass=sampled_masses(e4m3_call(record.call, num_rows, stride), num_rows, plan.block, stride),
            )
            for layer, record in theirs.items()
        }
        name = "guide, e4m3 masses" + (f", rows 1/{stride}" if stride > 1 else "")
        handler = ReuseAttention(plan, e4m3[stride], num_rows=num_rows)
        yield name, exact, handler, differences(plan, theirs, e4m3[stride])
    yield "oracle", exact, ReuseAttention(plan, theirs, num_rows=num_rows, own=own), {}
    density = statistics.mean(guide.densities)  # the guide has run by now
    static = static_plan(plan, num_rows // plan.block, density)
    yield "static", exact, ReuseAttention(static, {}, num_rows=num_rows), {}
    stored = {
        layer: replace(record, call=tile_call(record.call, num_rows, plan.block)) for layer, record in e4m3[1].items()
    }
    for count in (len(plan.head_map), BEST_LAYERS):
        translate = translate_plan(plan, count)
        kind = f"translate {count} layers"
        exact = f"{kind}, exact values"
        reuse = ReuseAttention(translate, theirs, num_rows=num_rows)
        yield exact, exact, reuse, {}
        reuse = ReuseAttention(translate, theirs, num_rows=num_rows)
        yield f"{kind}, e4m3 values", exact, E4m3Values(reuse, translate, num_rows), {}
        reuse = ReuseAttention(translate, stored, num_rows=num_rows)
        yield f"{kind}, e4m3 values + sums", exact, E4m3Values(reuse, translate, num_rows), {}
