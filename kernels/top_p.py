"""Which blocks of a block row are worth attending to: the fewest that hold a share `p` of its mass.

Sender and receiver use the same rule; the floor that a receiver adds is in `mask.py`.
"""

import math

import torch

from mapflow.kernels.tensor_check import check_int, check_tensor


def check_p(p: float) -> None:
    """Raise ValueError unless `p` is a finite number of at least 0 (1 or more keeps every causal block)."""
    if not math.isfinite(p) or p < 0:
        raise ValueError(f"p: expected a finite number of at least 0, got {p}")


def causal_blocks(
    first_block_row: int, num_block_rows: int, num_col_blocks: int, device: torch.device | None = None
) -> torch.Tensor:
    """bool [num_block_rows, num_col_blocks]: block columns at or before each block row, the diagonal included."""
    check_int("first_block_row", first_block_row, minimum=0)
    rows = torch.arange(first_block_row, first_block_row + num_block_rows, device=device)
    return torch.arange(num_col_blocks, device=device) <= rows[:, None]


def diagonal_blocks(
    first_block_row: int, num_block_rows: int, num_col_blocks: int, device: torch.device | None = None
) -> torch.Tensor:
    """bool [num_block_rows, num_col_blocks]: the block that holds each row's own token."""
    rows = torch.arange(first_block_row, first_block_row + num_block_rows, device=device)
    return torch.arange(num_col_blocks, device=device) == rows[:, None]


def select_top_p(mass: torch.Tensor, p: float, *, first_block_row: int) -> torch.Tensor:
    """Keep the largest masses of each block row until their share reaches `p`.

    mass: float32 [num_heads, R, C], not negative, not NaN; need not sum to 1; what lies above the diagonal is ignored.
    `first_block_row`: block row of the prompt that row 0 is.

    Returns bool [num_heads, R, C]: masses sorted in descending order (ties: smaller column first), kept while the sum
    before them is less than `p`; the diagonal block always; every causal block if `p` >= 1. A row without any mass
    keeps every causal block: nothing is known about it.
    """
    check_tensor("mass", mass, shape=("num_heads", "R", "C"), dtypes=(torch.float32,))
    check_p(p)
    _, rows, columns = mass.shape
    causal = causal_blocks(first_block_row, rows, columns, mass.device)
    if p >= 1:
        return causal.expand_as(mass).clone()
    share = mass.masked_fill(~causal, 0.0)
    share = share / share.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    ordered, order = share.sort(dim=-1, descending=True, stable=True)
    keep = torch.zeros_like(causal.expand_as(mass)).scatter(-1, order, ordered.cumsum(-1) - ordered < p)
    return (keep & causal) | diagonal_blocks(first_block_row, rows, columns, mass.device)
