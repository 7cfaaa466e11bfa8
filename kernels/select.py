"""Which blocks each head attends to, on the GPU: masses through the head map, top-p and floor, to lists of columns.

One small kernel, a program for each line and head; nothing comes back to the host. The rule is `top_p.select_top_p`
with the floor of `mask.floor_mask`: the largest masses until their share reaches p, ties to the smaller column; the
threshold is found bit by bit (the bits of non-negative floats sort like the floats), not by sorting.
"""

import math

import torch
import triton
import triton.language as tl

from mapflow.kernels.block_rows import BlockIndex, BlockRows
from mapflow.kernels.map_table import MapTable
from mapflow.kernels.tensor_check import check_int, check_tensor
from mapflow.kernels.top_p import check_p

_MAPS, _MASSES, _NOTHING = 0, 1, 2


def select_blocks(
    maps: MapTable, rows: BlockRows, head_map: torch.Tensor, p: float, *, sink_blocks: int, local_blocks: int
) -> BlockIndex:
    """Guide: a receiver's blocks from a sender's maps; as `mask.guide_mask`, for the lines of `rows`.

    head_map: float32 [Hr, Hs], finite. A row whose translated masses are all 0 keeps every causal block.
    """
    shape = ("Hr", maps.num_heads)
    check_tensor("head_map", head_map, shape=shape, dtypes=(torch.float32,), device=rows.device)
    check_p(p)
    maps.check_fits(rows)
    return _select(rows, head_map.shape[0], p, sink_blocks, local_blocks, _MAPS, maps=maps, head_map=head_map)


def select_by_mass(mass: torch.Tensor, rows: BlockRows, p: float) -> BlockIndex:
    """Compressor: the blocks worth a tile, from a sender's own masses; as `top_p.select_top_p`, no floor.

    mass: float32 [num mass rows, num_heads, C], masses squared, times anything; row `slot` of it belongs to a line.
    """
    check_tensor("mass", mass, shape=("rows", "num_heads", "C"), dtypes=(torch.float32,), device=rows.device)
    check_p(p)
    if mass.shape[2] < rows.num_columns or mass.stride(2) != 1:
        raise ValueError(f"mass: expected at least {rows.num_columns} contiguous columns, got {list(mass.shape)}")
    return _select(rows, mass.shape[1], p, 0, 0, _MASSES, mass=mass)


def select_static(rows: BlockRows, num_heads: int, *, sink_blocks: int, local_blocks: int) -> BlockIndex:
    """Static: the floor alone, as `mask.static_mask`."""
    check_int("num_heads", num_heads, minimum=1)
    return _select(rows, num_heads, 0.0, sink_blocks, local_blocks, _NOTHING)


def _select(
    rows: BlockRows,
    num_heads: int,
    p: float,
    sink_blocks: int,
    local_blocks: int,
    source: int,
    *,
    maps: MapTable | None = None,
    head_map: torch.Tensor | None = None,
    mass: torch.Tensor | None = None,
) -> BlockIndex:
    check_int("sink_blocks", sink_blocks, minimum=0)
    check_int("local_blocks", local_blocks, minimum=0)
    columns = torch.empty(rows.num_lines, num_heads, rows.num_columns, dtype=torch.int32, device=rows.device)
    counts = torch.empty(rows.num_lines, num_heads, dtype=torch.int32, device=rows.device)
    width = max(16, 1 << math.ceil(math.log2(rows.num_columns)))
    _select_kernel[(num_heads, rows.num_lines)](
        None if maps is None else maps.arena,
        None if maps is None else maps.sections,
        head_map,
        mass,
        rows.lines,
        columns,
        counts,
        min(float(p), 1.0),
        0 if maps is None else maps.num_heads,
        1 if maps is None else maps.chunk_blocks,
        rows.num_columns,
        0 if mass is None else mass.stride(0),
        0 if mass is None else mass.stride(1),
        sink_blocks,
        local_blocks,
        WIDTH=width,
        ALIGNED=1 if maps is None else math.gcd(maps.chunk_blocks, 16),
        SOURCE=source,
        num_warps=1 if width <= 256 else 4,
    )
    return BlockIndex(columns=columns, counts=counts)


@triton.jit
def _keep_top_p(mass, causal, p):
    """bool [WIDTH]: the fewest columns whose masses sum to p of the total; all of them without any mass."""
    total = tl.sum(mass, 0)
    target = p * total
    bits = mass.to(tl.int32, bitcast=True)
    least = 0  # the largest threshold whose masses, it included, still reach the target: that of the last one kept
    for i in tl.static_range(31):
        candidate = least | (1 << (30 - i))
        reached = tl.sum(tl.where(bits >= candidate, mass, 0.0), 0)
        least = tl.where(reached >= target, candidate, least)
    above = bits > least
    tie = (bits == least) & (mass > 0.0)
    threshold = tl.max(tl.where(tie, mass, 0.0), 0)
    before = tl.sum(tl.where(above, mass, 0.0), 0) + (tl.cumsum(tie.to(tl.int32), 0) - 1).to(tl.float32) * threshold
    kept = above | (tie & (before < target))
    everything = (total <= 0.0) | (p >= 1.0)
    return tl.where(everything, causal, kept & (p > 0.0))


@triton.jit(
    do_not_specialize=[
        "p",
        "num_sender_heads",
        "chunk_blocks",
        "max_columns",
        "stride_mass_row",
        "stride_mass_head",
        "sink_blocks",
        "local_blocks",
    ]
)
def _select_kernel(
    arena,
    sections,
    head_map,
    mass,
    lines,
    columns,
    counts,
    p,
    num_sender_heads,
    chunk_blocks,
    max_columns,
    stride_mass_row,
    stride_mass_head,
    sink_blocks,
    local_blocks,
    WIDTH: tl.constexpr,
    ALIGNED: tl.constexpr,
    SOURCE: tl.constexpr,
):
    head = tl.program_id(0)
    line = lines + tl.program_id(1) * 8
    block_row = tl.load(line + 1)
    column = tl.arange(0, WIDTH)
    causal = column <= block_row
    floor = (column < sink_blocks) | (column > block_row - local_blocks) | (column == block_row)
    kept = floor & causal
    if SOURCE == 0:
        translated = tl.zeros([WIDTH], tl.float32)
        chunk_columns = tl.multiple_of((block_row // chunk_blocks + 1) * chunk_blocks, ALIGNED)
        section = sections + tl.load(line + 6).to(tl.int64) * num_sender_heads * 4
        row = tl.multiple_of(tl.load(line + 7) * chunk_columns, ALIGNED)
        for sender_head in tl.range(0, num_sender_heads, loop_unroll_factor=8):
            masses = arena + tl.multiple_of(tl.load(section + sender_head * 4), 64) + row
            stored = tl.load(masses + column, mask=column < chunk_columns, other=0).to(tl.float32)
            translated += tl.load(head_map + head * num_sender_heads + sender_head) * (stored * stored)
        translated = tl.where(causal, tl.maximum(translated, 0.0), 0.0)
        kept = (_keep_top_p(tl.sqrt_rn(translated), causal, p) | floor) & causal
    if SOURCE == 1:
        row = mass + tl.load(line + 6).to(tl.int64) * stride_mass_row + head.to(tl.int64) * stride_mass_head
        kept = (_keep_top_p(tl.sqrt(tl.load(row + column, mask=causal, other=0.0)), causal, p) | floor) & causal
    slot = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + head
    place = tl.cumsum(kept.to(tl.int32), 0) - 1
    tl.store(columns + slot * max_columns + place, column, mask=kept)
    tl.store(counts + slot, tl.sum(kept.to(tl.int32), 0))
