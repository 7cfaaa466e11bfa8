"""Launch configurations: measured ones per GPU, checked in under `tuned/`, and one that is safe everywhere else.

Nothing is tuned while serving. `benchmarks/tune.py` measures the candidates and prints a file for the GPU at hand.
"""

import functools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

_FOLDER = Path(__file__).parent / "tuned"
_DEFAULT = "default"


_overrides: dict[str, dict[str, int]] = {}


@contextmanager
def override(kernel: str, options: dict[str, int]) -> Iterator[None]:
    """Give `kernel` these options; for whoever measures candidates. Not for several threads."""
    _overrides[kernel] = options
    try:
        yield
    finally:
        del _overrides[kernel]


def launch_config(kernel: str, block: int, head_dim: int, device: torch.device) -> dict[str, int]:
    """A copy of the options of `kernel` for this block size, head_dim and GPU."""
    if kernel in _overrides:
        return dict(_overrides[kernel])
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _DEFAULT
    return dict(_config(name, kernel, f"block{block}-dim{head_dim}"))


@functools.cache
def _config(gpu: str, kernel: str, shape: str) -> dict[str, int]:
    for name in (gpu.replace(" ", "_"), _DEFAULT):
        path = _FOLDER / f"{name}.json"
        if path.exists():
            of_kernel = json.loads(path.read_text()).get(kernel, {})
            if (config := of_kernel.get(shape, of_kernel.get("*"))) is not None:
                return dict(config)
    raise KeyError(f"no launch configuration of {kernel} in {_FOLDER}")
