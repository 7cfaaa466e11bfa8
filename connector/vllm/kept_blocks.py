"""How many blocks the reused rows of a step attended, for requests that asked for a report.

Guide's and static's blocks are counted on the device and read once, at the end of the step; translate's stand in the
maps, which the host has too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from mapflow.connector.vllm.map_reader import MapRun
from mapflow.connector.vllm.reuse import EntryReuse, count_blocks
from mapflow.kernels.block_rows import BlockIndex, BlockRows


class KeptBlocks:
    """Of one step."""

    def __init__(self) -> None:
        self._on_device: list[tuple[list[tuple[EntryReuse, int, int]], int, torch.Tensor]] = []

    def add_index(self, entries: Sequence[EntryReuse], rows: BlockRows, index: BlockIndex) -> None:
        """Blocks that an index keeps; its segments are the ranges of `entries`, one after the other."""
        if any(map(_is_counted, entries)):
            owners = [(one, begin, end) for one in entries for begin, end in one.ranges]
            kept = torch.zeros(len(owners), dtype=torch.int32, device=rows.device)
            kept.index_add_(0, rows.lines[:, 0], index.counts.sum(1, dtype=torch.int32))
            self._on_device.append((owners, index.counts.shape[1], kept))

    def add_tiles(self, entries: Sequence[EntryReuse], runs: Mapping[int, MapRun], head_index: torch.Tensor) -> None:
        """Tiles that translation reads. head_index: i32 [receiver heads, k]."""
        heads = head_index.flatten().tolist()
        for one in filter(_is_counted, entries):
            per_row = tiles_per_row(runs[one.entry])
            start = runs[one.entry].first.first_chunk * runs[one.entry].first.chunk_blocks
            for begin, end in one.ranges:
                first, last = begin // one.plan.block, -(-end // one.plan.block)
                kept = int(per_row[first - start : last - start, heads].sum())
                count_blocks(one.report, kept, first, last, len(heads))

    def report(self) -> None:
        """Write what was counted into the entries' reports; waits for the device where it has to."""
        for owners, num_heads, kept in self._on_device:
            for (one, begin, end), number in zip(owners, kept.tolist()):
                if _is_counted(one):
                    first, last = begin // one.plan.block, -(-end // one.plan.block)
                    count_blocks(one.report, number, first, last, num_heads)
        self._on_device.clear()


def tiles_per_row(found: MapRun) -> torch.Tensor:
    """i64 [block rows, sender heads]: tiles of each block row of consecutive chunks."""
    length = 4 * (found.first.chunk_blocks + 1)
    counts = []
    for run in found.ranks:
        at = run.offsets[:, None] + run.sections[:, :, 1]
        indptr = found.source.numpy()[at[:, :, None] + np.arange(length)].view("<i4")  # [chunks, heads, block rows + 1]
        counts.append(np.diff(indptr.astype(np.int64)).swapaxes(1, 2).reshape(-1, run.num_heads))
    return torch.from_numpy(np.concatenate(counts, axis=1))


def _is_counted(entry: EntryReuse) -> bool:
    order = entry.row.step.reuse
    return order is not None and order.counted
