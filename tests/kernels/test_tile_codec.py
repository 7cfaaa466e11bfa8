"""Stored tiles against torch's own conversions, and the error bounds that the docstring states."""

import pytest
import torch

from mapflow.kernels.tile_codec import TILE_SCALE, decode_tiles, encode_tiles, tiles_are_valid


def test_every_e4m3_probability_decodes_as_torch_does() -> None:
    codes = torch.arange(0x79, dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert tiles_are_valid(codes)
    assert torch.equal(decode_tiles(codes), codes.float() / TILE_SCALE)
    assert float(decode_tiles(codes)[-1]) == 1.0


def test_e4m3_error_bounds() -> None:
    p = torch.cat([torch.logspace(-8, 0, 20001, dtype=torch.float64).float(), torch.zeros(1)])
    error = (decode_tiles(encode_tiles(p, torch.float8_e4m3fn)).double() - p.double()).abs()
    bound = torch.where(p >= 2.0**-14, p.double() * 2.0**-4, torch.tensor(2.0**-18, dtype=torch.float64))
    assert bool((error <= bound).all())


def test_smallest_e4m3_value_kept() -> None:
    p = torch.tensor([2.0**-17, 2.0**-18, 2.0**-18 * 1.01])
    assert decode_tiles(encode_tiles(p, torch.float8_e4m3fn)).tolist() == [2.0**-17, 0.0, 2.0**-17]


def test_bf16_error_bound() -> None:
    p = torch.logspace(-8, 0, 20001, dtype=torch.float64).float()
    error = (decode_tiles(encode_tiles(p, torch.bfloat16)).double() - p.double()).abs()
    assert bool((error <= p.double() * 2.0**-8).all())


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16])
def test_one_up_to_rounding_is_stored_as_one(dtype: torch.dtype) -> None:
    stored = encode_tiles(torch.tensor([1.0000002]), dtype)
    assert tiles_are_valid(stored)
    assert decode_tiles(stored).tolist() == [1.0]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16])
@pytest.mark.parametrize("bad", [float("nan"), -0.5, -0.0, 1.2])
def test_what_is_no_probability_is_seen(dtype: torch.dtype, bad: float) -> None:
    assert not tiles_are_valid(encode_tiles(torch.tensor([0.5, bad, 0.25]), dtype))


def test_unknown_dtype_is_named() -> None:
    with pytest.raises(ValueError, match="float16"):
        encode_tiles(torch.zeros(1), torch.float16)
    with pytest.raises(ValueError, match="float32"):
        decode_tiles(torch.zeros(1))
