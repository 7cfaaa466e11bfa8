"""Which blocks a receiver attends to: guided by a sender's masses, or the static sink and local window.

Both add the same floor, the first `sink_blocks` block columns and the last `local_blocks` up to the diagonal. A mask
is bool [num_heads, R, C] for block rows [first_block_row, first_block_row + R) of a prompt; `guide_reference.py`
attends inside it. Nothing here reads keys or queries.
"""

from collections.abc import Sequence

import torch

from mapflow.kernels.attention_map import AttentionMap, decode_mass
from mapflow.kernels.tensor_check import check_int, check_tensor
from mapflow.kernels.top_p import causal_blocks, check_p, diagonal_blocks, select_top_p


def check_consecutive(maps: Sequence[AttentionMap]) -> None:
    """Raise ValueError unless `maps` are chunks c, c + 1, ... of one layer: same block, heads, size and device."""
    if not maps:
        raise ValueError("maps: expected at least one, got none")
    first = maps[0]
    for place, one in enumerate(maps):
        wanted = (first.chunk_index + place, first.block, first.num_heads, first.num_row_blocks, first.mass.device)
        got = (one.chunk_index, one.block, one.num_heads, one.num_row_blocks, one.mass.device)
        if got != wanted:
            names = "(chunk_index, block, num_heads, num_row_blocks, device)"
            raise ValueError(f"maps[{place}]: expected {names} {wanted}, got {got}")


def stack_masses(maps: Sequence[AttentionMap]) -> torch.Tensor:
    """The decoded masses of consecutive chunks as one float32 [num_heads, R, C], zeros above the diagonal.

    R counts the block rows of all chunks, C the block columns of the last one; row 0 is block row
    `maps[0].first_block_row` of the prompt. Block rows that were not measured are zeros, which `guide_mask` answers
    with full attention. Raises ValueError if the chunks are not consecutive.
    """
    check_consecutive(maps)
    rows, columns = maps[0].num_row_blocks, maps[-1].num_col_blocks
    mass = torch.zeros(maps[0].num_heads, rows * len(maps), columns, device=maps[0].mass.device)
    for place, one in enumerate(maps):
        mass[:, place * rows : (place + 1) * rows, : one.num_col_blocks] = decode_mass(one.mass)
    return mass


def floor_mask(
    *,
    first_block_row: int,
    num_block_rows: int,
    num_col_blocks: int,
    sink_blocks: int,
    local_blocks: int,
    device: torch.device | None = None,
) -> torch.Tensor:
    """bool [num_block_rows, num_col_blocks]: the blocks kept whatever the masses say, the diagonal among them."""
    check_int("sink_blocks", sink_blocks, minimum=0)
    check_int("local_blocks", local_blocks, minimum=0)
    causal = causal_blocks(first_block_row, num_block_rows, num_col_blocks, device)
    columns = torch.arange(num_col_blocks, device=device)
    rows = torch.arange(first_block_row, first_block_row + num_block_rows, device=device)
    kept = (columns < sink_blocks) | (columns > rows[:, None] - local_blocks)
    return (kept & causal) | diagonal_blocks(first_block_row, num_block_rows, num_col_blocks, device)


def guide_mask(
    mass: torch.Tensor,
    head_map: torch.Tensor,
    p: float,
    *,
    first_block_row: int,
    sink_blocks: int,
    local_blocks: int,
) -> torch.Tensor:
    """The blocks that each receiver head attends to.

    mass: float32 [Hs, R, C], the sender's masses (`stack_masses`). head_map: float32 [Hr, Hs]; receiver head i takes
    `sum_s head_map[i, s] * mass[s]`, negative results as 0. `p` as in `select_top_p`, a share of square roots.

    Returns bool [Hr, R, C]: the largest masses until their square roots hold the share p of the row's, and the floor.
    Shares of roots spend more blocks on rows whose mass is spread than shares of masses do, and fewer on the others,
    which is closer at equal density (docs/calibration.md). A row whose translated masses are all 0 keeps every causal
    block. Raises ValueError for wrong shapes or NaN.
    """
    check_tensor("mass", mass, shape=("Hs", "R", "C"), dtypes=(torch.float32,))
    shape = ("Hr", mass.shape[0])
    check_tensor("head_map", head_map, shape=shape, dtypes=(torch.float32,), device=mass.device)
    check_p(p)
    translated = torch.einsum("is,src->irc", head_map, mass).clamp_min_(0.0)
    if mass.device.type == "cpu" and not bool(translated.isfinite().all()):
        raise ValueError("mass or head_map: expected finite values, got NaN or infinity")
    kept = select_top_p(translated.sqrt_(), p, first_block_row=first_block_row)
    floor = floor_mask(
        first_block_row=first_block_row,
        num_block_rows=mass.shape[1],
        num_col_blocks=mass.shape[2],
        sink_blocks=sink_blocks,
        local_blocks=local_blocks,
        device=mass.device,
    )
    return kept.logical_or_(floor)


def static_mask(
    *,
    num_heads: int,
    first_block_row: int,
    num_block_rows: int,
    num_col_blocks: int | None = None,
    sink_blocks: int,
    local_blocks: int,
    device: torch.device | None = None,
) -> torch.Tensor:
    """The floor alone, the same for every head: a read-only bool view [num_heads, num_block_rows, num_col_blocks].

    `num_col_blocks`: default the fewest, `first_block_row + num_block_rows`.
    """
    check_int("num_heads", num_heads, minimum=1)
    floor = floor_mask(
        first_block_row=first_block_row,
        num_block_rows=num_block_rows,
        num_col_blocks=first_block_row + num_block_rows if num_col_blocks is None else num_col_blocks,
        sink_blocks=sink_blocks,
        local_blocks=local_blocks,
        device=device,
    )
    return floor.expand(num_heads, -1, -1)


def mask_density(mask: torch.Tensor, *, first_block_row: int) -> float:
    """Kept causal blocks / causal blocks of a mask bool [num_heads, R, C]; 1.0 means full attention."""
    check_tensor("mask", mask, shape=("num_heads", "R", "C"), dtypes=(torch.bool,))
    causal = causal_blocks(first_block_row, mask.shape[1], mask.shape[2], mask.device)
    return int((mask & causal).sum()) / max(int(causal.sum()) * mask.shape[0], 1)
