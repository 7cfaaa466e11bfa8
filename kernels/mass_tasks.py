"""What the programs of `compress.py` do in a step: runs of sampled rows, the heads of a group stacked. Host only."""

from dataclasses import dataclass

import torch
import triton

from mapflow.kernels.block_rows import BlockRows
from mapflow.kernels.schedule import Schedules
from mapflow.kernels.tensor_check import check_int
from mapflow.kernels.upload import upload

STACKED_ROWS = 128  # of a task, all heads of a group together


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MassTasks:
    """A step's tasks, built once for all layers. One is `num_rows` sampled rows of a prompt, for one KV head at a time.

    Sampled row j of a prompt is its token row j * row_stride + row_stride - 1.

    Attributes:
        table: i32 [T, 8] on the device, longest first: first sampled row, mass row of its block row, row_begin,
            row_end, shift, token_base, 0, 0; the last four as in `BlockRows`.
        measured: i32 [mass rows] on the host, rows that one call measures in each block row.
        schedules: of these tasks.
    """

    rows: BlockRows
    row_stride: int
    group: int
    table: torch.Tensor
    measured: torch.Tensor
    schedules: Schedules

    @classmethod
    def build(cls, rows: BlockRows, *, group: int, row_stride: int = 1) -> "MassTasks":
        """For `group` query heads a KV head. Raises ValueError unless `row_stride` divides the block."""
        check_int("group", group, minimum=1, maximum=STACKED_ROWS)
        if row_stride < 1 or rows.block % row_stride:
            raise ValueError(f"row_stride: expected a divisor of block {rows.block}, got {row_stride}")
        num_rows = STACKED_ROWS // triton.next_power_of_2(group)
        span = num_rows * row_stride
        tasks: list[list[int]] = []
        measured: list[int] = []
        token_base = 0
        for segment in rows.segments:
            block_rows = segment.block_rows(rows.block)
            shift = segment.out_begin - segment.row_begin
            for task in range(block_rows.start * rows.block // span, -(-segment.row_end // span)):
                mass_row = len(measured) + task * span // rows.block - block_rows.start
                place = [task * num_rows, mass_row, segment.row_begin, segment.row_end, shift, token_base, 0, 0]
                tasks.append(place)
            for block_row in block_rows:
                begin, end = segment.rows_within(block_row, rows.block)
                measured.append(end // row_stride - begin // row_stride)
            token_base += -(-segment.row_end // rows.block) * rows.block
        tasks.sort(key=lambda task: -task[0])
        return cls(
            rows=rows,
            row_stride=row_stride,
            group=group,
            table=upload(torch.tensor(tasks, dtype=torch.int32).view(-1, 8), rows.device),
            measured=torch.tensor(measured, dtype=torch.int32),
            schedules=Schedules([task[0] * row_stride // rows.block + 1 for task in tasks], rows.device),
        )
