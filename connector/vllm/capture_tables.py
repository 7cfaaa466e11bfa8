"""Tables on the device that the layers of a sender's step share: the same rows are measured in all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch

from mapflow.connector.vllm.captured_rows import Part
from mapflow.kernels.block_rows import BlockRows
from mapflow.kernels.head_sections import SectionTable
from mapflow.kernels.mass_tasks import MassTasks
from mapflow.kernels.paged import PagedKV
from mapflow.kernels.row_segment import RowSegment


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowTables:
    """Of some segments of the batch.

    Attributes:
        rows, tasks: what the kernels walk.
        slots: first mass row of each segment.
        row_lse: float32 [num_heads, rows of the batch], scratch.
    """

    rows: BlockRows
    tasks: MassTasks
    slots: list[int]
    row_lse: torch.Tensor
    _sections: dict[bool, SectionTable] = field(default_factory=dict)

    def sections(self, parts: Sequence[Part], chunk_rows: int, tiled: bool) -> SectionTable:
        """parts: the same ones, in the same order, in every layer of the step; all rows are in one of them."""
        if tiled not in self._sections:
            own = [part.rows for part in parts]
            sizes = {"num_heads": self.row_lse.shape[0], "chunk_rows": chunk_rows}
            self._sections[tiled] = SectionTable.build(own, self.rows.lines[:, 6], **sizes, tiled=tiled)
        return self._sections[tiled]

    def no_mass(self) -> torch.Tensor:
        """float32 zeros [mass rows, num_heads, columns]."""
        shape = (self.tasks.measured.shape[0], self.row_lse.shape[0], self.rows.num_columns)
        return torch.zeros(shape, device=self.rows.device)


class StepTables:
    """Of one step; made when a layer first asks."""

    def __init__(self, block: int) -> None:
        self._block = block
        self._tables: dict[tuple[tuple[int, ...], ...], RowTables] = {}

    def clear(self) -> None:
        """The next step has others."""
        self._tables.clear()

    def of(self, segments: Sequence[RowSegment], query: torch.Tensor, kv: PagedKV, row_stride: int) -> RowTables:
        """Tables of segments of `query`, [rows of the batch, num_heads, head_dim], measured at this stride."""
        places = ((id(one.block_table), one.row_begin, one.row_end, one.out_begin) for one in segments)
        key = ((*query.shape[:2], kv.num_kv_heads, row_stride), *places)
        if key not in self._tables:
            rows = BlockRows.from_segments(
                segments, block=self._block, num_batch_rows=query.shape[0], device=query.device
            )
            counts = [len(one.block_rows(self._block)) for one in segments]
            self._tables[key] = RowTables(
                rows=rows,
                tasks=MassTasks.build(rows, group=query.shape[1] // kv.num_kv_heads, row_stride=row_stride),
                slots=list(accumulate(counts[:-1], initial=0)),
                row_lse=torch.empty(query.shape[1], query.shape[0], device=query.device),
            )
        return self._tables[key]
