"""Masses as bytes, and everything that an `AttentionMap` refuses."""

import dataclasses
from collections.abc import Callable

import pytest
import torch

from mapflow.kernels.attention_map import AttentionMap, TileSet, decode_mass, encode_mass

FixedMap = Callable[..., AttentionMap]


def test_mass_error_bound() -> None:
    mass = torch.linspace(0, 1, 20001, dtype=torch.float64).square()
    error = (decode_mass(encode_mass(mass.float())).double() - mass).abs()
    assert bool((error <= mass.sqrt() / 255 + 4e-6).all())


def test_every_mass_byte_survives() -> None:
    codes = torch.arange(256).to(torch.uint8)
    assert torch.equal(encode_mass(decode_mass(codes)), codes)


@pytest.mark.parametrize("bad", [float("nan"), -1e-3, 1.1, float("inf")])
def test_masses_outside_unit_interval_are_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="mass"):
        encode_mass(torch.tensor([0.5, bad]))


def test_decode_refuses_floats() -> None:
    with pytest.raises(ValueError, match="uint8"):
        decode_mass(torch.zeros(3))


def test_derived_sizes(fixed_map: FixedMap) -> None:
    one = fixed_map(torch.bfloat16)
    assert (one.num_heads, one.num_row_blocks, one.num_col_blocks, one.first_block_row) == (2, 2, 4, 2)
    assert (one.row_begin, one.row_end) == (16, 32)
    assert one.tiles is not None
    assert (one.tiles.num_tiles, one.tiles.block) == (5, 8)
    assert not dataclasses.replace(one, row_counts=torch.tensor([8, 3], dtype=torch.int32)).measured.all()


def test_frozen(fixed_map: FixedMap) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        fixed_map(None).chunk_index = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"chunk_index": -1}, "chunk_index"),
        ({"chunk_index": 2}, "mass: expected shape"),
        ({"block": 12}, "power of two"),
        ({"block": 512}, "at most 256"),
        ({"block": 16}, "tiles: expected block 16, got 8"),
        ({"mass": torch.zeros(2, 2, 4)}, "uint8"),
        ({"mass": torch.zeros(2, 4, dtype=torch.uint8)}, "mass"),
        ({"mass": torch.zeros(3, 2, 4, dtype=torch.uint8)}, "tiles.indptr"),
        ({"mass": torch.full((2, 2, 4), 9, dtype=torch.uint8)}, "above the causal diagonal"),
        ({"row_counts": torch.tensor([8, 9], dtype=torch.int32)}, r"row_counts: expected 0 to 8, got \[8, 9\]"),
        ({"row_counts": torch.tensor([-1, 8], dtype=torch.int32)}, "row_counts"),
        ({"row_counts": torch.tensor([8], dtype=torch.int32)}, "row_counts: expected shape"),
        ({"row_counts": torch.tensor([8, 8])}, "torch.int32"),
    ],
)
def test_bad_maps_are_refused(fixed_map: FixedMap, change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(fixed_map(torch.bfloat16), **change)  # type: ignore[arg-type]


def test_tiles_above_the_diagonal_are_refused(fixed_map: FixedMap) -> None:
    one = fixed_map(torch.bfloat16)
    assert one.tiles is not None
    indices = torch.tensor([0, 3, 3, 1, 3], dtype=torch.int32)  # column 3 in block row 2
    with pytest.raises(ValueError, match="above the causal diagonal"):
        dataclasses.replace(one, tiles=dataclasses.replace(one.tiles, indices=indices))


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("indptr", [[1, 2, 3], [3, 3, 5]], "ascend from 0 to 5"),
        ("indptr", [[0, 2, 3], [3, 3, 4]], "ascend from 0 to 5"),
        ("indptr", [[0, 4, 3], [3, 3, 5]], "ascend from 0 to 5"),
        ("indptr", [[0, 2, 3], [4, 4, 5]], "begin where the one before it ends"),
        ("indptr", [0, 2, 5], "indptr"),
        ("indices", [0, 0, 3, 1, 3], "ascending within each block row"),
        ("indices", [2, 0, 3, 1, 3], "ascending within each block row"),
        ("indices", [-1, 2, 3, 1, 3], "at least 0"),
        ("indices", [0, 2, 3, 1], r"tiles.values: expected shape \[4, block, block\]"),
    ],
)
def test_bad_tile_sets_are_refused(fixed_map: FixedMap, name: str, values: list[int], message: str) -> None:
    tiles = fixed_map(torch.float8_e4m3fn).tiles
    assert tiles is not None
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(tiles, **{name: torch.tensor(values, dtype=torch.int32)})


@pytest.mark.parametrize("bad", [float("nan"), -0.25, 1.5])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16])
def test_tiles_that_are_no_probabilities_are_refused(fixed_map: FixedMap, dtype: torch.dtype, bad: float) -> None:
    tiles = fixed_map(dtype).tiles
    assert tiles is not None
    values = tiles.values.float()
    values[3, 2, 1] = bad * (256 if dtype == torch.float8_e4m3fn else 1)
    with pytest.raises(ValueError, match=r"probabilities in \[0, 1\]"):
        dataclasses.replace(tiles, values=values.to(dtype))


def test_other_tile_shapes_are_refused() -> None:
    empty = torch.zeros(1, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match="square"):
        TileSet(indptr=empty, indices=empty[0, :0], values=torch.zeros(0, 8, 16, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="float32"):
        TileSet(indptr=empty, indices=empty[0, :0], values=torch.zeros(0, 8, 8))
    with pytest.raises(TypeError, match=r"torch\.Tensor, got list"):
        TileSet(indptr=[[0, 0]], indices=empty[0, :0], values=torch.zeros(0, 8, 8))  # type: ignore[arg-type]
