"""The head sections of blobs, laid out on a GPU where a sender measured them: one copy then moves a whole chunk's map.

What a step measured of a chunk becomes all head sections of that chunk's blob, one behind the other, as
`blob_layout.py` describes them; block rows that the step did not measure are empty in it. Everything but the values of
the tiles is written here; they are `tiles.store_tiles`'s, at the offsets that this returns. Nothing comes back to the
host: where sections end is written beside them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from mapflow.kernels.blob_layout import TILES_E4M3_256, TILES_NONE, Header, HeadLayout
from mapflow.kernels.block_rows import BlockIndex
from mapflow.kernels.tensor_check import check_tensor
from mapflow.kernels.upload import upload


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRows:
    """Block rows [row, row + num_rows) of chunk `chunk_index`, at mass rows from `slot` on."""

    chunk_index: int
    row: int
    num_rows: int
    slot: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SectionTable:
    """A step's chunks, as tables on the device; the same ones in all layers.

    Attributes:
        parts: i32 [num parts, 4]: chunk_index, row, num_rows, slot.
        line_of_slot: i32 [mass rows], of the step's `BlockRows`.
        fixed_ends: i64 [num parts, num_heads], where sections without tiles end.
        fixed_bytes: bytes of all those.
        chunk_rows: block rows of a chunk (R).
        tiled: whether tiles are stored.
    """

    parts: torch.Tensor
    line_of_slot: torch.Tensor
    fixed_ends: torch.Tensor
    fixed_bytes: int
    chunk_rows: int
    tiled: bool

    @classmethod
    def build(
        cls,
        parts: Sequence[MeasuredRows],
        slot_of_line: torch.Tensor,
        *,
        num_heads: int,
        chunk_rows: int,
        tiled: bool,
    ) -> "SectionTable":
        """slot_of_line: i32 [W], on the device: the mass row of each line; every one is in one of the parts."""
        table = torch.tensor([(one.chunk_index, one.row, one.num_rows, one.slot) for one in parts], dtype=torch.int32)
        fixed = [_empty_section_bytes(one.chunk_index, num_heads, chunk_rows, tiled) for one in parts]
        ends = torch.tensor(fixed).repeat_interleave(num_heads).cumsum(0)
        device = slot_of_line.device
        return cls(
            parts=upload(table, device),
            line_of_slot=slot_of_line.argsort().int(),
            fixed_ends=upload(ends.view(-1, num_heads), device),
            fixed_bytes=int(ends[-1]),
            chunk_rows=chunk_rows,
            tiled=tiled,
        )

    @property
    def num_parts(self) -> int:
        """Chunks that the step measured rows of, each of them once a request."""
        return self.parts.shape[0]


def _empty_section_bytes(chunk_index: int, num_heads: int, chunk_rows: int, tiled: bool) -> int:
    """Of a head without tiles, where others of the blob have some if `tiled`."""
    header = Header(
        tile_dtype=TILES_E4M3_256 if tiled else TILES_NONE,  # any that has tiles
        flags=0,
        block=0,
        num_heads=num_heads,
        num_row_blocks=chunk_rows,
        num_col_blocks=(chunk_index + 1) * chunk_rows,
        chunk_index=chunk_index,
    )
    return HeadLayout(header, 0).num_bytes


def lay_out_sections(
    table: SectionTable,
    mass: torch.Tensor,
    factors: torch.Tensor,
    index: BlockIndex | None,
    *,
    tile_bytes: int,
    finite: torch.Tensor,
    ends: torch.Tensor,
    arena: torch.Tensor,
) -> torch.Tensor:
    """Write the sections of all parts and heads into `arena`, gaps and empty rows as zeros.

    Args:
        table: the step's chunks.
        mass: float32 [mass rows, num_heads, C], sums of squared block probabilities.
        factors: float32 [num_heads]: what makes means of them; 0 for heads that nobody wants, whose tiles are left out.
        index: of the kept blocks, by line; None unless `table.tiled`.
        tile_bytes: of one tile, a multiple of 64.
        finite: u8 [mass rows], written: whether all masses of the row are finite. What other rows have is undefined.
        ends: i64 [num parts, num_heads], written: where in `arena` each section ends; it begins at the end before it,
            the first one at 0. A part whose last end lies behind the arena is left out, as are all behind it.
        arena: u8 [bytes].

    Returns:
        i64 [W, num_heads], for `tiles.store_tiles`: where a line's tiles go, -1 for none. Without an index: empty.

    Raises ValueError for wrong shapes or dtypes.
    """
    num_heads, num_rows = mass.shape[1], table.line_of_slot.shape[0]
    check_tensor("mass", mass, shape=(num_rows, num_heads, "C"), dtypes=(torch.float32,), device=arena.device)
    check_tensor("factors", factors, shape=(num_heads,), dtypes=(torch.float32,), device=arena.device)
    check_tensor("finite", finite, shape=(num_rows,), dtypes=(torch.uint8,), device=arena.device)
    check_tensor("ends", ends, shape=table.fixed_ends.shape, dtypes=(torch.int64,), device=arena.device)
    if (index is not None) != table.tiled or tile_bytes % 64:
        raise ValueError(f"index, tile_bytes: do not fit a table with tiled={table.tiled}, got {tile_bytes} bytes")
    finite.fill_(1)
    counts, columns = (table.parts, table.parts) if index is None else (index.counts, index.columns)
    if index is None:
        ends.copy_(table.fixed_ends)
    else:
        sizes = torch.empty_like(table.fixed_ends)
        _sizes_kernel[(table.num_parts,)](
            table.parts,
            table.line_of_slot,
            counts,
            factors,
            sizes,
            num_heads,
            tile_bytes,
            CHUNK_ROWS=table.chunk_rows,
            HEADS=triton.next_power_of_2(num_heads),
        )
        torch.cumsum(sizes.view(-1), 0, out=ends.view(-1))
    offsets = torch.empty(counts.shape if table.tiled else (0, num_heads), dtype=torch.int64, device=arena.device)
    _sections_kernel[(table.num_parts, num_heads)](
        table.parts,
        table.line_of_slot,
        mass.contiguous(),
        factors,
        counts,
        columns,
        finite,
        ends,
        offsets,
        arena,
        arena.view(torch.int32),
        arena.shape[0],
        mass.shape[2],
        columns.shape[-1],
        tile_bytes,
        CHUNK_ROWS=table.chunk_rows,
        ROWS=triton.next_power_of_2(table.chunk_rows),
        TILED=table.tiled,
    )
    return offsets


@triton.jit
def _fixed_bytes(chunk, CHUNK_ROWS: tl.constexpr):
    """Of masses and indptr."""
    indptr = (CHUNK_ROWS * CHUNK_ROWS * (chunk + 1) + 63) // 64 * 64
    return indptr, (indptr + 4 * (CHUNK_ROWS + 1) + 63) // 64 * 64


@triton.jit
def _sizes_kernel(
    parts,
    line_of_slot,
    counts,
    factors,
    sizes,
    num_heads,
    tile_bytes,
    CHUNK_ROWS: tl.constexpr,
    HEADS: tl.constexpr,
):
    part = tl.program_id(0)
    head = tl.arange(0, HEADS)
    inside = head < num_heads
    num_rows, slot = tl.load(parts + part * 4 + 2), tl.load(parts + part * 4 + 3)
    num_tiles = tl.zeros([HEADS], tl.int32)
    for row in range(num_rows):
        line = tl.load(line_of_slot + slot + row)
        num_tiles += tl.load(counts + line * num_heads + head, mask=inside, other=0)
    num_tiles = tl.where(tl.load(factors + head, mask=inside, other=0.0) > 0, num_tiles, 0).to(tl.int64)
    indptr, fixed = _fixed_bytes(tl.load(parts + part * 4), CHUNK_ROWS)
    size = fixed + (4 * num_tiles + 63) // 64 * 64 + num_tiles * tile_bytes
    tl.store(sizes + part * num_heads + head, size, mask=inside)


@triton.jit(do_not_specialize=["num_bytes", "mass_columns", "index_columns"])
def _sections_kernel(
    parts,
    line_of_slot,
    mass,
    factors,
    counts,
    columns,
    finite,
    ends,
    offsets,
    arena,
    words,
    num_bytes,
    mass_columns,
    index_columns,
    tile_bytes,
    CHUNK_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    TILED: tl.constexpr,
):
    at_part, head, num_heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    chunk, first = tl.load(parts + at_part * 4), tl.load(parts + at_part * 4 + 1)
    num_rows, slot = tl.load(parts + at_part * 4 + 2), tl.load(parts + at_part * 4 + 3)
    number = at_part * num_heads + head
    begin = tl.load(ends + number - 1, mask=number > 0, other=0)
    fits = tl.load(ends + at_part * num_heads + num_heads - 1) <= num_bytes
    num_columns = (chunk + 1) * CHUNK_ROWS
    mass_end = CHUNK_ROWS * num_columns
    indptr, indices = _fixed_bytes(chunk, CHUNK_ROWS)
    factor = tl.load(factors + head)
    wide = tl.arange(0, 128)
    if fits:
        for row in range(CHUNK_ROWS):
            own_columns = tl.where((row >= first) & (row < first + num_rows), tl.minimum(num_columns, mass_columns), 0)
            sums = mass + ((slot + row - first).to(tl.int64) * num_heads + head) * mass_columns
            odd = tl.zeros([128], tl.int32)
            for c in range(0, num_columns, 128):
                value = tl.load(sums + c + wide, mask=c + wide < own_columns, other=0.0)
                odd += (value - value != 0).to(tl.int32)
                code = tl.sqrt(tl.sqrt(tl.minimum(value * factor, 1.0))) * 255.0 + 0.5
                place = arena + begin + row * num_columns + c + wide
                tl.store(place, code.to(tl.int32).to(tl.uint8), mask=c + wide < num_columns)
            tl.store(finite + slot + row - first, tl.zeros([], tl.uint8), mask=tl.sum(odd, 0) > 0)
        lane = tl.arange(0, 64)
        tl.store(arena + begin + mass_end + lane, tl.zeros([64], tl.uint8), mask=mass_end + lane < indptr)
    if TILED:
        row = tl.arange(0, ROWS)
        is_own = (row >= first) & (row < first + num_rows)
        line = tl.load(line_of_slot + slot + row - first, mask=is_own, other=0).to(tl.int64)
        kept = tl.load(counts + line * num_heads + head, mask=is_own, other=0)
        kept = tl.where(factor > 0, kept, 0)
        before = tl.cumsum(kept, 0) - kept
        num_tiles = tl.sum(kept, 0)
        tiles = indices + (4 * num_tiles + 63) // 64 * 64
        place = begin + tiles + before.to(tl.int64) * tile_bytes
        tl.store(offsets + line * num_heads + head, tl.where(fits & (kept > 0), place, -1), mask=is_own)
        if fits:
            at = words + begin // 4
            tl.store(at + indptr // 4 + row, before, mask=row < CHUNK_ROWS)
            pad = indptr // 4 + CHUNK_ROWS + tl.arange(0, 32)
            tl.store(at + pad, tl.where(tl.arange(0, 32) == 0, num_tiles, 0), mask=pad < indices // 4)
            pad = indices // 4 + num_tiles + tl.arange(0, 16)
            tl.store(at + pad, tl.zeros([16], tl.int32), mask=pad < tiles // 4)
            written = indices // 4
            for own in range(tl.where(factor > 0, num_rows, 0)):
                source = tl.load(line_of_slot + slot + own).to(tl.int64) * num_heads + head
                count = tl.load(counts + source)
                for c in range(0, count, 128):
                    column = tl.load(columns + source * index_columns + c + wide, mask=c + wide < count)
                    tl.store(at + written + c + wide, column, mask=c + wide < count)
                written += count
