"""A batch of row segments as the table that the Triton kernels walk: one line for each block row that is touched.

Built once a step on the host and used by every layer, so that no kernel call syncs or counts anything. Its lines are
ordered by falling cost, long rows first, which keeps the last wave of programs short.

    line (i32)   0 request     line of `block_tables`
                 1 block_row   of the prompt
                 2 row_begin   first and
                 3 row_end     last token row of the segment, exclusive; the line's rows are those inside its block row
                 4 shift       row of the batch = token row + shift
                 5 token_base  where the request's tokens start among the packed tokens (`pack.py`)
                 6 slot        what the kernel at hand looks up by it: the chunk in a `MapTable`, or the row of a mass
                 7 own_row     block row within its chunk
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from mapflow.kernels.row_segment import RowSegment, check_segments
from mapflow.kernels.schedule import Schedules
from mapflow.kernels.tensor_check import check_int, check_tensor
from mapflow.kernels.upload import upload

KERNEL_BLOCKS = (64, 128)
_FIELDS = 8


def check_kernel_block(block: int) -> None:
    """Raise ValueError unless the Triton kernels know this block size."""
    if block not in KERNEL_BLOCKS:
        raise ValueError(f"block: expected 64 or 128 on an accelerator, got {block}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkSpan:
    """Which chunks of a segment's request a `MapTable` holds: slots [slot, slot + num_chunks) are theirs, in order."""

    first_chunk: int
    num_chunks: int
    slot: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlockRows:
    """The segments of a step, as tables on the device.

    Attributes:
        block: tokens along one side of a block.
        lines: i32 [W, 8], see above.
        block_tables: i32 [num segments, most pages], padded with 0.
        packed_blocks: i32 [num packed blocks, 4]: request, first token, end of its tokens, 0.
        max_block_row: the largest block row among them.
        num_batch_rows: rows of the batch's query and out.
        schedules: of these lines, for persistent kernels.
    """

    block: int
    lines: torch.Tensor
    block_tables: torch.Tensor
    packed_blocks: torch.Tensor
    max_block_row: int
    num_batch_rows: int
    segments: tuple[RowSegment, ...]
    schedules: Schedules

    @classmethod
    def from_segments(
        cls,
        segments: Sequence[RowSegment],
        *,
        block: int,
        num_batch_rows: int,
        device: torch.device,
        chunk_blocks: int = 1,
        spans: Sequence[ChunkSpan] | None = None,
    ) -> "BlockRows":
        """Build the tables. `spans` (one a segment) and `chunk_blocks` (block rows of a chunk): where maps are read.

        Raises ValueError for no segments, overlapping ones, another block than 64 or 128, or rows outside their span.
        """
        check_kernel_block(block)
        check_int("chunk_blocks", chunk_blocks, minimum=1)
        if not segments:
            raise ValueError("segments: expected at least one, got none")
        check_segments(segments, num_batch_rows)
        if spans is not None and len(spans) != len(segments):
            raise ValueError(f"spans: expected one for each of {len(segments)} segments, got {len(spans)}")
        lines: list[list[int]] = []
        packed: list[list[int]] = []
        mass_row = 0
        for request, segment in enumerate(segments):
            shift, token_base = segment.out_begin - segment.row_begin, len(packed) * block
            packed += [[request, token, segment.row_end, 0] for token in range(0, segment.row_end, block)]
            for block_row in segment.block_rows(block):
                slot, own_row = mass_row, block_row
                if spans is not None:
                    slot, own_row = _chunk_slot(spans[request], block_row, chunk_blocks, segment)
                lines.append([request, block_row, segment.row_begin, segment.row_end, shift, token_base, slot, own_row])
                mass_row += 1
        lines.sort(key=lambda line: -line[1])
        widest = max(segment.block_table.shape[0] for segment in segments)
        tables = torch.zeros(len(segments), widest, dtype=torch.int32, device=device)
        for request, segment in enumerate(segments):
            tables[request, : segment.block_table.shape[0]] = segment.block_table
        return cls(
            block=block,
            lines=upload(torch.tensor(lines, dtype=torch.int32).view(-1, _FIELDS), device),
            block_tables=tables,
            packed_blocks=upload(torch.tensor(packed, dtype=torch.int32).view(-1, 4), device),
            max_block_row=lines[0][1],
            num_batch_rows=num_batch_rows,
            segments=tuple(segments),
            schedules=Schedules([line[1] + 1 for line in lines], device),
        )

    def window(self, begin: int, end: int) -> "BlockRows":
        """Lines [begin, end) alone; for grids, not for persistent kernels."""
        return replace(self, lines=self.lines[begin:end], schedules=Schedules([], self.device))

    @property
    def num_lines(self) -> int:
        """Block rows touched (W)."""
        return self.lines.shape[0]

    @property
    def num_packed_tokens(self) -> int:
        """Tokens of all requests, each rounded up to whole blocks."""
        return self.packed_blocks.shape[0] * self.block

    @property
    def device(self) -> torch.device:
        """Where the tables lie."""
        return self.lines.device

    @property
    def num_columns(self) -> int:
        """Block columns that the longest row reaches."""
        return self.max_block_row + 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlockIndex:
    """The kept blocks of each line and head: `columns[w, h, :counts[w, h]]`, ascending, the diagonal block last.

    What lies behind the count is undefined. Made by `select.py`.
    """

    columns: torch.Tensor  # i32 [W, num_heads, num_columns]
    counts: torch.Tensor  # i32 [W, num_heads], at least 1

    def __post_init__(self) -> None:
        check_tensor("columns", self.columns, shape=("W", "num_heads", "num_columns"), dtypes=(torch.int32,))
        shape = self.columns.shape[:2]
        check_tensor("counts", self.counts, shape=shape, dtypes=(torch.int32,), device=self.columns.device)

    def check_fits(self, rows: BlockRows, num_heads: int) -> None:
        """Raise ValueError unless the index was made for these rows and heads."""
        wanted = (rows.num_lines, num_heads, rows.num_columns)
        if tuple(self.columns.shape) != wanted or self.columns.device != rows.device:
            raise ValueError(f"index: expected columns {list(wanted)}, got {list(self.columns.shape)}")


def _chunk_slot(span: ChunkSpan, block_row: int, chunk_blocks: int, segment: RowSegment) -> tuple[int, int]:
    chunk, own_row = divmod(block_row, chunk_blocks)
    if not span.first_chunk <= chunk < span.first_chunk + span.num_chunks:
        wanted = f"[{segment.row_begin}, {segment.row_end})"
        got = f"chunks {span.first_chunk} to {span.first_chunk + span.num_chunks - 1}"
        raise ValueError(f"maps: expected chunks that cover rows {wanted}, got {got} of {chunk_blocks} block rows")
    return span.slot + chunk - span.first_chunk, own_row
