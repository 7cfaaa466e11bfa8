"""What a sender measures: block masses and tiles of the prompt rows it computes, chunk by chunk.

Rows arrive as chunked prefill delivers them, cut anywhere. A block row is measured when its last row has arrived; until
then its queries are kept, at most `block - 1` rows a layer. Nothing here changes what the engine computes.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import torch

from mapflow.connector.vllm.batch import BatchRow
from mapflow.connector.vllm.messages import CapturedChunk
from mapflow.connector.wants import LayerWant
from mapflow.kernels.attention_map import AttentionMap
from mapflow.kernels.compress_reference import CompressedRows, assemble_chunk, compress_rows
from mapflow.kernels.paged import PagedKV
from mapflow.kernels.tile_codec import TILE_DTYPE_BY_NAME

UNFINISHED_CAPTURES = 16  # requests whose unfinished last chunk is kept for the next turn


@dataclass(slots=True)
class _LayerCapture:
    """One request at one layer: queries of the unfinished block row, and the measured parts of unfinished chunks.

    tail: float [rows, num_heads, head_dim], token rows [tail_begin, tail_begin + rows).
    """

    tail: torch.Tensor | None = None
    tail_begin: int = 0
    parts: dict[int, list[CompressedRows]] = field(default_factory=dict)

    def copy(self) -> _LayerCapture:
        """One that goes its own way; the tensors, which nobody changes, are shared."""
        parts = {chunk: list(parts) for chunk, parts in self.parts.items()}
        return _LayerCapture(tail=self.tail, tail_begin=self.tail_begin, parts=parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedMap:
    """A map that is ready to be published."""

    chunk: CapturedChunk
    layer: int
    map: AttentionMap


class Capture:
    """The captures of all requests of a worker that are under way."""

    def __init__(self, *, chunk_tokens: int, block: int) -> None:
        self._chunk_tokens = chunk_tokens
        self._block = block
        self._layers: dict[str, dict[int, _LayerCapture]] = {}
        self._names: dict[str, bytes] = {}
        self._unfinished: OrderedDict[bytes, dict[int, _LayerCapture]] = OrderedDict()

    def end(self, request_id: str) -> None:
        """A request ended: keep what the next turn can go on from, drop the rest."""
        layers, name = self._layers.pop(request_id, None), self._names.pop(request_id, b"")
        if layers and name:
            self._unfinished[name] = layers
            self._unfinished.move_to_end(name)
            while len(self._unfinished) > UNFINISHED_CAPTURES:
                self._unfinished.popitem(last=False)

    def add(
        self, layer: int, want: LayerWant, row: BatchRow, query: torch.Tensor, kv: PagedKV, scale: float
    ) -> list[FinishedMap]:
        """Take in one step's rows of one request at one layer; returns the chunks that are complete now.

        Args:
            layer: sender layer, from 0.
            want: which heads, and whether tiles.
            row: the request's place in the batch and the chunks to capture.
            query: float [num_tokens, num_heads, head_dim], the whole batch.
            kv: the layer's paged keys, those of this step included.
            scale: factor of the scores.
        """
        chunks = row.step.capture
        first = chunks[0].index * self._chunk_tokens
        end = min(row.row_end, (chunks[-1].index + 1) * self._chunk_tokens)
        state = self._state(row.step.request_id, layer, row.step.resume)
        if row.step.keep:
            self._names[row.step.request_id] = row.step.keep
        rows, begin = self._join_tail(state, row, query, max(first, row.row_begin), end)
        whole = rows.shape[0] // self._block * self._block
        keys = kv.gather_keys(row.block_table, 0, begin + whole) if whole else None
        done: list[FinishedMap] = []
        for chunk in chunks:
            chunk_begin, chunk_end = chunk.index * self._chunk_tokens, (chunk.index + 1) * self._chunk_tokens
            low, high = max(begin, chunk_begin), min(begin + whole, chunk_end)
            if keys is not None and low < high:
                part = self._measure(rows[low - begin : high - begin], keys[:high], low, want, scale)
                state.parts.setdefault(chunk.index, []).append(part)
            if chunk.key and chunk_end <= row.row_end and (parts := state.parts.pop(chunk.index, [])):
                done.append(FinishedMap(chunk=chunk, layer=layer, map=self._assemble(chunk, parts)))
        state.tail, state.tail_begin = rows[whole:].clone(), begin + whole
        return done

    def _state(self, request_id: str, layer: int, resume: bytes) -> _LayerCapture:
        layers = self._layers.setdefault(request_id, {})
        if layer not in layers:
            earlier = self._unfinished.get(resume, {}).get(layer)
            layers[layer] = earlier.copy() if earlier is not None else _LayerCapture()
        return layers[layer]

    def _join_tail(
        self, state: _LayerCapture, row: BatchRow, query: torch.Tensor, begin: int, end: int
    ) -> tuple[torch.Tensor, int]:
        """Queries of rows [begin', end) that start on a block boundary, the kept tail in front where it fits."""
        start = row.query_begin - row.row_begin
        if state.tail is not None and state.tail_begin <= begin <= state.tail_begin + state.tail.shape[0]:
            kept = state.tail[: begin - state.tail_begin]  # an engine that has rows in its cache may run some again
            return torch.cat([kept, query[start + begin : start + end]]), state.tail_begin
        begin = min(-(-begin // self._block) * self._block, end)
        return query[start + begin : start + end], begin

    def _measure(
        self, query: torch.Tensor, keys: torch.Tensor, first_row: int, want: LayerWant, scale: float
    ) -> CompressedRows:
        return compress_rows(
            query,
            keys,
            first_row=first_row,
            block=self._block,
            scale=scale,
            top_p=want.tile_top_p or None,
            tile_dtype=TILE_DTYPE_BY_NAME[want.tile_dtype],
            heads=want.heads,
        )

    def _assemble(self, chunk: CapturedChunk, parts: list[CompressedRows]) -> AttentionMap:
        """The chunk's map; where a step was run again after a preemption, the later measurement counts."""
        latest: dict[int, CompressedRows] = {}
        for part in parts:
            for block_row in range(part.first_block_row, part.first_block_row + part.num_row_blocks):
                latest[block_row] = part
        unique = [part for part in parts if any(kept is part for kept in latest.values())]
        if sum(part.num_row_blocks for part in unique) != len(latest):
            unique = parts[-1:]  # they overlap in part: the last one alone is certainly consistent
        return assemble_chunk(
            unique,
            chunk_index=chunk.index,
            chunk_tokens=self._chunk_tokens,
            block=self._block,
            num_heads=unique[0].mass.shape[0],
        )
