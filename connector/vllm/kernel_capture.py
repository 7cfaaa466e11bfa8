"""What a sender on a GPU measures, by the kernels: all requests of a step in one launch each, and no wait for the GPU.

Stands in for `capture.Capture`. The step only launches kernels; their results lie in the capture buffer until the
publisher's thread has copied them. A block row counts once all of its rows were measured, in one step or several:

- Without tiles, a block row that a step leaves unfinished is kept as its sums so far, float32 [num_heads, columns], and
  the next step adds to them.
- With tiles, its queries are kept, at most `block - 1` rows, and measured together with the rest: which blocks are
  worth a tile is known only when the row is whole, and tiles need its queries.

Masses are measured of every `row_stride`-th row with e4m3 keys. Rows' exact log-sum-exps are known from vLLM's own
attention; where it did not say them (rows that were cascaded, or reused in part), they are measured too. Tiles need
those of every row, from exact keys, which then costs as much as the layer's attention.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from mapflow.connector.counters import Counters
from mapflow.connector.vllm.batch import BatchRow
from mapflow.connector.vllm.capture import FinishedMap
from mapflow.connector.vllm.capture_buffer import CaptureBuffer, is_done
from mapflow.connector.vllm.capture_spans import LayerState, Span, keep_rows, next_span, parts_of, whole_rows
from mapflow.connector.vllm.capture_states import CaptureStates
from mapflow.connector.vllm.capture_tables import RowTables, StepTables
from mapflow.connector.vllm.captured_rows import ChunkParts, Layout
from mapflow.connector.vllm.piece_store import Defer, PieceStore
from mapflow.connector.wants import LayerWant
from mapflow.kernels.compress import block_masses
from mapflow.kernels.head_sections import lay_out_sections
from mapflow.kernels.paged import PagedKV
from mapflow.kernels.select import select_by_mass
from mapflow.kernels.tile_codec import TILE_DTYPE_BY_NAME
from mapflow.kernels.tiles import store_tiles
from mapflow.kernels.upload import upload

E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """What is measured, as `StepCapture.measure` has it."""

    query: torch.Tensor
    kv: PagedKV
    scale: float
    row_lse: torch.Tensor | None


class KernelCapture:
    """The captures of all requests of a worker that are under way."""

    def __init__(
        self,
        *,
        chunk_tokens: int,
        block: int,
        buffer: CaptureBuffer,
        defer: Defer,
        counters: Counters,
        row_stride: int = 1,
    ) -> None:
        """buffer: where results wait for `defer`'s thread to fetch them. row_stride: a divisor of the block."""
        self._chunk_tokens, self._block, self._row_stride = chunk_tokens, block, row_stride
        self._buffer, self._pieces = buffer, PieceStore(buffer, defer, counters)
        self._states = CaptureStates(LayerState)
        self._tables = StepTables(block)
        self._all_factors: dict[tuple[tuple[int, ...] | None, int], torch.Tensor] = {}

    def begin_step(self) -> None:
        """The last step's tables are of no use any more."""
        self._tables.clear()

    def spares_time(self) -> bool:
        """As `capture.StepCapture.spares_time`."""
        return self._pieces.spares_time()

    def end_step(self) -> Callable[[], bool]:
        """As `capture.StepCapture.end_step`."""
        return partial(is_done, self._buffer.ready())

    def end(self, request_id: str) -> None:
        """As `capture.StepCapture.end`."""
        self._states.end(request_id)
        self._pieces.end(request_id)

    @property
    def takes_row_lse(self) -> bool:
        """As `capture.StepCapture.takes_row_lse`."""
        return True

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
        """As `capture.StepCapture.measure`, for bf16 or fp16 queries that `guide.guide_attention` takes."""
        tiled = want.tile_top_p > 0
        if tiled:
            rows = [one for row in rows if (one := self._pieces.useful(row)).step.capture]
        states = {
            id(row): self._states.state(row.step.request_id, layer, resume=row.step.resume, keep=row.step.keep)
            for row in rows
        }
        sizes = (self._chunk_tokens, self._block)
        spans = [span for row in rows if (span := next_span(row, states[id(row)], tiled, *sizes)) is not None]
        taken = _Rows(query, kv, scale, row_lse)
        if spans and tiled:
            self._measure_tiles(spans, want, taken)
        elif spans:
            self._measure_masses(spans, want, taken)
        done: list[FinishedMap] = []
        for row in rows:
            for chunk in row.step.capture:
                complete = chunk.key and (chunk.index + 1) * self._chunk_tokens <= row.row_end
                if complete and (parts := states[id(row)].parts.pop(chunk.index, [])):
                    done.append(FinishedMap(chunk=chunk, layer=layer, map=ChunkParts(parts=parts)))
        return done

    def _measure_masses(self, spans: Sequence[Span], want: LayerWant, taken: _Rows) -> None:
        segments = [span.segment(span.fresh, span.end, span.at(span.fresh)) for span in spans]
        tables = self._tables.of(segments, taken.query, taken.kv, self._row_stride)
        mass = tables.no_mass()
        for span, slot in zip(spans, tables.slots):
            if span.first < span.fresh:
                mass[slot, :, : span.partial.shape[1]] = span.partial
        _sum_masses(taken, tables, mass)
        for span, slot in zip(spans, tables.slots):
            begin = span.whole_end
            last = slot + span.num_whole
            partial = mass[last, :, : begin // self._block + 1].clone() if begin < span.end else None
            span.keep(partial)
        if any(span.num_whole for span in spans):
            self._store(spans, tables, want, mass)

    def _measure_tiles(self, spans: Sequence[Span], want: LayerWant, taken: _Rows) -> None:
        whole = [span for span in spans if span.num_whole]
        rows = whole_rows(whole, taken.query, taken.row_lse)
        for span in spans:
            keep_rows(span, taken.query, taken.row_lse)
        if not whole:
            return
        tables = self._tables.of(rows.segments, rows.query, taken.kv, 1 if rows.row_lse is None else self._row_stride)
        mass = tables.no_mass()
        joined = replace(taken, query=rows.query, row_lse=rows.row_lse)
        lse = _sum_masses(joined, tables, mass, keys_for_lse=None)
        self._store(whole, tables, want, mass, replace(joined, row_lse=lse))

    def _store(
        self,
        spans: Sequence[Span],
        tables: RowTables,
        want: LayerWant,
        mass: torch.Tensor,
        tiles: _Rows | None = None,
    ) -> None:
        """Put the whole block rows of `spans` where the publisher's thread fetches them.

        tiles: what tiles are computed from, every row's log-sum-exp among it; None for none.
        """
        found = [part for span, slot in zip(spans, tables.slots) for part in parts_of(span, slot, self._chunk_tokens)]
        parts = [one.part for one in found]
        layout = Layout(
            num_rows=mass.shape[0],
            num_parts=len(parts),
            num_heads=mass.shape[1],
            block=self._block,
            chunk_rows=self._chunk_tokens // self._block,
            tile_dtype=None if tiles is None else TILE_DTYPE_BY_NAME[want.tile_dtype],
        )
        table = tables.sections(parts, layout.chunk_rows, tiles is not None)
        num_wanted = layout.num_heads if want.heads is None else len(want.heads)
        blocks = sum(row + 1 for segment in tables.rows.segments for row in segment.block_rows(self._block))

        def fill(data: torch.Tensor) -> None:
            index = None if tiles is None else select_by_mass(mass, tables.rows, want.tile_top_p)
            arena = layout.sections(data)
            offsets = lay_out_sections(
                table,
                mass,
                self._factors(want, layout.num_heads, tables.tasks.row_stride),
                index,
                tile_bytes=layout.tile_bytes,
                finite=layout.finite(data),
                ends=layout.ends(data),
                arena=arena,
            )
            if tiles is not None and tiles.row_lse is not None and index is not None and layout.tile_dtype is not None:
                store_tiles(
                    tiles.query,
                    tiles.kv,
                    tables.rows,
                    index,
                    tiles.row_lse,
                    scale=tiles.scale,
                    tile_dtype=layout.tile_dtype,
                    arena=arena,
                    offsets=offsets,
                )

        self._pieces.put(
            found, layout, layout.num_bytes + table.fixed_bytes, blocks * num_wanted * layout.tile_bytes, fill
        )

    def _factors(self, want: LayerWant, num_heads: int, row_stride: int) -> torch.Tensor:
        """float32 [num_heads] on the device, what makes means of sums; 0 for heads that nobody wants."""
        key = (want.heads, row_stride)
        if key not in self._all_factors:
            wanted = range(num_heads) if want.heads is None else want.heads
            factors = torch.tensor([row_stride / self._block * (head in wanted) for head in range(num_heads)])
            self._all_factors[key] = upload(factors, self._buffer.device)
        return self._all_factors[key]


def _sum_masses(
    taken: _Rows, tables: RowTables, mass: torch.Tensor, keys_for_lse: torch.dtype | None = E4M3
) -> torch.Tensor:
    """Add to `mass`; returns log-sum-exps, measured from such keys where they are not known."""
    known = taken.row_lse is not None
    lse = tables.row_lse if taken.row_lse is None else taken.row_lse
    keys = E4M3 if known else keys_for_lse
    options: dict[str, Any] = {"scale": taken.scale, "mass": mass, "row_lse": lse}
    block_masses(taken.query, taken.kv, tables.tasks, **options, key_dtype=keys, is_lse_known=known)
    return lse
