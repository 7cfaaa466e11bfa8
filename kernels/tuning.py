"""Launch configurations: measured ones per GPU, checked in under `tuned/`, and one that is safe everywhere else.

Nothing is tuned while serving. `benchmarks/kernels.py --tune` measures the candidates and prints the file.
"""

import functools
import json
from pathlib import Path

import torch

_FOLDER = Path(__file__).parent / "tuned"
_DEFAULT = "default"


def launch_config(kernel: str, block: int, head_dim: int, device: torch.device) -> dict[str, int]:
    """A copy of the options of `kernel` for this block size, head_dim and GPU."""
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
