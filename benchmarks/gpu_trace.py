"""What a GPU did during a call, from PyTorch's profiler: time by kernel, by kind of work, and how long it was busy."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import torch

OURS = "reuse and publishing"
_SOURCES = Path(__file__).parents[1] / "kernels"
_KINDS = (
    ("attention", re.compile(r"flash|fmha", re.IGNORECASE)),
    ("matrix products", re.compile(r"gemm|nvjet|cutlass|xmma|splitk", re.IGNORECASE)),
    ("copies", re.compile(r"memcpy|memset", re.IGNORECASE)),
)


def traced(call: Callable[[], object]) -> dict[str, Any]:
    """Run a call and say what the GPU did: "busy_ms", "span_ms" from first to last, "kinds" and "kernels" in ms, and
    the longest "gaps" in between: when, how long, and the kernels on either side.

    Without a GPU: what PyTorch's operators did, to try the benchmark.
    """
    device = "CUDA" if torch.cuda.is_available() else "CPU"
    with torch.profiler.profile(activities=[getattr(torch.profiler.ProfilerActivity, device)]) as profile:
        call()
        if device == "CUDA":
            torch.cuda.synchronize()
    events = [one for one in profile.events() if one.device_type == getattr(torch.autograd.DeviceType, device)]
    spans = [(one.time_range.start / 1e3, one.time_range.end / 1e3, one.name) for one in events]
    return summary(spans)


def summary(spans: Iterable[tuple[float, float, str]]) -> dict[str, Any]:
    """As `traced`, of (begin, end, kernel), in milliseconds. Copies count as busy only where nothing else runs."""
    kernels: dict[str, float] = defaultdict(float)
    kinds: dict[str, float] = defaultdict(float)
    gaps: list[dict[str, Any]] = []
    busy, reached, first, before = 0.0, float("-inf"), None, ""
    for begin, end, name in sorted(spans):
        kernels[name] += end - begin
        kinds[kind_of(name)] += end - begin
        busy += max(0.0, end - max(begin, reached))
        first = begin if first is None else first
        if begin > reached and before:
            sides = {"after": before[:60], "before": name[:60]}
            gaps.append({"at_ms": round(reached - first, 3), "ms": round(begin - reached, 3), **sides})
        reached, before = max((reached, before), (end, name))
    return {
        "busy_ms": round(busy, 3),
        "span_ms": round(reached - first, 3) if first is not None else 0.0,
        "kinds": {name: round(ms, 3) for name, ms in sorted(kinds.items())},
        "gaps": sorted(gaps, key=lambda one: -one["ms"])[:8],
        "kernels": {name[:80]: round(ms, 3) for name, ms in sorted(kernels.items(), key=lambda one: -one[1])[:25]},
    }


def kind_of(kernel: str) -> str:
    """What a kernel is for, by its name."""
    if kernel in own_kernels():
        return OURS
    return next((kind for kind, pattern in _KINDS if pattern.search(kernel)), "other")


@cache
def own_kernels() -> frozenset[str]:
    """Names of this project's kernels."""
    sources = (path.read_text() for path in _SOURCES.glob("*.py"))
    return frozenset(name for text in sources for name in re.findall(r"^def (\w+_kernel)\(", text, re.MULTILINE))
