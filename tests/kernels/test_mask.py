"""Top-p, floor, guide and static masks against loops that follow the definition word by word."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mapflow.kernels.attention_map import AttentionMap, decode_mass
from mapflow.kernels.mask import guide_mask, mask_density, stack_masses, static_mask
from mapflow.kernels.top_p import select_top_p


def top_p_of_row(masses: list[float], p: float, diagonal: int) -> set[int]:
    causal = masses[: diagonal + 1]
    total = math.fsum(causal)
    kept, before = {diagonal}, 0.0
    for column in sorted(range(len(causal)), key=lambda c: (-causal[c], c)):
        if p >= 1 or before < p:
            kept.add(column)
        before += causal[column] / total if total > 0 else 0.0
    return kept


def random_masses(heads: int, rows: int, columns: int, seed: int) -> torch.Tensor:
    """Multiples of 1/64, so that sums are exact and ties are common."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 6, (heads, rows, columns), generator=generator).float() / 64


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    heads=st.integers(1, 3),
    rows=st.integers(1, 5),
    first=st.integers(0, 9),
    p=st.floats(0, 1.2),
    seed=st.integers(0, 99),
)
def test_top_p_is_the_definition(heads: int, rows: int, first: int, p: float, seed: int) -> None:
    mass = random_masses(heads, rows, first + rows, seed)
    mass[:, :, 0] += 1 / 1024  # no empty row, and no sum that rounds onto p
    kept = select_top_p(mass, p, first_block_row=first)
    for head in range(heads):
        for row in range(rows):
            wanted = top_p_of_row(mass[head, row].tolist(), p, first + row)
            got = set(kept[head, row].nonzero()[:, 0].tolist())
            if got != wanted:  # float32 may round a share onto the other side of p, never further
                shares = mass[head, row, : first + row + 1].double()
                shares = shares / shares.sum()
                edge = torch.cat([torch.zeros(1), shares.sort(descending=True).values.cumsum(0)])
                assert float((edge - p).abs().min()) < 1e-6


def test_top_p_keeps_the_fewest() -> None:
    mass = torch.tensor([[[0.5, 0.25, 0.125, 0.125, 0.0]]])
    for p, wanted in ((0.0, [3]), (0.5, [0, 3]), (0.51, [0, 1, 3]), (0.8, [0, 1, 2, 3]), (1.0, [0, 1, 2, 3])):
        kept = select_top_p(mass, p, first_block_row=3)
        assert kept[0, 0].nonzero()[:, 0].tolist() == wanted, p


def test_top_p_does_not_care_about_the_sum() -> None:
    mass = random_masses(2, 4, 8, 3) + 1 / 1024
    assert torch.equal(select_top_p(mass, 0.7, first_block_row=4), select_top_p(mass * 8, 0.7, first_block_row=4))


def test_a_row_without_mass_keeps_every_causal_block() -> None:
    kept = select_top_p(torch.zeros(1, 2, 5), 0.3, first_block_row=2)
    assert kept.tolist() == [[[True, True, True, False, False], [True, True, True, True, False]]]


def test_mass_above_the_diagonal_is_ignored() -> None:
    mass = torch.tensor([[[0.5, 0.5, 1e9, float("inf")]]])
    assert select_top_p(mass, 0.9, first_block_row=1)[0, 0].tolist() == [True, True, False, False]


@pytest.mark.parametrize("p", [-0.1, float("nan"), float("inf")])
def test_bad_p_is_refused(p: float) -> None:
    with pytest.raises(ValueError, match="p: expected"):
        select_top_p(torch.zeros(1, 1, 1), p, first_block_row=0)
    with pytest.raises(ValueError, match="p: expected"):
        guide_mask(torch.zeros(1, 1, 1), torch.ones(1, 1), p, first_block_row=0, sink_blocks=1, local_blocks=1)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    first=st.integers(0, 6),
    rows=st.integers(1, 5),
    sink=st.integers(0, 3),
    local=st.integers(0, 4),
    p=st.sampled_from([0.0, 0.4, 0.9, 1.0]),
)
def test_guide_mask_is_top_p_of_the_roots_of_translated_masses_and_the_floor(
    first: int, rows: int, sink: int, local: int, p: float
) -> None:
    mass = random_masses(3, rows, first + rows, first)
    head_map = torch.tensor([[1.0, 0, 0], [0.5, 0.25, -0.5], [-1.0, 0.0, -0.25], [0, 0, 2.0]])
    got = guide_mask(mass, head_map, p, first_block_row=first, sink_blocks=sink, local_blocks=local)
    static = static_mask(num_heads=4, first_block_row=first, num_block_rows=rows, sink_blocks=sink, local_blocks=local)
    assert got.shape == static.shape == (4, rows, first + rows)
    for head in range(4):
        for row in range(rows):
            diagonal = first + row
            floor = {diagonal, *range(min(sink, diagonal + 1)), *range(max(diagonal - local + 1, 0), diagonal + 1)}
            translated = [
                max(0.0, sum(float(head_map[head, s]) * float(mass[s, row, c]) for s in range(3))) ** 0.5
                for c in range(first + rows)
            ]
            if p == 0.9 and sum(translated[: diagonal + 1]) > 0:  # keep sums away from p
                edge = torch.tensor(sorted(translated[: diagonal + 1])[::-1]).double().cumsum(0)
                if float((edge / edge[-1] - p).abs().min()) < 1e-6:
                    continue
            wanted = top_p_of_row(translated, p, diagonal) | floor
            assert set(got[head, row].nonzero()[:, 0].tolist()) == wanted
            assert set(static[head, row].nonzero()[:, 0].tolist()) == floor


def test_guide_mask_refuses_nan() -> None:
    with pytest.raises(ValueError, match="NaN"):
        guide_mask(
            torch.ones(1, 1, 1), torch.tensor([[torch.nan]]), 0.9, first_block_row=0, sink_blocks=0, local_blocks=0
        )


def test_guide_mask_refuses_another_number_of_heads() -> None:
    with pytest.raises(ValueError, match=r"head_map: expected shape \[Hr, 3\], got \[2, 4\]"):
        guide_mask(torch.ones(3, 1, 1), torch.ones(2, 4), 0.9, first_block_row=0, sink_blocks=0, local_blocks=0)


def test_density_counts_causal_blocks_only() -> None:
    mask = torch.ones(2, 3, 7, dtype=torch.bool)
    assert mask_density(mask, first_block_row=2) == 1.0
    assert mask_density(mask & False, first_block_row=2) == 0.0
    mask[0, :, 0] = False
    assert mask_density(mask, first_block_row=2) == pytest.approx(21 / 24)


def test_stack_masses_joins_consecutive_chunks() -> None:
    maps = [
        AttentionMap(
            chunk_index=c,
            block=8,
            mass=torch.ones(2, 2, 2 * c + 2).tril(2 * c).mul(c * 20).to(torch.uint8),
            row_counts=torch.full((2,), 8, dtype=torch.int32),
        )
        for c in (1, 2, 3)
    ]
    mass = stack_masses(maps)
    assert mass.shape == (2, 6, 8)
    for place, one in enumerate(maps):
        rows = mass[:, 2 * place : 2 * place + 2]
        assert torch.equal(rows[:, :, : one.num_col_blocks], decode_mass(one.mass))
        assert not rows[:, :, one.num_col_blocks :].any()
    with pytest.raises(ValueError, match=r"maps\[1\]"):
        stack_masses([maps[0], maps[2]])
    with pytest.raises(ValueError, match="at least one"):
        stack_masses([])
