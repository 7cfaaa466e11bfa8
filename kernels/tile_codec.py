"""How the probabilities inside a kept block are stored: e4m3 with one fixed scale, or bfloat16.

A probability lies in [0, 1], so no tile needs a scale of its own. An e4m3 tile holds `round(256 * p)`: 256 is the
largest power of two whose product with 1 still fits e4m3 (max 448). Down to p = 2**-14 the relative error is at most
2**-4; below that the absolute error is at most 2**-18. The smallest value kept is 2**-17 (7.6e-6); p of at most 2**-18
becomes 0. bfloat16 has a relative error of at most 2**-8 everywhere.

A scale of 256 has a second virtue: e4m3 and float16 differ in exponent bias by 8, so the bits of an e4m3 value moved
left by 7 *are* the float16 of the unscaled probability. Decoding is a shift, several times faster than a conversion.
"""

import torch

TILE_SCALE = 256.0
TILE_DTYPE_BY_NAME = {"e4m3": torch.float8_e4m3fn, "bf16": torch.bfloat16}  # as plans and messages name them
TILE_DTYPES = tuple(TILE_DTYPE_BY_NAME.values())
TILE_BITS = {torch.float8_e4m3fn: torch.uint8, torch.bfloat16: torch.int16}  # views, for what knows no such floats

_E4M3_ONE = 0x78  # bits of 256.0, the stored form of probability 1
_BF16_ONE = 0x3F80  # bits of 1.0


def check_tile_dtype(dtype: torch.dtype) -> None:
    """Raise ValueError unless `dtype` is one that tiles may be stored in."""
    if dtype not in TILE_DTYPES:
        raise ValueError(f"tile dtype: expected torch.float8_e4m3fn or torch.bfloat16, got {dtype}")


def encode_tiles(probabilities: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Store probabilities (float32, any shape, in [0, 1] up to rounding) as `dtype`.

    Raises ValueError for an unknown `dtype`. Values are not checked here; `TileSet` rejects NaN, negatives and what is
    still more than 1 once rounded.
    """
    check_tile_dtype(dtype)
    return (probabilities if dtype == torch.bfloat16 else probabilities * TILE_SCALE).to(dtype)


def decode_tiles(values: torch.Tensor) -> torch.Tensor:
    """Stored tiles (any shape, e4m3 or bfloat16, valid as `tiles_are_valid` says) as float32 probabilities."""
    check_tile_dtype(values.dtype)
    if values.dtype == torch.bfloat16:
        return values.float()
    return values.view(torch.uint8).to(torch.int16).bitwise_left_shift_(7).view(torch.float16).float()


def tiles_are_valid(values: torch.Tensor) -> bool:
    """Whether every stored value is a probability: not NaN, not negative (nor -0), at most 1. Reads the bits only."""
    check_tile_dtype(values.dtype)
    if values.numel() == 0:
        return True
    if values.dtype == torch.bfloat16:
        low, high = values.view(torch.int16).aminmax()
        return bool(low >= 0) and bool(high <= _BF16_ONE)
    return bool(values.view(torch.uint8).max() <= _E4M3_ONE)
