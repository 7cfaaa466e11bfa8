"""Maps of one chunk put together: their rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mapflow.kernels.attention_map import AttentionMap, TileSet
from mapflow.kernels.map_join import join_rows

BLOCK, E4M3 = 64, torch.float8_e4m3fn


def one_row(row: int, value: float, *, rows: int = 2, columns: tuple[int, ...] = (0,)) -> AttentionMap:
    """Two heads, of which the second keeps `columns`; only `row` is measured."""
    mass = torch.zeros(2, rows, rows, dtype=torch.uint8)
    mass[:, row, 0] = int(value * 255)
    counts = torch.zeros(rows, dtype=torch.int32)
    counts[row] = BLOCK
    indptr = torch.zeros(2, rows + 1, dtype=torch.int32)
    indptr[1, row + 1 :] = len(columns)
    values = torch.full((len(columns), BLOCK, BLOCK), value).to(E4M3)
    tiles = TileSet(indptr=indptr, indices=torch.tensor(columns, dtype=torch.int32), values=values)
    return AttentionMap(chunk_index=0, block=BLOCK, mass=mass, row_counts=counts, tiles=tiles)


def test_each_row_of_who_measured_it_last() -> None:
    parts = [one_row(1, 0.25), one_row(0, 0.5), one_row(1, 1.0, columns=(0, 1))]
    joined = join_rows(parts)
    assert joined.row_counts.tolist() == [BLOCK, BLOCK]
    assert joined.mass[0, :, 0].tolist() == [127, 255]
    assert joined.tiles is not None
    assert joined.tiles.indptr.tolist() == [[0, 0, 0], [0, 1, 3]] and joined.tiles.indices.tolist() == [0, 0, 1]
    assert joined.tiles.values[:, 0, 0].tolist() == [0.5, 1.0, 1.0]


def test_rows_that_nobody_measured_stay_empty() -> None:
    joined = join_rows([one_row(0, 0.5, rows=3), one_row(2, 1.0, rows=3)])
    assert joined.row_counts.tolist() == [BLOCK, 0, BLOCK]
    assert joined.tiles is not None and joined.tiles.indptr[1].tolist() == [0, 1, 1, 2]


def test_one_map_is_itself() -> None:
    part = one_row(0, 0.5)
    assert join_rows([part]) is part


def test_maps_of_different_kinds_are_refused() -> None:
    with pytest.raises(ValueError, match="kind of tiles"):
        join_rows([one_row(0, 0.5), replace(one_row(1, 0.5), tiles=None)])
