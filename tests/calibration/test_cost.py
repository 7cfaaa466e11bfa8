"""The cost model against what was measured on the GPU that its rates are of."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from mapflow.calibration.cost import CostModel, GpuRates, LayerShape
from mapflow.connector.plan import LayerPlan, Mode, ModelSpec

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
SPEC = ModelSpec(name="qwen3-8b", revision="0", num_layers=36, num_heads=32, num_kv_heads=8, head_dim=128)
SHAPE = LayerShape(spec=SPEC, hidden=4096, mlp_params=3 * 4096 * 12288)
LAYERS = {mode: LayerPlan(mode=mode, sender_layer=0) for mode in (Mode.GUIDE, Mode.TRANSLATE)}
COMPUTE = LayerPlan(mode=Mode.COMPUTE)


def measured() -> list[dict[str, Any]]:
    """Guide and translate of e4m3 tiles, long enough that kernels and not launches are measured."""
    cases = json.loads((RESULTS / "kernels-nvidia-h200.json").read_text())["cases"]
    wanted = {("guide", "bf16"), ("translate", "e4m3")}
    return [
        one
        for one in cases
        if one["model"] == "qwen3-8b"
        and one["context"] >= 16384
        and (one["kernel"], one["dtype"]) in wanted
        and one["k"] <= 4
        and one["density"] < 1
    ]


def attention_ms(case: dict[str, Any]) -> float:
    """As the model has it, with maps on the GPU: a layer's time beyond what it takes without attention."""
    model = CostModel(SHAPE, SPEC, case["context"], GpuRates(link_bytes=math.inf))
    layer = LAYERS[Mode(case["kernel"])]
    found = model.of(layer, density=case["density"], block=128, num_heads=max(case["k"], 1))
    rest = model.rest_s + (model.query_s if layer.mode is Mode.GUIDE else 0.0)
    return 1e3 * (found.seconds - rest)


def test_attention_takes_what_was_measured() -> None:
    """Within 25 % each, and 5 % on average."""
    ratios = [attention_ms(case) / case["ms"] for case in measured()]
    assert len(ratios) >= 20
    assert all(0.75 < ratio < 1.25 for ratio in ratios), sorted(ratios)
    assert 0.95 < sum(ratios) / len(ratios) < 1.05


def test_a_layer_takes_what_vllm_takes() -> None:
    """36 layers of 16k tokens, to plain vLLM's time to first token, which has a little more in it."""
    cases = json.loads((RESULTS / "ttft-nvidia-h200.json").read_text())["cases"]
    (plain, *_) = (one["ttft_ms"] for one in cases if (one["mode"], one["context"]) == ("plain", 16384))
    model = CostModel(SHAPE, SPEC, 16384)
    layers_ms = 36e3 * model.of(COMPUTE, density=1.0, block=128).seconds
    assert 0.85 < layers_ms / plain < 1.05


def test_tiles_that_arrive_late_cost_their_copy() -> None:
    """At 64k tokens translate's tiles take longer than everything else; masses never do."""
    model = CostModel(SHAPE, SPEC, 65536)
    tiles = model.of(LAYERS[Mode.TRANSLATE], density=0.2, block=128)
    assert tiles.seconds == pytest.approx(tiles.num_bytes / model.rates.link_bytes)
    assert tiles.num_bytes == pytest.approx(0.2 * 32 * 65536**2 / 2, rel=0.01)
    few = model.of(LAYERS[Mode.TRANSLATE], density=0.2, block=128, tile_heads=8)
    assert few.num_bytes == pytest.approx(0.2 * 8 * 65536**2 / 2, rel=0.01), "only tiles of heads that are read cross"
    masses = model.of(LAYERS[Mode.GUIDE], density=0.2, block=128)
    assert masses.num_bytes == 32 * 512**2 // 2 and masses.seconds > 10 * masses.num_bytes / model.rates.link_bytes


def test_a_mask_that_keeps_everything_is_slower_than_none() -> None:
    model = CostModel(SHAPE, SPEC, 16384)
    full = model.of(COMPUTE, density=1.0, block=128)
    assert full.num_bytes == 0
    assert model.of(LAYERS[Mode.GUIDE], density=1.0, block=128).seconds > full.seconds
    assert model.of(LayerPlan(mode=Mode.STATIC), density=0.1, block=128).seconds < full.seconds
