"""A plan by the kernels that serve it, inside a receiver that runs under transformers: the time that layers take.

`reuse.py` simulates; here the maps are built as a sender builds them and read as a receiver reads them, so what comes
out differs from the simulation by rounding alone. Needs a GPU; tests run it in Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from statistics import median
from typing import Any

import torch

from mapflow.calibration.attention import AttentionCall
from mapflow.calibration.reuse import LayerRecord
from mapflow.connector.plan import LayerPlan, Mode, Plan
from mapflow.kernels.block_rows import BlockRows, ChunkSpan
from mapflow.kernels.compress_reference import assemble_chunk, compress_rows
from mapflow.kernels.guide import guide_attention
from mapflow.kernels.map_table import MapTable
from mapflow.kernels.paged import PagedKV
from mapflow.kernels.row_segment import RowSegment
from mapflow.kernels.select import select_blocks, select_static
from mapflow.kernels.tile_codec import TILE_DTYPE_BY_NAME
from mapflow.kernels.translate import translate_attention

Timer = Callable[[Callable[[], object]], float]
"""Runs a call, several times if it likes; milliseconds of one."""

_WARM_UPS, _REPEATS = 3, 10


def gpu_timer(call: Callable[[], object]) -> float:
    """Median of some repeats on the current CUDA device."""
    for _ in range(_WARM_UPS):
        call()
    times: list[float] = []
    for _ in range(_REPEATS):
        begin, end = _event(), _event()
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return median(times)


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


class KernelAttention:
    """An `AttentionHandler` of one document.

    Attributes:
        reuse_ms: by layer that reuses, its attention, selection and packing of rows [0, num_rows).
        full_ms: of the same layers, full attention over the same rows.
    """

    def __init__(self, plan: Plan, sender: Mapping[int, LayerRecord], *, num_rows: int, timer: Timer = gpu_timer):
        """num_rows: rows that reuse, whole chunks. sender: records of the layers that the plan reads."""
        self._plan, self._sender, self._num_rows, self._timer = plan, sender, num_rows, timer
        self._tables: dict[tuple[int, bool, float], MapTable] = {}
        self._rows: BlockRows | None = None
        self.reuse_ms: dict[int, float] = {}
        self.full_ms: dict[int, float] = {}

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """The layer's output; rows that reuse are computed in bfloat16."""
        layer, output = self._plan.layers[call.layer], call.output()
        if layer.mode is Mode.COMPUTE:
            return output
        alone = _first_rows(call, self._num_rows)
        query, kv = alone.query.transpose(0, 1).contiguous(), self._kv(alone)
        out = torch.empty_like(query)
        self.reuse_ms[call.layer] = self._timer(self._launch(call, layer, query, kv, out))
        output[:, : self._num_rows] = out.transpose(0, 1).to(output.dtype)
        self.full_ms[call.layer] = self._timer(alone.output)
        return output

    def _launch(
        self, call: AttentionCall, layer: LayerPlan, query: torch.Tensor, kv: PagedKV, out: torch.Tensor
    ) -> Callable[[], None]:
        rows, device = self._block_rows(call), query.device
        if layer.mode is Mode.TRANSLATE:
            table = self._table(layer, tiles=True)
            index = self._plan.head_index[call.layer].to(device)
            weight = self._plan.head_weight[call.layer].to(device)
            return lambda: translate_attention(kv, rows, table, head_index=index, head_weight=weight, out=out)
        floor = {"sink_blocks": layer.sink_blocks, "local_blocks": layer.local_blocks}
        if layer.mode is Mode.STATIC:
            fixed = select_static(rows, call.num_heads, **floor)  # once a step, whatever the layer
            return lambda: guide_attention(query, kv, rows, fixed, scale=call.scaling, out=out)
        table, head_map = self._table(layer, tiles=False), self._plan.head_map[call.layer].to(device)

        def guide() -> None:
            index = select_blocks(table, rows, head_map, layer.top_p, **floor)
            guide_attention(query, kv, rows, index, scale=call.scaling, out=out)

        return guide

    def _block_rows(self, call: AttentionCall) -> BlockRows:
        if self._rows is None:
            plan, device = self._plan, call.query.device
            pages = torch.arange(self._num_rows // plan.block, dtype=torch.int32, device=device)
            segment = RowSegment(row_begin=0, row_end=self._num_rows, out_begin=0, block_table=pages)
            self._rows = BlockRows.from_segments(
                [segment],
                block=plan.block,
                num_batch_rows=self._num_rows,
                device=device,
                chunk_blocks=plan.chunk_tokens // plan.block,
                spans=[ChunkSpan(first_chunk=0, num_chunks=self._num_rows // plan.chunk_tokens, slot=0)],
            )
        return self._rows

    def _kv(self, call: AttentionCall) -> PagedKV:
        """Pages of a block each, one behind the other."""

        def pages(tensor: torch.Tensor) -> torch.Tensor:
            num_heads, _, width = tensor.shape
            whole = tensor.view(num_heads, -1, self._plan.block, width)
            return whole.transpose(0, 1).contiguous()

        return PagedKV(key_cache=pages(call.key), value_cache=pages(call.value))

    def _table(self, layer: LayerPlan, *, tiles: bool) -> MapTable:
        """The sender layer's maps as blobs in device memory."""
        assert layer.sender_layer is not None
        key = (layer.sender_layer, tiles, layer.top_p if tiles else 0.0)
        if key not in self._tables:
            plan, call = self._plan, self._sender[layer.sender_layer].call
            found = compress_rows(
                call.query[:, : self._num_rows].transpose(0, 1),
                call.key[:, : self._num_rows].transpose(0, 1),
                first_row=0,
                block=plan.block,
                scale=call.scaling,
                top_p=layer.top_p if tiles else None,
                tile_dtype=TILE_DTYPE_BY_NAME[plan.tile_dtype],
            )
            chunk = partial(
                assemble_chunk, [found], chunk_tokens=plan.chunk_tokens, block=plan.block, num_heads=call.num_heads
            )
            maps = [chunk(chunk_index=number) for number in range(self._num_rows // plan.chunk_tokens)]
            self._tables[key] = MapTable.from_maps([maps], call.query.device)
        return self._tables[key]


def _first_rows(call: AttentionCall, num_rows: int) -> AttentionCall:
    """The same attention over the first rows alone, in bfloat16."""
    query, key, value = (one[:, :num_rows].bfloat16().contiguous() for one in (call.query, call.key, call.value))
    return AttentionCall(layer=call.layer, query=query, key=key, value=value, scaling=call.scaling, window=call.window)
