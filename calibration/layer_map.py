"""Chooses which sender layer each receiver layer reuses: the one whose best head map leaves the least error.

Receiver layers choose independently of each other; the map need not be monotone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mapflow.calibration.head_maps import expand, residual, solve_dense, solve_sparse
from mapflow.calibration.normal_equations import NormalEquations


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerFit:
    """The best that one receiver layer can do.

    Attributes:
        sender_layer: the sender layer chosen.
        error: relative L2 error of the layer's attention output: sqrt(squared error / squared output), over all heads.
        head_errors: the same for each receiver head, f64 [receiver heads].
        candidate_errors: the layer's error had each candidate been chosen, f64 [nS].
        index: i32 [receiver heads, k], sender heads combined.
        weight: f32 [receiver heads, k], their weights.
    """

    sender_layer: int
    error: float
    head_errors: torch.Tensor
    candidate_errors: torch.Tensor
    index: torch.Tensor
    weight: torch.Tensor


def fit_layers(equations: NormalEquations, *, heads_per_head: int | None) -> dict[int, LayerFit]:
    """Fit every receiver layer of the equations.

    Args:
        equations: sums over the calibration text.
        heads_per_head: sender heads combined into each receiver head (k); None or more than there are: all.

    Returns:
        receiver layer -> its fit.
    """
    return {
        layer: _fit(equations, position, heads_per_head) for position, layer in enumerate(equations.receiver_layers)
    }


def _fit(equations: NormalEquations, position: int, heads_per_head: int | None) -> LayerFit:
    gram, moment = equations.head_gram(position), equations.moment[position]  # [nS, heads, S, S], [nS, heads, S]
    energy = equations.energy[position]  # [heads]
    size = gram.shape[-1]
    if heads_per_head is None or heads_per_head >= size:
        weight = dense = solve_dense(gram, moment)
        index = torch.arange(size).expand_as(weight)
    else:
        index, weight = solve_sparse(gram, moment, heads_per_head)
        dense = expand(index, weight, size)
    left = residual(gram, moment, energy, dense)  # [nS, heads]
    tiny = torch.finfo(torch.float64).tiny
    layer_errors = (left.sum(1) / energy.sum().clamp_min(tiny)).sqrt()  # [nS]
    best = int(layer_errors.argmin())
    return LayerFit(
        sender_layer=equations.sender_layers[best],
        error=float(layer_errors[best]),
        head_errors=(left[best] / energy.clamp_min(tiny)).sqrt(),
        candidate_errors=layer_errors,
        index=index[best].to(torch.int32).contiguous(),
        weight=weight[best].to(torch.float32).contiguous(),
    )
