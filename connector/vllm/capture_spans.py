"""Which rows of a request a step adds to its capture on a GPU, and what stays for the next step. Host only.

A block row is measured from its first row on, or not at all: rows that start inside one go on from what the last step
left of it, if they follow on, else they are left out up to the next block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch

from mapflow.connector.vllm.batch import BatchRow
from mapflow.connector.vllm.captured_rows import Part
from mapflow.kernels.head_sections import MeasuredRows
from mapflow.kernels.row_segment import RowSegment


@dataclass(slots=True)
class LayerState:
    """One request at one layer: rows [begin, end) of the unfinished block row, and the parts of unfinished chunks.

    partial: of those rows, float32 [num_heads, columns] sums of probabilities; or if `tiled` their queries
    [rows, num_heads, head_dim], and row_lse their log-sum-exps, float32 [num_heads, rows], where vLLM said them. Never
    changed in place.
    """

    partial: torch.Tensor | None = None
    row_lse: torch.Tensor | None = None
    tiled: bool = False
    begin: int = 0
    end: int = 0
    parts: dict[int, list[Part]] = field(default_factory=dict)

    def copy(self) -> LayerState:
        """One that goes its own way."""
        parts = {chunk: list(parts) for chunk, parts in self.parts.items()}
        return replace(self, parts=parts)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Span:
    """Rows [first, end) of a request, of which those before `fresh` are its state's partial; `first` begins a block."""

    row: BatchRow
    state: LayerState
    block: int
    first: int
    fresh: int
    end: int

    @property
    def num_whole(self) -> int:
        """Block rows that are complete now."""
        return (self.end - self.first) // self.block

    @property
    def whole_end(self) -> int:
        """End of their token rows."""
        return self.first + self.num_whole * self.block

    @property
    def partial(self) -> torch.Tensor:
        """Of rows [first, fresh), where there are any."""
        assert self.state.partial is not None
        return self.state.partial

    def at(self, token: int) -> int:
        """Where a fresh row lies in the batch."""
        return self.row.query_begin + token - self.row.row_begin

    def segment(self, begin: int, end: int, out_begin: int) -> RowSegment:
        """Rows [begin, end), which lie at `out_begin` of a query tensor."""
        return RowSegment(row_begin=begin, row_end=end, out_begin=out_begin, block_table=self.row.block_table)

    def keep(self, partial: torch.Tensor | None, *, tiled: bool = False, row_lse: torch.Tensor | None = None) -> None:
        """Leave rows [whole_end, end) for the next step."""
        state = self.state
        state.partial, state.row_lse, state.tiled = partial, row_lse, tiled
        state.begin, state.end = self.whole_end, self.end


def next_span(row: BatchRow, state: LayerState, tiled: bool, chunk_tokens: int, block: int) -> Span | None:
    """What a step adds, if anything; rows that the engine runs again are not measured again.

    A partial that the rows do not follow on, or of the other kind, is dropped.
    """
    chunks = row.step.capture
    begin = max(chunks[0].index * chunk_tokens, row.row_begin)
    end = min((chunks[-1].index + 1) * chunk_tokens, row.row_end)
    if state.partial is not None and state.tiled == tiled and state.begin <= begin <= state.end:
        first, fresh = state.begin, state.end
    else:
        state.partial = None
        first = fresh = -(-begin // block) * block
    return Span(row=row, state=state, block=block, first=first, fresh=fresh, end=end) if fresh < end else None


@dataclass(frozen=True, slots=True, eq=False)
class ChunkPart:
    """A part of a piece, with the span that it belongs to."""

    span: Span
    part: Part

    @property
    def chunk(self) -> int:
        """Index of its chunk."""
        return self.part.rows.chunk_index


def parts_of(span: Span, slot: int, chunk_tokens: int) -> list[ChunkPart]:
    """A span's whole block rows, the first of them at `slot` of a piece, chunk by chunk."""
    found = []
    block, end = span.block, span.whole_end
    for chunk in range(span.first // chunk_tokens, -(-end // chunk_tokens)):
        low, high = max(span.first, chunk * chunk_tokens), min(end, (chunk + 1) * chunk_tokens)
        rows = MeasuredRows(
            chunk_index=chunk,
            row=(low - chunk * chunk_tokens) // block,
            num_rows=(high - low) // block,
            slot=slot + (low - span.first) // block,
        )
        found.append(ChunkPart(span, Part(rows=rows)))
    return found


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WholeRows:
    """The rows of spans' whole block rows, where tiles are stored.

    Attributes:
        segments: of each span.
        query: what the segments refer to.
        row_lse: float32 [num_heads, rows of `query`], log2 of the sum of exp(score); None unless known of all rows.
    """

    segments: list[RowSegment]
    query: torch.Tensor
    row_lse: torch.Tensor | None


def whole_rows(spans: Sequence[Span], query: torch.Tensor, row_lse: torch.Tensor | None) -> WholeRows:
    """Gathered where a span goes on from a partial, else where they lie in the batch.

    query: [rows of the batch, num_heads, head_dim]. row_lse: float32 [num_heads, rows of the batch] or None.
    """
    if not any(span.first < span.fresh for span in spans):
        segments = [span.segment(span.first, span.whole_end, span.at(span.first)) for span in spans]
        return WholeRows(segments=segments, query=query, row_lse=row_lse)
    queries: list[torch.Tensor] = []
    log_sums: list[torch.Tensor | None] = []
    for span in spans:
        if span.first < span.fresh:
            queries.append(span.partial)
            log_sums.append(span.state.row_lse)
        fresh = slice(span.at(span.fresh), span.at(span.whole_end))
        queries.append(query[fresh])
        log_sums.append(None if row_lse is None else row_lse[:, fresh])
    places = accumulate((span.whole_end - span.first for span in spans), initial=0)
    return WholeRows(
        segments=[span.segment(span.first, span.whole_end, place) for span, place in zip(spans, places)],
        query=torch.cat(queries),
        row_lse=_joined(log_sums),
    )


def keep_rows(span: Span, query: torch.Tensor, row_lse: torch.Tensor | None) -> None:
    """Leave the queries of a span's last, unfinished block row for the next step, and their log-sum-exps if known."""
    begin = span.whole_end
    if begin == span.end:
        span.keep(None, tiled=True)
        return
    fresh = slice(span.at(max(span.fresh, begin)), span.at(span.end))
    queries, log_sums = [query[fresh]], [None if row_lse is None else row_lse[:, fresh]]
    if span.fresh > begin:
        queries.insert(0, span.partial)
        log_sums.insert(0, span.state.row_lse)
    span.keep(torch.cat(queries), tiled=True, row_lse=_joined(log_sums))


def _joined(log_sums: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """Of all rows, unless some are not known."""
    known = [one for one in log_sums if one is not None]
    return torch.cat(known, dim=1) if len(known) == len(log_sums) else None
