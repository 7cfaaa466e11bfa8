"""What the benchmarks compute by themselves, where no GPU is needed to tell."""

from __future__ import annotations

import importlib
import random
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("torch")


@pytest.fixture
def benchmark_module(monkeypatch: pytest.MonkeyPatch) -> object:
    """Imports one of them, as it imports its neighbours."""
    folder = Path(__file__).parents[1] / "benchmarks"
    monkeypatch.syspath_prepend(str(folder))

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    yield load
    for name in [path.stem for path in folder.glob("*.py")]:  # their names are nobody's in particular
        sys.modules.pop(name, None)


def test_a_gpu_is_busy_where_anything_runs(benchmark_module) -> None:
    trace = benchmark_module("gpu_trace")
    spans = [
        (5.0, 6.0, "Memcpy DtoH (Device -> Pinned)"),
        (0.0, 2.0, "void cutlass::device_kernel<flash::enable_sm90>"),
        (1.0, 3.0, "_masses_kernel"),
        (1.5, 2.5, "nvjet_tst_256x128"),
    ]
    found = trace.summary(spans)
    assert found["busy_ms"] == 4.0 and found["span_ms"] == 6.0, "of 0 to 3 and 5 to 6"
    assert found["kinds"] == {"attention": 2.0, "copies": 1.0, "matrix products": 1.0, trace.OURS: 2.0}
    assert list(found["kernels"].values()) == [2.0, 2.0, 1.0, 1.0]
    sides = {"after": "_masses_kernel", "before": "Memcpy DtoH (Device -> Pinned)"}
    assert found["gaps"] == [{"at_ms": 3.0, "ms": 2.0, **sides}]
    assert trace.summary([]) == {"busy_ms": 0.0, "span_ms": 0.0, "kinds": {}, "gaps": [], "kernels": {}}
    assert {"_checksum_kernel", "guide_hopper_kernel", "_sections_kernel"} <= trace.own_kernels()


def test_no_order_favours_anybody(benchmark_module) -> None:
    """Over two repeats everything has the same mean place."""
    items = list("abcde")
    found = list(benchmark_module("processes").orders(items, 6, random.Random(3)))
    assert [sorted(order) for order in found] == 6 * [items]
    for first, second in zip(found[::2], found[1::2], strict=True):
        assert {first.index(one) + second.index(one) for one in items} == {4}
    assert len({tuple(order) for order in found}) == 6
