"""Where each request's rows stand in the batch that the model runner made, and which of them are reused.

The order of a batch is the model runner's own and differs between its versions, so requests are found by their rows,
and where two have the same, by the KV page that their last row is written to. Pure arithmetic on lists; no tensors but
the block table.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mapflow.connector.vllm.messages import RequestStep


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRow:
    """One request's place in the batch: its prompt rows [row_begin, row_end) lie at `query_begin` of the query tensor.

    `block_table` is i32 [pages]: the KV pages that hold the request's tokens.
    """

    step: RequestStep
    query_begin: int
    row_begin: int
    row_end: int
    block_table: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRange:
    """Rows [row_begin, row_end) of batch entry `entry`, at `query_begin` of the query tensor."""

    entry: int
    query_begin: int
    row_begin: int
    row_end: int

    @property
    def num_rows(self) -> int:
        """Length of the range."""
        return self.row_end - self.row_begin


def locate(
    steps: Sequence[RequestStep],
    *,
    query_start: Sequence[int],
    seq_lens: Sequence[int],
    block_table: torch.Tensor,
    page_size: int,
    pages_per_block: int,
) -> dict[int, BatchRow]:
    """Batch entry -> the request that stands there; entries without one are left to vLLM.

    Args:
        steps: orders of this step.
        query_start: first query row of each entry, and the end of the last.
        seq_lens: tokens of each entry including those of this step.
        block_table: i32 [entries, pages], as the attention backend sees it.
        page_size: tokens per page of that table.
        pages_per_block: pages of that table per block of the scheduler (1 unless the backend splits blocks).
    """
    found: dict[int, BatchRow] = {}
    for entry, step in _matches(steps, query_start, seq_lens, block_table, page_size, pages_per_block):
        found[entry] = BatchRow(
            step=step,
            query_begin=query_start[entry],
            row_begin=step.row_begin,
            row_end=min(step.row_end, step.num_prompt),
            block_table=block_table[entry, : -(-seq_lens[entry] // page_size)],
        )
    return found


def _matches(
    steps: Sequence[RequestStep],
    query_start: Sequence[int],
    seq_lens: Sequence[int],
    block_table: torch.Tensor,
    page_size: int,
    pages_per_block: int,
) -> list[tuple[int, RequestStep]]:
    """By rows and tokens where only one entry and one order have them; where more do, by the page of the last row.

    Reading pages waits for a GPU, and rows and tokens alone nearly always tell.
    """
    entries: dict[tuple[int, int], list[int]] = defaultdict(list)
    orders: dict[tuple[int, int], list[RequestStep]] = defaultdict(list)
    rows_of = [(end - query_start[entry + 1] + query_start[entry], end) for entry, end in enumerate(seq_lens)]
    for entry, rows in enumerate(rows_of):
        entries[rows].append(entry)
    for step in steps:
        if step.row_begin < step.row_end:
            orders[step.row_begin, step.row_end].append(step)
    matches, ambiguous = [], []
    for rows, wanted in orders.items():
        if len(wanted) == 1 and len(entries[rows]) == 1:
            matches.append((entries[rows][0], wanted[0]))
        else:
            ambiguous += entries[rows]
    if ambiguous:
        last = [(seq_lens[entry] - 1) // page_size for entry in ambiguous]
        pages = (block_table[ambiguous, last] // pages_per_block).tolist()
        by_page = {(step.last_page, step.row_begin, step.row_end): step for step in steps}
        for entry, page in zip(ambiguous, pages):
            found = by_page.get((page, *rows_of[entry]))
            if found is not None:
                matches.append((entry, found))
    return sorted(matches, key=lambda match: match[0])


def split_entry(
    entry: int, query_begin: int, row_begin: int, row_end: int, reused: Sequence[tuple[int, int]]
) -> tuple[list[RowRange], list[RowRange]]:
    """Cut one entry's rows [row_begin, row_end) into those inside the ascending `reused` ranges and the rest."""
    inside: list[RowRange] = []
    outside: list[RowRange] = []

    def cut(begin: int, end: int, into: list[RowRange]) -> None:
        if end > begin:
            start = query_begin + begin - row_begin
            into.append(RowRange(entry=entry, query_begin=start, row_begin=begin, row_end=end))

    position = row_begin
    for begin, end in reused:
        begin, end = max(begin, position), min(end, row_end)
        if end <= begin:
            continue
        cut(position, begin, outside)
        cut(begin, end, inside)
        position = end
    cut(position, row_end, outside)
    return inside, outside


def gaps(ranges: Sequence[tuple[int, int]], end: int) -> list[tuple[int, int]]:
    """What disjoint `ranges` leave of [0, end), ascending."""
    found, position = [], 0
    for begin, stop in sorted(ranges):
        if begin > position:
            found.append((position, begin))
        position = stop
    if end > position:
        found.append((position, end))
    return found
