"""Launch configurations for the GPU at hand: `python benchmarks/tune.py`, a few minutes.

Measures each kernel's candidates at 32k tokens, Qwen3-8B heads, density 0.1, and prints what belongs into
`kernels/tuned/<GPU>.json`. A candidate that does not compile or does not fit is left out.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))  # PYTHONSAFEPATH, which this project runs with, leaves it out

from kernel_cases import kernel_cases, shape_cases
from kernel_inputs import HEAD_DIM, MODELS, Baselines, Shape

from kernels import time_call
from mapflow.kernels import guide
from mapflow.kernels.hopper import is_hopper
from mapflow.kernels.tuning import override

WARPS, STAGES = (4, 8), (2, 3, 4, 5)
COMMON = [{"num_warps": warps, "num_stages": stages} for warps, stages in itertools.product(WARPS, STAGES)]
CANDIDATES: dict[str, list[dict[str, int]]] = {
    "guide": [{"block_n": block_n, **one} for block_n in (64, 128) for one in COMMON],
    "masses": COMMON,
    "mix": [{"num_warps": warps, "num_stages": 2} for warps in (1, 2, 4, 8)],
    "tiles": COMMON,
    "tiles_hopper": [{"stages": stages, "pairs": pairs} for stages, pairs in ((3, 1), (4, 1), (5, 1), (2, 2), (4, 2))],
    "translate": COMMON,
    "translate_e4m3": COMMON,
    "translate_mixed": COMMON,
    "translate_pairs_e4m3": COMMON,
}
WANTED: dict[str, dict[str, Any]] = {
    "guide": {"kernel": "guide"},
    "masses": {"kernel": "masses_stride_1", "dtype": "e4m3"},
    "mix": {"kernel": "translate_all_heads"},
    "tiles": {"kernel": "tiles", "dtype": "bf16"},
    "tiles_hopper": {"kernel": "tiles", "dtype": "e4m3"},
    "translate": {"kernel": "translate", "dtype": "bf16", "k": 1},
    "translate_e4m3": {"kernel": "translate", "dtype": "e4m3", "k": 1},
    "translate_mixed": {"kernel": "translate", "dtype": "e4m3 x bf16", "k": 1},
    "translate_pairs_e4m3": {"kernel": "translate_all_heads"},
}


def best(kernel: str, call: Callable[[], object]) -> dict[str, int] | None:
    """The fastest candidate of a kernel, each measured and printed."""
    fastest: tuple[float, dict[str, int]] | None = None
    for options in CANDIDATES[kernel]:
        try:
            with override(kernel, options):
                ms = time_call(call, 30.0).ms
        except Exception as error:  # out of shared memory or registers, or a compiler of another version
            print(f"{kernel} {options}: {type(error).__name__}", file=sys.stderr)
            continue
        print(f"{kernel} {options}: {ms:.3f} ms", file=sys.stderr, flush=True)
        if fastest is None or ms < fastest[0]:
            fastest = (ms, options)
    return fastest and fastest[1]


def main() -> None:
    """Measure those asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("kernels", nargs="*", help=f"all of them, or some of {', '.join(WANTED)}")
    asked = parser.parse_args().kernels or list(WANTED)
    if unknown := set(asked) - set(WANTED):
        parser.error(f"no such kernel: {', '.join(sorted(unknown))}; there are {', '.join(WANTED)}")
    if not torch.cuda.is_available():
        sys.exit("benchmarks/tune.py needs a CUDA GPU, and torch sees none")
    hopper = is_hopper(torch.device("cuda", torch.cuda.current_device()))
    inputs = Baselines(Shape(context=32768, **MODELS["qwen3-8b"]), lambda call: time_call(call, 30.0), {})
    found: dict[str, dict[str, dict[str, int]]] = {}
    cases = itertools.chain(shape_cases(inputs.shape, inputs), kernel_cases(inputs.shape, 0.1, inputs))
    for described, call, _ in cases:
        for kernel, wanted in WANTED.items():
            if kernel not in asked or any(described[key] != value for key, value in wanted.items()):
                continue
            if (kernel == "tiles_hopper" and not hopper) or (kernel == "guide" and described["density"] == 1.0):
                continue
            plain = kernel == "guide"
            if plain:  # also on Hopper, where the plain kernel is used for blocks of 64
                guide.is_hopper = lambda device: False
            if (options := best(kernel, call)) is not None:
                found[kernel] = {f"block128-dim{HEAD_DIM}": options}
            if plain:
                guide.is_hopper = is_hopper
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
