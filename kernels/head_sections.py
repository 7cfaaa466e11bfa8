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

from mapflow.kernels.blob_layout import align
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
        slot_of_line: i64 [W], the mass row of each line of the step's `BlockRows`.
        line_of_slot: i32 [mass rows].
        part_of_line: i64 [W].
        fixed_bytes: i64 [num parts, 1], of a section without tiles: masses and, where tiles are stored, indptr.
        fixed_sum: of all parts.
        chunk_rows: block rows of a chunk (R).
        tiled: whether tiles are stored.
    """

    parts: torch.Tensor
    slot_of_line: torch.Tensor
    line_of_slot: torch.Tensor
    part_of_line: torch.Tensor
    fixed_bytes: torch.Tensor
    fixed_sum: int
    chunk_rows: int
    tiled: bool

    @classmethod
    def build(
        cls, parts: Sequence[MeasuredRows], slot_of_line: torch.Tensor, *, chunk_rows: int, tiled: bool
    ) -> "SectionTable":
        """Every mass row is in one of the parts, and has one line. slot_of_line: [W], on the device."""
        table = torch.tensor([(one.chunk_index, one.row, one.num_rows, one.slot) for one in parts], dtype=torch.int32)
        sizes = [align(chunk_rows * chunk_rows * (one.chunk_index + 1)) for one in parts]
        fixed = [align(size + 4 * (chunk_rows + 1)) if tiled else size for size in sizes]
        owners = torch.empty(slot_of_line.shape[0], dtype=torch.int64)
        for number, one in enumerate(parts):
            owners[one.slot : one.slot + one.num_rows] = number
        device = slot_of_line.device
        return cls(
            parts=upload(table, device),
            slot_of_line=slot_of_line.long(),
            line_of_slot=slot_of_line.argsort().int(),
            part_of_line=upload(owners, device)[slot_of_line.long()],
            fixed_bytes=upload(torch.tensor(fixed)[:, None], device),
            fixed_sum=sum(fixed),
            chunk_rows=chunk_rows,
            tiled=tiled,
        )

    @property
    def num_parts(self) -> int:
        """Chunks that the step measured rows of, each of them once a request."""
        return self.parts.shape[0]


def lay_out_sections(
    table: SectionTable,
    mass: torch.Tensor,
    is_measured: torch.Tensor,
    index: BlockIndex | None,
    is_wanted: torch.Tensor,
    *,
    tile_bytes: int,
    ends: torch.Tensor,
    arena: torch.Tensor,
) -> torch.Tensor:
    """Write the sections of all parts and heads into `arena`, gaps and empty rows as zeros.

    Args:
        table: the step's chunks.
        mass: u8 [mass rows, num_heads, C], as `attention_map.encode_mass` encodes means.
        is_measured: u8 [mass rows], 1 or 0; those of 0 are left empty.
        index: of the kept blocks, by line; None unless `table.tiled`.
        is_wanted: bool [num_heads]: whose tiles are.
        tile_bytes: of one tile, a multiple of 64.
        ends: i64 [num parts, num_heads], written: where in `arena` each section ends; it begins at the end before it,
            the first one at 0. A part whose last end lies behind the arena is left out, as are all behind it.
        arena: u8 [bytes].

    Returns:
        i64 [W, num_heads], for `tiles.store_tiles`: where a line's tiles go, -1 for none. Without an index: empty.

    Raises ValueError for wrong shapes or dtypes.
    """
    num_heads = mass.shape[1]
    num_rows = table.line_of_slot.shape[0]
    check_tensor("mass", mass, shape=(num_rows, num_heads, "C"), dtypes=(torch.uint8,), device=arena.device)
    check_tensor("is_measured", is_measured, shape=(num_rows,), dtypes=(torch.uint8,), device=arena.device)
    shape = (table.num_parts, num_heads)
    check_tensor("ends", ends, shape=shape, dtypes=(torch.int64,), device=arena.device)
    if (index is not None) != table.tiled or tile_bytes % 64:
        raise ValueError(f"index, tile_bytes: do not fit a table with tiled={table.tiled}, got {tile_bytes} bytes")
    sizes = table.fixed_bytes.expand(table.num_parts, num_heads)
    columns = counts = table.parts
    if index is not None:
        counts = index.counts * (is_measured[table.slot_of_line][:, None] * is_wanted)
        columns = index.columns
        num_tiles = torch.zeros(sizes.shape, dtype=torch.int64, device=arena.device)
        num_tiles.index_add_(0, table.part_of_line, counts.long())
        sizes = sizes + (4 * num_tiles + 63) // 64 * 64 + num_tiles * tile_bytes
    torch.cumsum(sizes.flatten(), 0, out=ends.view(-1))
    offsets = torch.empty(counts.shape if table.tiled else (0, num_heads), dtype=torch.int64, device=arena.device)
    _sections_kernel[(table.num_parts, num_heads)](
        table.parts,
        table.line_of_slot,
        mass.contiguous(),
        is_measured,
        counts,
        columns,
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
        num_warps=4,
    )
    return offsets


@triton.jit(do_not_specialize=["num_bytes", "mass_columns", "index_columns"])
def _sections_kernel(
    parts,
    line_of_slot,
    mass,
    is_measured,
    counts,
    columns,
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
    lane, wide = tl.arange(0, 64), tl.arange(0, 128)
    if fits:
        for row in range(CHUNK_ROWS):
            is_own = (row >= first) & (row < first + num_rows)
            known = tl.load(is_measured + slot + row - first, mask=is_own, other=0).to(tl.int32)
            known *= tl.minimum(num_columns, mass_columns)
            values = mass + ((slot + row - first).to(tl.int64) * num_heads + head) * mass_columns
            for c in range(0, num_columns, 128):
                inside = c + wide < num_columns
                value = tl.load(values + c + wide, mask=c + wide < known, other=0)
                tl.store(arena + begin + row * num_columns + c + wide, value, mask=inside)
        indptr = (mass_end + 63) // 64 * 64
        tl.store(arena + begin + mass_end + lane, tl.zeros([64], tl.uint8), mask=mass_end + lane < indptr)
    if TILED:
        row = tl.arange(0, ROWS)
        is_own = (row >= first) & (row < first + num_rows)
        line = tl.load(line_of_slot + slot + row - first, mask=is_own, other=0).to(tl.int64)
        kept = tl.load(counts + line * num_heads + head, mask=is_own, other=0)
        before = tl.cumsum(kept, 0) - kept
        num_tiles = tl.sum(kept, 0)
        indptr = (mass_end + 63) // 64 * 64
        indices = (indptr + 4 * (CHUNK_ROWS + 1) + 63) // 64 * 64
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
            for own in range(num_rows):
                source = tl.load(line_of_slot + slot + own).to(tl.int64) * num_heads + head
                count = tl.load(counts + source)
                for c in range(0, count, 128):
                    inside = c + wide < count
                    value = tl.load(columns + source * index_columns + c + wide, mask=inside)
                    tl.store(at + written + c + wide, value, mask=inside)
                written += count
