"""What share of blocks a mask keeps in a longer prompt than the text that it was measured on.

Rows that see more blocks keep more, but fewer than in proportion: a window keeps as many in every row. Over the first n
block rows the kept blocks are taken to be c * n**g, with the g that leads from the first half of the rows to all.
"""

from __future__ import annotations

import math

import torch

_ROWS = 8  # below these, halves say nothing


def growth(mask: torch.Tensor) -> float:
    """The exponent g, in [1, 2], of a mask, bool [num_heads, num_blocks, num_blocks]; 2 where the share stays."""
    rows = mask.shape[1]
    if rows < _ROWS:
        return 2.0
    half = rows // 2
    kept, first = int(mask.tril().sum()), int(mask[:, :half, :half].tril().sum())
    if not first:
        return 2.0
    return min(2.0, max(1.0, math.log(kept / first) / math.log(rows / half)))


def density_at(density: float, exponent: float, num_blocks: int, wanted_blocks: int) -> float:
    """Of `wanted_blocks` block rows, given the density of the first `num_blocks`; at least one block a row."""
    kept: float = density * causal(num_blocks) * (wanted_blocks / num_blocks) ** exponent
    return min(1.0, max(kept, wanted_blocks) / causal(wanted_blocks))


def causal(num_blocks: int) -> int:
    """Causal blocks of so many block rows."""
    return num_blocks * (num_blocks + 1) // 2
