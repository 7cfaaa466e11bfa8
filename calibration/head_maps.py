"""Solves normal equations for head maps: how sender heads combine into receiver heads.

Batched over any leading dimensions, in float64. It knows no layers and no models.
"""

from __future__ import annotations

import torch

RIDGE = 1e-6
_DEPENDENT = 1e-9


def solve_dense(gram: torch.Tensor, moment: torch.Tensor) -> torch.Tensor:
    """Least squares over every sender head, with a ridge of `RIDGE` times the mean feature energy.

    Args:
        gram: f64 [..., S, S].
        moment: f64 [..., S].

    Returns:
        f64 [..., S] weights; zero where the gram matrix is.
    """
    size = gram.shape[-1]
    energy = gram.diagonal(dim1=-2, dim2=-1).mean(-1)  # [...]
    ridge = torch.where(energy > 0, RIDGE * energy, torch.ones_like(energy))
    eye = torch.eye(size, dtype=gram.dtype, device=gram.device)
    weight: torch.Tensor = torch.linalg.solve(gram + ridge[..., None, None] * eye, moment)
    return weight


def solve_sparse(gram: torch.Tensor, moment: torch.Tensor, num_heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Greedy least squares over `num_heads` sender heads (orthogonal least squares).

    Each step takes the head that lowers the error most given those already taken; the weights of all taken heads are
    then solved together. Heads that depend linearly on taken ones are taken last.

    Args:
        gram: f64 [..., S, S].
        moment: f64 [..., S].
        num_heads: heads to take (k), in [1, S].

    Returns:
        i64 [..., k] heads, ascending, and f64 [..., k] their weights.
    """
    size = gram.shape[-1]
    if not 1 <= num_heads <= size:
        raise ValueError(f"num_heads must be in [1, {size}], got {num_heads}")
    own = gram.diagonal(dim1=-2, dim2=-1)
    rest, target = gram.clone(), moment.clone()  # what is left of both once the taken heads are projected out
    free = torch.ones_like(moment, dtype=torch.bool)
    picks: list[torch.Tensor] = []
    for _ in range(num_heads):
        energy = rest.diagonal(dim1=-2, dim2=-1)
        independent = energy > _DEPENDENT * own
        gain = torch.where(independent, target.square() / energy.clamp_min(torch.finfo(energy.dtype).tiny), 0.0)
        pick = gain.masked_fill(~free, -1.0).argmax(-1, keepdim=True)  # [..., 1]
        picks.append(pick)
        free = free.scatter(-1, pick, False)
        column = rest.gather(-1, pick[..., None, :].expand(*rest.shape[:-1], 1))[..., 0]  # [..., S]
        usable = independent.gather(-1, pick)
        pivot = torch.where(usable, energy.gather(-1, pick), 1.0)
        scaled = torch.where(usable, column / pivot, 0.0)
        target = target - scaled * target.gather(-1, pick)
        rest = rest - scaled[..., :, None] * column[..., None, :]
    index = torch.cat(picks, -1).sort(-1).values
    rows = gram.gather(-2, index[..., :, None].expand(*index.shape, size))
    taken = rows.gather(-1, index[..., None, :].expand(*index.shape, num_heads))  # [..., k, k]
    return index, solve_dense(taken, moment.gather(-1, index))


def expand(index: torch.Tensor, weight: torch.Tensor, size: int) -> torch.Tensor:
    """Sparse weights as dense ones: [..., k] heads and weights -> f64 [..., size]."""
    return torch.zeros(*index.shape[:-1], size, dtype=weight.dtype).scatter(-1, index, weight)


def residual(gram: torch.Tensor, moment: torch.Tensor, energy: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Squared error that a head map leaves: f64 [...], at least zero.

    Args:
        gram: f64 [..., S, S].
        moment: f64 [..., S].
        energy: f64 [...].
        weight: f64 [..., S].
    """
    quadratic = torch.einsum("...l,...lm,...m->...", weight, gram, weight)
    return (energy - 2.0 * (weight * moment).sum(-1) + quadratic).clamp_min(0.0)
