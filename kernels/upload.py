"""Small tables from the host to a device, without waiting for what the device is doing.

A GPU's copy engine takes copies one after the other, whatever their stream: a small one that is made when the computing
stream comes to it may find gigabytes of maps in front of it. So these are made at once, on a stream of their own.
"""

from functools import cache

import torch


def pinned(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy in page-locked memory, from which `device` copies by itself; the tensor itself for a CPU."""
    return tensor.pin_memory() if device.type == "cuda" else tensor


def upload(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy of a host tensor on `device`, for what is launched on its current stream from here on; nobody waits."""
    if device.type != "cuda":
        return tensor.to(device)
    current, own = torch.cuda.current_stream(device), _stream(device)
    with torch.cuda.stream(own):
        copy = pinned(tensor, device).to(device, non_blocking=True)
    current.wait_stream(own)
    copy.record_stream(current)
    return copy


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
