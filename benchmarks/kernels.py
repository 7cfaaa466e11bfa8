"""Kernels beside full attention: `python benchmarks/kernels.py`, one command, on a CUDA GPU.

Prints a table and writes `benchmarks/results/kernels-<gpu>.json`. Every time is the median of CUDA-graph replays of the
public call, packing and selection included, on random data larger than the L2; ratios are to cuDNN's causal attention
at the same shape in the same run. FlashAttention 3 is taken from vLLM, FlexAttention from torch, FlashInfer where it is
installed; what is missing is named in the file. `floor_ms` is the larger of counted FLOPs over a measured matrix
product's rate and counted bytes over a measured copy's.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import triton

sys.path.insert(0, str(Path(__file__).parent))  # PYTHONSAFEPATH, which this project runs with, leaves it out

from kernel_cases import kernel_cases, shape_cases
from kernel_inputs import MODELS, Baselines, Measured, Shape

RESULTS = Path(__file__).parent / "results"


def time_call(call: Callable[[], object], milliseconds: float) -> Measured:
    """Median and 20th / 80th percentile of a call's time on the GPU, without launch gaps. In ms."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    low, median, high = triton.testing.do_bench(graph.replay, warmup=10, rep=milliseconds, quantiles=[0.2, 0.5, 0.8])
    return Measured(ms=median, low_ms=low, high_ms=high)


def ceilings(milliseconds: float) -> dict[str, float]:
    """What this GPU does at best: bytes read and written a second by a copy, FLOP/s of large bf16 and e4m3 products."""
    source = torch.empty(2 << 30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    # not as a graph: its memcpy node may take another engine than the multiprocessors
    copy_ms = triton.testing.do_bench(lambda: target.copy_(source), rep=milliseconds, return_mode="median")
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    bf16_ms = time_call(lambda: a @ b, milliseconds).ms
    a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()
    one = torch.ones((), device="cuda")
    e4m3_ms = time_call(
        lambda: torch._scaled_mm(a8, b8, scale_a=one, scale_b=one, out_dtype=torch.bfloat16), milliseconds
    ).ms
    flops = 2 * 8192**3
    return {
        "copy_bytes_per_s": 2 * source.numel() / copy_ms * 1e3,
        "bf16_flops": flops / bf16_ms * 1e3,
        "e4m3_flops": flops / e4m3_ms * 1e3,
    }


def versions() -> dict[str, str]:
    """Of everything that the numbers depend on."""
    found = {"python": sys.version.split()[0], "cuda": str(torch.version.cuda)}
    found["cudnn"] = str(torch.backends.cudnn.version())
    for name in ("torch", "triton", "vllm", "flashinfer-python"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def git_commit() -> str:
    """The commit that is measured, with "+" if files differ from it; "unknown" outside a checkout."""

    def git(*arguments: str) -> str:
        folder = Path(__file__).parent
        try:
            run = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            return ""
        return run.stdout.strip()

    revision = git("rev-parse", "HEAD")
    return revision + ("+" if git("status", "--porcelain", "--untracked-files=no") else "") or "unknown"


def cases(arguments: argparse.Namespace, limits: dict[str, float], missing: dict[str, str]) -> Iterator[dict[str, Any]]:
    """Measure everything asked for, one case at a time."""
    for model in arguments.models:
        for context in arguments.contexts:
            shape = Shape(context=context, **MODELS[model])
            baselines = Baselines(shape, lambda call: time_call(call, arguments.milliseconds), missing)
            full = baselines.full_attention()
            common = {
                "model": model,
                "context": context,
                "q_heads": shape.q_heads,
                "kv_heads": shape.kv_heads,
                "full_attention_ms": full["cudnn"].ms,
                "full_attention_by": "cudnn",
            }
            flops = shape.attention_flops
            for name, measured in full.items():
                case = {"kernel": f"full_{name}", "density": 1.0, "sender_heads": 0, "k": 0, "dtype": "bf16"}
                yield _case(common | case, measured, flops / limits["bf16_flops"])
            of_densities = (kernel_cases(shape, density, baselines) for density in arguments.densities)
            for described, call, work in itertools.chain(shape_cases(shape, baselines), *of_densities):
                measured = time_call(call, arguments.milliseconds)
                floor = max(work.flops / limits[f"{work.unit}_flops"], work.num_bytes / limits["copy_bytes_per_s"])
                yield _case(common | described, measured, floor)
            if context in arguments.flex and model == arguments.models[0]:
                for density in arguments.densities:
                    if (described_ms := baselines.flex_attention(density)) is not None:
                        described, measured = described_ms
                        yield _case(common | described, measured, flops * density / limits["bf16_flops"])


def _case(case: dict[str, Any], measured: Measured, floor_s: float) -> dict[str, Any]:
    return case | {
        "ms": round(measured.ms, 4),
        "low_ms": round(measured.low_ms, 4),
        "high_ms": round(measured.high_ms, 4),
        "full_attention_ms": round(case["full_attention_ms"], 4),
        "ratio": round(measured.ms / case["full_attention_ms"], 4),
        "floor_ms": round(1e3 * floor_s, 4),
    }


def write_report(report: dict[str, Any], path: Path) -> None:
    """As JSON, a line for each case."""
    cases = report["cases"]
    rest = {name: value for name, value in report.items() if name != "cases"}
    head = json.dumps(rest | {"cases": []}, indent=1).removesuffix("[]\n}")
    path.write_text(head + "[\n" + ",\n".join(json.dumps(case) for case in cases) + "\n]}\n")


def main() -> None:
    """Parse, measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--contexts", nargs="+", type=int, default=[4096, 8192, 16384, 32768, 65536])
    parser.add_argument("--densities", nargs="+", type=float, default=[0.02, 0.05, 0.1, 0.2])
    parser.add_argument("--flex", nargs="*", type=int, default=[8192, 32768], help="contexts with FlexAttention")
    parser.add_argument("--milliseconds", type=float, default=40.0, help="measuring time of each case")
    parser.add_argument("--commit", default=None, help="the commit that is measured, where git cannot be asked")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks/kernels.py needs a CUDA GPU, and torch sees none")
    gpu = torch.cuda.get_device_name()
    output = arguments.output or RESULTS / f"kernels-{gpu.replace(' ', '-').lower()}.json"
    limits = ceilings(200.0)
    missing: dict[str, str] = {}
    report = {
        "gpu": gpu,
        "date": time.strftime("%Y-%m-%d"),
        "commit": arguments.commit or git_commit(),
        "versions": versions(),
        "ceilings": limits,
        "milliseconds_per_case": arguments.milliseconds,
        "missing": missing,
        "cases": [],
    }
    started = time.monotonic()
    print(f"{'kernel':22} {'model':12} {'context':>7} {'density':>7} {'ms':>9} {'ratio':>7} {'floor':>8}")
    for case in cases(arguments, limits, missing):
        report["cases"].append(case)
        print(
            f"{case['kernel']:22} {case['model']:12} {case['context']:7} {case['density']:7.3f} {case['ms']:9.3f} "
            f"{case['ratio']:7.4f} {case['floor_ms']:8.3f}",
            flush=True,
        )
        write_report(report, output)  # after each, so that what was measured survives an interruption
    print(f"{len(report['cases'])} cases in {time.monotonic() - started:.0f} s, written to {output}")


if __name__ == "__main__":
    main()
