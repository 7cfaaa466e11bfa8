"""Densities of longer prompts: exact for windows, and unchanged where every row keeps the same share."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from mapflow.calibration.growth import causal, density_at, growth  # noqa: E402
from mapflow.kernels.mask import mask_density, static_mask  # noqa: E402


def window(num_blocks: int, local: int) -> torch.Tensor:
    return static_mask(num_heads=2, first_block_row=0, num_block_rows=num_blocks, sink_blocks=1, local_blocks=local)


@pytest.mark.parametrize("local", [2, 4])
def test_a_window_keeps_as_much_of_each_row(local: int) -> None:
    short, long = window(64, local), window(256, local)
    expected = density_at(mask_density(short, first_block_row=0), growth(short), 64, 256)
    assert expected == pytest.approx(mask_density(long, first_block_row=0), rel=0.15)
    assert expected < 0.3 * mask_density(short, first_block_row=0)


def test_the_same_share_stays_the_same_share() -> None:
    mask = (torch.rand(4, 64, 64, generator=torch.Generator().manual_seed(0)) < 0.3).tril()
    density = mask_density(mask, first_block_row=0)
    assert 1.9 < growth(mask) <= 2.0
    assert density_at(density, growth(mask), 64, 256) == pytest.approx(density, rel=0.15)
    assert density_at(1.0, 2.0, 64, 1024) == pytest.approx(1.0, rel=0.02)


def test_what_rows_keep_may_grow_with_their_root() -> None:
    """Kept blocks a row as r**0.5: over n rows as n**1.5."""
    mask = torch.zeros(1, 256, 256, dtype=torch.bool)
    for row in range(256):
        mask[0, row, row + 1 - max(1, round((row + 1) ** 0.5)) : row + 1] = True
    short = mask[:, :64, :64]
    expected = density_at(mask_density(short, first_block_row=0), growth(short), 64, 256)
    assert growth(short) == pytest.approx(1.5, abs=0.05)
    assert expected == pytest.approx(mask_density(mask, first_block_row=0), rel=0.1)


def test_little_is_known_of_little() -> None:
    assert growth(window(4, 2)) == 2.0
    assert growth(torch.zeros(1, 16, 16, dtype=torch.bool)) == 2.0
    assert density_at(0.0, 1.0, 64, 256) == 256 / causal(256)
