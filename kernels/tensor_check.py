"""One checker for shape, dtype, device and plain integers, so that every wrong input reads the same: expected and got.

It never looks at the values of a tensor: that would stall an accelerator.
"""

from collections.abc import Sequence

import torch

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

MIN_BLOCK, MAX_BLOCK = 8, 256


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    *,
    shape: Sequence[int | str],
    dtypes: Sequence[torch.dtype],
    device: torch.device | None = None,
) -> None:
    """Check one tensor argument.

    `shape` gives an exact size, or a dimension's name where any size will do: `(num_tokens, "num_heads", "head_dim")`.

    Raises TypeError for another type than a tensor, ValueError for another shape, dtype or device.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
    wrong = len(shape) != tensor.dim() or any(
        isinstance(want, int) and want != got for want, got in zip(shape, tensor.shape)
    )
    if wrong:
        wanted = ", ".join(str(size) for size in shape)
        raise ValueError(f"{name}: expected shape [{wanted}], got {list(tensor.shape)}")
    if tensor.dtype not in dtypes:
        wanted = " or ".join(str(dtype) for dtype in dtypes)
        raise ValueError(f"{name}: expected dtype {wanted}, got {tensor.dtype}")
    if device is not None and tensor.device != device:
        raise ValueError(f"{name}: expected device {device}, got {tensor.device}")


def check_int(name: str, value: int, *, minimum: int, maximum: int | None = None) -> None:
    """Raise TypeError for another type than int, ValueError for a value outside [minimum, maximum]."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
    if value < minimum:
        raise ValueError(f"{name}: expected at least {minimum}, got {value}")
    if maximum is not None and value > maximum:
        raise ValueError(f"{name}: expected at most {maximum}, got {value}")


def check_block(block: int) -> None:
    """Raise ValueError unless `block` is a power of two in [MIN_BLOCK, MAX_BLOCK] (engines use 64 or 128)."""
    check_int("block", block, minimum=MIN_BLOCK, maximum=MAX_BLOCK)
    if block & (block - 1):
        raise ValueError(f"block: expected a power of two from {MIN_BLOCK} to {MAX_BLOCK}, got {block}")


def check_heads(heads: Sequence[int], num_heads: int, name: str = "heads") -> tuple[int, ...]:
    """The heads as a tuple; raise ValueError for a repeated head or one outside [0, num_heads)."""
    wanted = tuple(heads)
    for head in wanted:
        check_int(f"{name} (each)", head, minimum=0, maximum=num_heads - 1)
    if len(set(wanted)) != len(wanted):
        raise ValueError(f"{name}: expected each head once, got {list(wanted)}")
    return wanted


def check_group(num_heads: int, num_kv_heads: int) -> int:
    """Query heads per KV head; raise ValueError unless `num_kv_heads` divides `num_heads`."""
    if num_kv_heads < 1 or num_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(f"query heads: expected a multiple of the {num_kv_heads} KV heads, got {num_heads}")
    return num_heads // num_kv_heads
