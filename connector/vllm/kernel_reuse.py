"""Reuse in one step on a GPU: maps staged ahead of the layers that read them, attention by the kernels.

Stands in for `reuse.StepReuse`. Nothing here waits for the GPU or reads its memory back, unless a request asked for a
report; what differs from step to step and not from layer to layer (row tables, static masks) is made once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from mapflow.connector.plan import LayerPlan, Mode, Plan
from mapflow.connector.vllm.kept_blocks import KeptBlocks
from mapflow.connector.vllm.messages import ReuseOrder
from mapflow.connector.vllm.reuse import EntryReuse, StepReuse, segment
from mapflow.connector.vllm.staged_maps import ReadRuns, StagedMaps
from mapflow.connector.vllm.staging import StagingBuffer
from mapflow.connector.vllm.step_timer import StepSize
from mapflow.connector.vllm.transfer_model import Transfer
from mapflow.kernels.block_rows import BlockIndex, BlockRows, ChunkSpan
from mapflow.kernels.guide import guide_attention
from mapflow.kernels.map_table import MapTable
from mapflow.kernels.paged import PagedKV
from mapflow.kernels.row_segment import RowSegment
from mapflow.kernels.select import select_blocks, select_static
from mapflow.kernels.translate import translate_attention
from mapflow.kernels.upload import upload

Late = Callable[[Plan, Sequence[Transfer]], set[int]]
"""Sender layers of a plan that are not worth waiting for."""


class DevicePlans:
    """Head maps and weights of the plans on the device, copied when first used."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tensors: dict[tuple[str, str, int], torch.Tensor] = {}

    def tensor(self, plan: Plan, kind: str, layer: int) -> torch.Tensor:
        """`kind`: "head_map", "head_index" or "head_weight" of a receiver layer."""
        key = (plan.name, kind, layer)
        if key not in self._tensors:
            self._tensors[key] = upload(getattr(plan, kind)[layer], self._device)
        return self._tensors[key]


class KernelReuse(StepReuse):
    """See the module. The entries' own `maps` stay empty: maps are on the device."""

    def __init__(
        self,
        entries: Sequence[EntryReuse],
        *,
        size: StepSize,
        device: torch.device,
        staging: StagingBuffer,
        plans: DevicePlans,
        read: ReadRuns,
        late: Late,
    ) -> None:
        """size: of the step; its rows are those of the batch's query and out."""
        super().__init__(entries)
        self._size, self._device, self._staging, self._plans = size, device, staging, plans
        self._rows: dict[tuple[int, ...], tuple[BlockRows, tuple[ChunkSpan, ...]]] = {}
        self._static: dict[tuple[tuple[int, ...], int, int], BlockIndex] = {}
        self._counts = KeptBlocks()
        self._groups: list[tuple[Plan, list[EntryReuse], StagedMaps]] = []
        for plan in {id(one.plan): one.plan for one in entries}.values():
            of_plan = [one for one in entries if one.plan is plan]
            if all(one.ranges for one in of_plan):
                self._rows_of(of_plan)  # a small copy, which would wait behind those of maps
            maps = StagedMaps(plan, of_plan, staging, read, lambda some: self._rows_of(some)[1])
            maps.give_up(late(plan, maps.transfers()))
            self._groups.append((plan, of_plan, maps))

    def prepare(self, layer: int) -> None:
        """Start the copies that this layer and the next ones need."""
        for _, _, maps in self._groups:
            maps.prepare(layer)

    def reused_entries(self, layer: int) -> dict[int, tuple[EntryReuse, LayerPlan]]:
        """As the base class's; entries whose maps are not here are left out."""
        found = {}
        for plan, entries, maps in self._groups:
            of_layer, staged = plan.layers[layer], maps.of_layer(layer)
            for one in entries:
                if of_layer.mode is Mode.COMPUTE or not one.ranges:
                    continue
                if not of_layer.needs_map or (staged is not None and one.entry in staged.runs):
                    found[one.entry] = (one, of_layer)
        return found

    def attend(self, layer: int, query: torch.Tensor, kv: PagedKV, scale: float, out: torch.Tensor) -> None:
        """As the base class's, in one launch of each kernel for all entries of a plan."""
        reused = self.reused_entries(layer)
        for plan, of_plan, maps in self._groups:
            entries = [one for one in of_plan if one.entry in reused]
            if not entries:
                continue
            of_layer, staged = plan.layers[layer], maps.of_layer(layer)
            rows, _ = self._rows_of(entries)
            if staged is not None:
                self._staging.wait(staged.region)
            if of_layer.mode is Mode.TRANSLATE:
                assert staged is not None
                heads, weights = (self._plans.tensor(plan, kind, layer) for kind in ("head_index", "head_weight"))
                translate_attention(kv, rows, staged.table, head_index=heads, head_weight=weights, out=out)
                self._counts.add_tiles(entries, staged.runs, plan.head_index[layer])
            else:
                if staged is None:
                    index = self._static_index(entries, rows, of_layer, query.shape[1])
                else:
                    index = self._guide_index(plan, of_layer, layer, staged.table, rows)
                guide_attention(query, kv, rows, index, scale=scale, out=out)
                self._counts.add_index(entries, rows, index)
            for one in entries:
                one.report.modes[of_layer.mode.value] = one.report.modes.get(of_layer.mode.value, 0) + 1
                one.report.in_place += staged is not None and staged.in_place

    def finish(self, layer: int) -> None:
        """What only layers up to this one read may be overwritten."""
        for _, _, maps in self._groups:
            maps.finish(layer)

    def end(self) -> None:
        """The step is over, whatever came of it. Waits for the GPU if a request asked for a report."""
        self._staging.consume_all()
        self._counts.report()

    def _guide_index(self, plan: Plan, of_layer: LayerPlan, layer: int, table: MapTable, rows: BlockRows) -> BlockIndex:
        head_map = self._plans.tensor(plan, "head_map", layer)
        floor = {"sink_blocks": of_layer.sink_blocks, "local_blocks": of_layer.local_blocks}
        return select_blocks(table, rows, head_map, of_layer.top_p, **floor)

    def _static_index(
        self, entries: Sequence[EntryReuse], rows: BlockRows, of_layer: LayerPlan, num_heads: int
    ) -> BlockIndex:
        key = (tuple(one.entry for one in entries), of_layer.sink_blocks, of_layer.local_blocks)
        if key not in self._static:
            floor = {"sink_blocks": of_layer.sink_blocks, "local_blocks": of_layer.local_blocks}
            self._static[key] = select_static(rows, num_heads, **floor)
        return self._static[key]

    def _rows_of(self, entries: Sequence[EntryReuse]) -> tuple[BlockRows, tuple[ChunkSpan, ...]]:
        """The table of these entries' rows, all of one plan, and the chunks of each of its segments."""
        key = tuple(one.entry for one in entries)
        if key not in self._rows:
            plan = entries[0].plan
            segments: list[RowSegment] = []
            spans: list[ChunkSpan] = []
            slot = 0
            for one in entries:
                order = one.row.step.reuse
                assert order is not None
                span = _span(plan, order, slot)
                inside = one.reused_rows()
                segments += [segment(one, rows) for rows in inside]
                spans += [span] * len(inside)
                slot += span.num_chunks
            rows = BlockRows.from_segments(
                segments,
                block=plan.block,
                num_batch_rows=self._size.num_rows,
                device=self._device,
                chunk_blocks=plan.chunk_tokens // plan.block,
                spans=spans,
            )
            self._rows[key] = (rows, tuple(spans))
        return self._rows[key]


def _span(plan: Plan, order: ReuseOrder, slot: int) -> ChunkSpan:
    """An order without maps gets one over its rows: static layers read no map, but share the table."""
    if order.chunks:
        return ChunkSpan(first_chunk=order.chunks[0].index, num_chunks=len(order.chunks), slot=slot)
    return ChunkSpan(first_chunk=0, num_chunks=-(-order.row_end // plan.chunk_tokens), slot=slot)
