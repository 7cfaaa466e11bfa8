"""The solvers against NumPy's least squares and an exhaustive search."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from mapflow.calibration.head_maps import expand, residual, solve_dense, solve_sparse  # noqa: E402

BATCH, ROWS, SIZE = 5, 200, 6


def problem(seed: int, weight: torch.Tensor | None = None, noise: float = 0.3) -> tuple[torch.Tensor, torch.Tensor]:
    """Features f64 [BATCH, ROWS, SIZE] and targets f64 [BATCH, ROWS]."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(BATCH, ROWS, SIZE, generator=generator, dtype=torch.float64)
    if weight is None:
        weight = torch.randn(BATCH, SIZE, generator=generator, dtype=torch.float64)
    target = (features @ weight[..., None])[..., 0]
    return features, target + noise * torch.randn(BATCH, ROWS, generator=generator, dtype=torch.float64)


def sums(features: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    gram = features.transpose(1, 2) @ features
    return gram, (features.transpose(1, 2) @ target[..., None])[..., 0], target.square().sum(-1)


def test_dense_equals_numpy() -> None:
    features, target = problem(0)
    weight = solve_dense(*sums(features, target)[:2])
    for one in range(BATCH):
        expected = np.linalg.lstsq(features[one].numpy(), target[one].numpy(), rcond=None)[0]
        np.testing.assert_allclose(weight[one].numpy(), expected, rtol=1e-4, atol=1e-5)


def test_dense_survives_dependent_and_empty_features() -> None:
    features, target = problem(1)
    features[0, :, 3] = features[0, :, 2]
    features[1] = 0.0
    gram, moment, energy = sums(features, target)
    weight = solve_dense(gram, moment)
    assert torch.isfinite(weight).all()
    assert torch.equal(weight[1], torch.zeros(SIZE, dtype=torch.float64))
    reached = residual(gram, moment, energy, weight)[0]
    best = np.linalg.lstsq(features[0].numpy(), target[0].numpy(), rcond=None)[1]
    independent = np.linalg.lstsq(features[0][:, [0, 1, 2, 4, 5]].numpy(), target[0].numpy(), rcond=None)[1]
    assert best.size == 0  # NumPy sees the missing rank too
    np.testing.assert_allclose(float(reached), independent[0], rtol=1e-5)


def test_sparse_finds_the_heads_that_made_the_target() -> None:
    weight = torch.zeros(BATCH, SIZE, dtype=torch.float64)
    truth = [(0, 4), (1, 2), (3, 5), (2, 4), (0, 1)]
    for one, heads in enumerate(truth):
        weight[one, list(heads)] = torch.tensor([0.7, -0.4], dtype=torch.float64)
    index, found = solve_sparse(*sums(*problem(2, weight, noise=1e-3))[:2], 2)
    assert [tuple(heads) for heads in index.tolist()] == truth
    np.testing.assert_allclose(found.numpy(), [[0.7, -0.4]] * BATCH, atol=1e-3)


def test_one_head_is_the_best_single_one_and_two_are_near_the_best_pair() -> None:
    features, target = problem(3)
    gram, moment, energy = sums(features, target)
    for count in (1, 2):
        index, weight = solve_sparse(gram, moment, count)
        error = residual(gram, moment, energy, expand(index, weight, SIZE))
        for one in range(BATCH):
            best = min(
                np.linalg.lstsq(features[one][:, list(heads)].numpy(), target[one].numpy(), rcond=None)[1][0]
                for heads in combinations(range(SIZE), count)
            )
            assert float(error[one]) <= best * (1 + 1e-6 if count == 1 else 1.25)


def test_all_heads_equal_dense_and_more_heads_never_do_worse() -> None:
    gram, moment, energy = sums(*problem(4))
    errors = []
    for count in range(1, SIZE + 1):
        index, weight = solve_sparse(gram, moment, count)
        assert (index.diff(dim=-1) > 0).all()
        errors.append(residual(gram, moment, energy, expand(index, weight, SIZE)))
    assert (torch.stack(errors).diff(dim=0) < 1e-6).all()
    np.testing.assert_allclose(weight.numpy(), solve_dense(gram, moment).numpy(), rtol=1e-6)


def test_sparse_takes_each_head_once_even_when_features_repeat() -> None:
    features, target = problem(5)
    features[:] = features[:, :, :1]
    index, weight = solve_sparse(*sums(features, target)[:2], 3)
    assert (index.diff(dim=-1) > 0).all()
    assert torch.isfinite(weight).all()


def test_sparse_refuses_impossible_counts() -> None:
    gram, moment, _ = sums(*problem(6))
    for count in (0, SIZE + 1):
        with pytest.raises(ValueError, match=rf"num_heads must be in \[1, {SIZE}\], got {count}"):
            solve_sparse(gram, moment, count)


def test_residual_is_the_squared_error() -> None:
    features, target = problem(7)
    gram, moment, energy = sums(features, target)
    weight = torch.randn(BATCH, SIZE, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    direct = (target - (features @ weight[..., None])[..., 0]).square().sum(-1)
    np.testing.assert_allclose(residual(gram, moment, energy, weight).numpy(), direct.numpy(), rtol=1e-10)
