"""The QKV projection leaves out the queries of translated rows, and nothing else."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from mapflow.connector.vllm.batch import gaps  # noqa: E402

pytestmark = pytest.mark.vllm

QUERY_WIDTH, WIDTH, HIDDEN, ROWS = 48, 80, 32, 20


class SimpleLayer:
    """What is asked of a projection."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight


class _Worker:
    has_work = True

    def __init__(self, ranges: list[tuple[int, int]] | None) -> None:
        self.ranges = ranges
        self.asked: list[tuple[int, int]] = []

    def rows_with_queries(self, layer: int, num_rows: int) -> list[tuple[int, int]] | None:
        self.asked.append((layer, num_rows))
        if self.ranges is not None and self.ranges[:1] == [(-1, -1)]:
            raise RuntimeError("a bug")
        return self.ranges


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("ranges", [None, [(0, 20)], [(0, 3), (17, 20)], [(5, 6)], [], [(-1, -1)]])
def test_rows_with_queries(
    ranges: list[tuple[int, int]] | None, with_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mapflow.connector.vllm import compat, query_skip

    worker = _Worker(ranges)
    monkeypatch.setattr(compat, "active_connector", lambda: SimpleNamespace(map_worker=worker))
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(ROWS, HIDDEN, generator=generator), torch.randn(WIDTH, HIDDEN, generator=generator)
    bias = torch.randn(WIDTH, generator=generator) if with_bias else None
    wanted = torch.nn.functional.linear(x, weight, bias)
    layer = SimpleLayer(weight)
    layers = query_skip.AdoptedLayers()
    layers.add(layer, 3)
    monkeypatch.setattr(query_skip, "_layers", layers)
    monkeypatch.setattr(query_skip, "_output", lambda *_: torch.full_like(wanted, torch.nan))
    got = query_skip.qkv_projection(x, weight, bias, QUERY_WIDTH)
    assert worker.asked == [(3, ROWS)]
    torch.testing.assert_close(got[:, QUERY_WIDTH:], wanted[:, QUERY_WIDTH:])
    full = ranges is None or ranges == [(-1, -1)]
    written = [(0, ROWS)] if full else ranges or []
    for begin, end in written:
        torch.testing.assert_close(got[begin:end], wanted[begin:end])
    assert got[:, :QUERY_WIDTH].isnan().all(1).sum() == ROWS - sum(end - begin for begin, end in written)


def test_gaps() -> None:
    assert gaps([(5, 8), (0, 2)], 10) == [(2, 5), (8, 10)]
    assert gaps([(0, 10)], 10) == []
    assert gaps([], 4) == [(0, 4)]


def test_only_layers_that_a_plan_translates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also under torch.compile the operator asks in every call."""
    from mapflow.connector.vllm import compat, query_skip

    query_skip.install()
    query_skip.install()
    plans = Path(__file__).parents[2] / "examples" / "pair" / "plans"

    def config(**settings: object) -> Any:
        plan = [str(plans / "guide.safetensors"), str(plans / "translate.safetensors")]
        extra = {"plan": plan, **settings}
        transfer = SimpleNamespace(kv_connector="mapflow", is_kv_consumer=True, kv_connector_extra_config=extra)
        return SimpleNamespace(kv_transfer_config=transfer)

    assert query_skip._translated(config()) == {2, 3, 4}
    assert query_skip._translated(config(skip_queries=False)) == frozenset()
    multi = {"connectors": [{"kv_connector": "other"}, {"kv_connector": "mapflow", "kv_connector_extra_config": {}}]}
    outer = SimpleNamespace(kv_connector="MultiConnector", kv_connector_extra_config=multi)
    assert query_skip._own_settings(outer) == {}

    worker = _Worker(None)
    monkeypatch.setattr(compat, "active_connector", lambda: SimpleNamespace(map_worker=worker))

    def project(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.mapflow.qkv_projection(x, weight, None, QUERY_WIDTH)
        return out + 1.0

    weight = torch.ones(WIDTH, HIDDEN)
    layer = SimpleLayer(weight)
    query_skip._layers.add(layer, 2)
    compiled = torch.compile(project, backend="eager", fullgraph=True)
    x = torch.ones(4, HIDDEN)
    for ranges in (None, [(0, 1)]):
        worker.ranges = ranges
        assert float(compiled(x, weight)[0, 0]) == HIDDEN + 1.0
    assert worker.asked == [(2, 4), (2, 4)]


def test_layers_by_weight() -> None:
    from mapflow.connector.vllm.query_skip import AdoptedLayers

    layers = AdoptedLayers()
    first, second = SimpleLayer(torch.ones(4, 2)), SimpleLayer(torch.ones(4, 2))
    layers.add(first, 1)
    layers.add(second, 2)
    assert [layers.number_of(one.weight) for one in (first, second)] == [1, 2]
    assert layers.number_of(torch.ones(4, 2)) is None
    old, first.weight = first.weight, torch.ones(4, 2)
    assert layers.number_of(first.weight) == 1, "weights were loaded anew"
    assert layers.number_of(old) is None
    second.weight = old
    assert layers.number_of(old) == 2, "an address that was another layer's"
    first.weight = old
    fresh = AdoptedLayers()
    for number, layer in enumerate((first, second)):
        fresh.add(layer, number)
    assert fresh.number_of(old) is None, "one weight of two layers"
