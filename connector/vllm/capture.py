"""What a sender measures: block masses and tiles of the prompt rows it computes, chunk by chunk.

Rows arrive as chunked prefill delivers them, cut anywhere. A block row is measured when its last row has arrived; until
then its queries are kept, at most `block - 1` rows a layer. Nothing here changes what the engine computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from mapflow.connector.vllm.batch import BatchRow
from mapflow.connector.vllm.capture_states import CaptureStates
from mapflow.connector.vllm.messages import CapturedChunk
from mapflow.connector.wants import LayerWant
from mapflow.kernels.attention_map import AttentionMap
from mapflow.kernels.blob_writer import blob_num_bytes, write_blob
from mapflow.kernels.compress_reference import CompressedRows, assemble_chunk, compress_rows
from mapflow.kernels.paged import PagedKV
from mapflow.kernels.tile_codec import TILE_DTYPE_BY_NAME


class BlobSource(Protocol):
    """A map that can be written as a blob."""

    @property
    def num_bytes(self) -> int:
        """Of the blob."""
        ...

    def begin(self, buffer: memoryview) -> None:
        """As `messages.PendingBlob.begin`."""
        ...

    def end(self) -> None:
        """As `messages.PendingBlob.end`."""
        ...

    def write(self, buffer: memoryview, identity: int) -> int:
        """Returns the bytes written. identity: as for `blob_writer.write_blob`."""
        ...


@dataclass(frozen=True, slots=True)
class HostBlob:
    """A map on the host; a `BlobSource`."""

    map: AttentionMap

    @property
    def num_bytes(self) -> int:
        """As `BlobSource.num_bytes`."""
        return blob_num_bytes(self.map)

    def begin(self, buffer: memoryview) -> None:
        """Nothing takes time."""

    def end(self) -> None:
        """Nothing was begun."""

    def write(self, buffer: memoryview, identity: int) -> int:
        """As `BlobSource.write`."""
        return write_blob(self.map, buffer, identity=identity)


class PendingMap(Protocol):
    """A map that is still on its way from a GPU."""

    def source(self) -> BlobSource | None:
        """The map; None if nothing of it was measured after all. For the publisher's thread."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedMap:
    """A map that is ready to be published, or will be."""

    chunk: CapturedChunk
    layer: int
    map: HostBlob | PendingMap


class StepCapture(Protocol):
    """Measures the rows of a step, layer by layer."""

    def begin_step(self) -> None:
        """A step begins; what was made for the last one's batch is of no use any more."""
        ...

    def spares_time(self) -> bool:
        """Whether the engine's thread need not be fast while it launches this step; on any thread."""
        ...

    def end_step(self) -> Callable[[], bool] | None:
        """A step was launched; returns what tells whether it is done, None if it is."""
        ...

    def end(self, request_id: str) -> None:
        """A request ended: keep what the next turn can go on from, drop the rest."""
        ...

    @property
    def takes_row_lse(self) -> bool:
        """Whether `measure` can use the rows' log-sum-exps in layers with tiles."""
        ...

    def measure(
        self,
        layer: int,
        want: LayerWant,
        rows: Sequence[BatchRow],
        query: torch.Tensor,
        kv: PagedKV,
        scale: float,
        row_lse: torch.Tensor | None = None,
    ) -> list[FinishedMap]:
        """Take in one step's rows at one layer; returns the chunks that are complete now.

        Args:
            layer: sender layer, from 0.
            want: which heads, and whether tiles.
            rows: the requests with chunks to capture, and their places in the batch.
            query: float [num_tokens, num_heads, head_dim], the whole batch.
            kv: the layer's paged keys, those of this step included.
            scale: factor of the scores.
            row_lse: float32 [num_heads, num_tokens], log2 of the sum of exp(score), if it is known of every row.
        """
        ...


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


class Capture:
    """The captures of all requests of a worker that are under way."""

    def __init__(self, *, chunk_tokens: int, block: int) -> None:
        self._chunk_tokens = chunk_tokens
        self._block = block
        self._states = CaptureStates(_LayerCapture)

    def begin_step(self) -> None:
        """Nothing is kept for a step."""

    def spares_time(self) -> bool:
        """There is no device."""
        return False

    def end_step(self) -> None:
        """It is done."""

    def end(self, request_id: str) -> None:
        """As `StepCapture.end`."""
        self._states.end(request_id)

    @property
    def takes_row_lse(self) -> bool:
        """As `StepCapture.takes_row_lse`."""
        return False

    def measure(
        self,
        layer: int,
        want: LayerWant,
        rows: Sequence[BatchRow],
        query: torch.Tensor,
        kv: PagedKV,
        scale: float,
        row_lse: torch.Tensor | None = None,
    ) -> list[FinishedMap]:
        """As `StepCapture.measure`."""
        return [item for row in rows for item in self.add(layer, want, row, query, kv, scale)]

    def add(
        self, layer: int, want: LayerWant, row: BatchRow, query: torch.Tensor, kv: PagedKV, scale: float
    ) -> list[FinishedMap]:
        """Take in the rows of one request; arguments as in `StepCapture.measure`."""
        chunks = row.step.capture
        first = chunks[0].index * self._chunk_tokens
        end = min(row.row_end, (chunks[-1].index + 1) * self._chunk_tokens)
        state = self._states.state(row.step.request_id, layer, resume=row.step.resume, keep=row.step.keep)
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
                done.append(FinishedMap(chunk=chunk, layer=layer, map=HostBlob(self._assemble(chunk, parts))))
        state.tail, state.tail_begin = rows[whole:].clone(), begin + whole
        return done

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
