"""A run of consecutive token rows of one request inside a packed batch: what guide and translate work on.

A step packs several requests; each contributes rows [row_begin, row_end) of its prompt, wherever chunked prefill cut
them, also in the middle of a block. Rows of the batch that no segment names are left alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mapflow.kernels.tensor_check import check_int, check_tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowSegment:
    """Token rows [row_begin, row_end) of a prompt, at rows [out_begin, out_begin + num_rows) of the batch."""

    row_begin: int
    row_end: int
    out_begin: int
    block_table: torch.Tensor  # i32 or i64 [pages], the request's own, see PagedKV.gather

    def __post_init__(self) -> None:
        check_int("row_begin", self.row_begin, minimum=0)
        check_int("row_end", self.row_end, minimum=self.row_begin + 1)
        check_int("out_begin", self.out_begin, minimum=0)
        check_tensor("block_table", self.block_table, shape=("pages",), dtypes=(torch.int32, torch.int64))

    @property
    def num_rows(self) -> int:
        """Token rows in the segment, at least 1."""
        return self.row_end - self.row_begin

    @property
    def batch_rows(self) -> slice:
        """The segment's rows of query and out."""
        return slice(self.out_begin, self.out_begin + self.num_rows)

    def block_rows(self, block: int) -> range:
        """Block rows of the prompt that the segment touches, the cut ones included."""
        return range(self.row_begin // block, -(-self.row_end // block))

    def rows_within(self, block_row: int, block: int) -> tuple[int, int]:
        """Token rows [begin, end) of the prompt that the segment has in `block_row`."""
        return max(self.row_begin, block_row * block), min(self.row_end, (block_row + 1) * block)


def check_segments(segments: Sequence[RowSegment], num_rows: int) -> None:
    """Raise ValueError unless every segment fits into a batch of `num_rows` and no two overlap."""
    end = 0
    for segment in sorted(segments, key=lambda one: one.out_begin):
        if segment.out_begin < end:
            raise ValueError(f"segments: expected no overlap, got two that hold row {segment.out_begin} of the batch")
        end = segment.out_begin + segment.num_rows
    if end > num_rows:
        raise ValueError(f"segments: expected rows within the batch's {num_rows}, got one that ends at {end}")
