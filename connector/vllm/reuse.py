"""Reuse in one step: which rows of which layers go through maps, and the attention of those rows.

Holds copies of the maps it was given, so that nothing the daemon does later can change a result. It never decides
which rows a request may reuse (the scheduler did), and never computes the other rows (vLLM does).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from mapflow.connector.plan import LayerPlan, Mode, Plan
from mapflow.connector.vllm.batch import BatchRow, RowRange, split_entry
from mapflow.connector.vllm.messages import ReuseReport
from mapflow.kernels.attention_map import AttentionMap
from mapflow.kernels.guide_reference import guide_attention
from mapflow.kernels.mask import guide_mask, stack_masses, static_mask
from mapflow.kernels.paged import PagedKV
from mapflow.kernels.row_segment import RowSegment
from mapflow.kernels.translate_reference import translate_attention

LayerMaps = Mapping[int, Sequence[AttentionMap]]
"""Sender layer -> maps of consecutive chunks; a layer that could not be read is missing."""


@dataclass(slots=True, kw_only=True)
class EntryReuse:
    """One batch entry with maps.

    Attributes:
        row: its place in the batch.
        plan: the plan that it runs under.
        maps: its maps, by sender layer.
        ranges: rows that every available map covers.
        report: what happened, for the scheduler.
    """

    entry: int
    row: BatchRow
    plan: Plan
    maps: LayerMaps
    ranges: list[tuple[int, int]]
    report: ReuseReport = field(default_factory=ReuseReport)

    def layer_plan(self, layer: int) -> LayerPlan | None:
        """How this layer is reused in this step, or None where vLLM computes it."""
        plan = self.plan.layers[layer]
        return plan if plan.mode is not Mode.COMPUTE and self.ranges and self.usable(plan) else None

    def reused_rows(self) -> list[RowRange]:
        """The rows of `ranges` that are in this step, where they stand in the batch."""
        row = self.row
        return split_entry(self.entry, row.query_begin, row.row_begin, row.row_end, self.ranges)[0]

    def usable(self, plan: LayerPlan) -> bool:
        """Whether the maps that a layer needs are here."""
        return not plan.needs_map or plan.sender_layer in self.maps


def covered_ranges(maps: LayerMaps, row_begin: int, row_end: int) -> list[tuple[int, int]]:
    """Rows of [row_begin, row_end) whose whole block row was measured in every map, as ascending merged ranges."""
    ranges: list[tuple[int, int]] = []
    layers = list(maps.values())
    if not layers:
        return ranges
    for chunk_maps in zip(*layers):
        first = chunk_maps[0]
        measured = torch.stack([chunk_map.measured for chunk_map in chunk_maps]).all(dim=0)
        for number, is_measured in enumerate(measured.tolist()):
            begin = first.row_begin + number * first.block
            end = min(begin + first.block, row_end)
            begin = max(begin, row_begin)
            if not is_measured or end <= begin:
                continue
            if ranges and ranges[-1][1] == begin:
                ranges[-1] = (ranges[-1][0], end)
            else:
                ranges.append((begin, end))
    return ranges


def first_reused(plan: Plan) -> int:
    """First receiver layer that reuses anything; 0 where none does."""
    return next((number for number, layer in enumerate(plan.layers) if layer.mode is not Mode.COMPUTE), 0)


def reads_from(plan: Plan) -> int:
    """Receiver layer behind which maps are first read.

    The later, the more layers a GPU has before it while the host reads; tiles take about a layer's time to be copied.
    """
    first = first_reused(plan)
    return max(first - (2 if plan.layers[first].mode is Mode.TRANSLATE else 1), 0)


class StepReuse:
    """All reuse of one step; made before its first attention layer, dropped after its last."""

    def __init__(self, entries: Sequence[EntryReuse]) -> None:
        self._entries = entries

    @property
    def entries(self) -> Sequence[EntryReuse]:
        """The batch entries with maps."""
        return self._entries

    def prepare(self, layer: int) -> None:
        """Before anything else is asked about a layer."""

    def finish(self, layer: int) -> None:
        """A layer is through."""

    def end(self) -> None:
        """The step is over, whatever came of it."""

    def reused_entries(self, layer: int) -> dict[int, tuple[EntryReuse, LayerPlan]]:
        """Batch entry -> its reuse in this layer."""
        found = ((entry, entry.layer_plan(layer)) for entry in self._entries)
        return {entry.entry: (entry, plan) for entry, plan in found if plan is not None}

    def attend(self, layer: int, query: torch.Tensor, kv: PagedKV, scale: float, out: torch.Tensor) -> None:
        """Write the attention of this layer's reused rows.

        Args:
            layer: receiver layer, from 0.
            query: float [num_tokens, num_heads, head_dim], the whole batch.
            kv: the layer's paged keys and values, those of this step included.
            scale: factor of the scores.
            out: float [num_tokens, num_heads, head_dim]; rows that are not reused are left alone.
        """
        for entry, plan in self.reused_entries(layer).values():
            for rows in entry.reused_rows():
                if plan.mode is Mode.TRANSLATE:
                    self._translate(entry, plan, layer, rows, kv, out)
                else:
                    self._guide(entry, plan, layer, rows, query, kv, scale, out)
            entry.report.modes[plan.mode.value] = entry.report.modes.get(plan.mode.value, 0) + 1

    def _guide(
        self,
        entry: EntryReuse,
        plan: LayerPlan,
        layer: int,
        rows: RowRange,
        query: torch.Tensor,
        kv: PagedKV,
        scale: float,
        out: torch.Tensor,
    ) -> None:
        block = entry.plan.block
        first, last = rows.row_begin // block, -(-rows.row_end // block)
        if plan.mode is Mode.STATIC:
            mask = static_mask(
                num_heads=query.shape[1],
                first_block_row=first,
                num_block_rows=last - first,
                sink_blocks=plan.sink_blocks,
                local_blocks=plan.local_blocks,
            )
        else:
            assert plan.sender_layer is not None
            maps = entry.maps[plan.sender_layer]
            offset = maps[0].first_block_row
            mass = stack_masses(maps)[:, first - offset : last - offset, :last]
            mask = guide_mask(
                mass,
                entry.plan.head_map[layer],
                plan.top_p,
                first_block_row=first,
                sink_blocks=plan.sink_blocks,
                local_blocks=plan.local_blocks,
            )
        guide_attention(query, kv, [segment(entry, rows)], [mask], block=block, scale=scale, out=out)
        count_blocks(entry.report, int(mask.sum()), first, last, query.shape[1])

    def _translate(
        self, entry: EntryReuse, plan: LayerPlan, layer: int, rows: RowRange, kv: PagedKV, out: torch.Tensor
    ) -> None:
        assert plan.sender_layer is not None
        maps = entry.maps[plan.sender_layer]
        index, weight = entry.plan.head_index[layer], entry.plan.head_weight[layer]
        translate_attention(kv, [segment(entry, rows)], [maps], head_index=index, head_weight=weight, out=out)
        block = entry.plan.block
        first, last = rows.row_begin // block, -(-rows.row_end // block)
        kept = 0
        for chunk_map in maps:
            assert chunk_map.tiles is not None
            begin = max(first - chunk_map.first_block_row, 0)
            end = min(last - chunk_map.first_block_row, chunk_map.num_row_blocks)
            if end > begin:
                per_head = chunk_map.tiles.indptr[:, end] - chunk_map.tiles.indptr[:, begin]
                kept += int(per_head[index.long()].sum())
        count_blocks(entry.report, kept, first, last, index.numel())


def segment(entry: EntryReuse, rows: RowRange) -> RowSegment:
    """The kernels' view of a row range."""
    return RowSegment(
        row_begin=rows.row_begin, row_end=rows.row_end, out_begin=rows.query_begin, block_table=entry.row.block_table
    )


def count_blocks(report: ReuseReport, kept: int, first: int, last: int, num_heads: int) -> None:
    """Add `kept` blocks out of the causal ones of block rows [first, last) in `num_heads` heads."""
    report.kept_blocks += kept
    report.causal_blocks += num_heads * (last * (last + 1) - first * (first + 1)) // 2
