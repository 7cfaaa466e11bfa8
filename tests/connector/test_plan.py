"""Plan files: whole after a round trip, and refused by name when they cannot be used."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from safetensors import safe_open  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

from mapflow.connector.namespace import Namespace  # noqa: E402
from mapflow.connector.plan import LayerPlan, Mode, ModelSpec, Plan, PlanError, load_plan, with_top_p  # noqa: E402

SENDER = ModelSpec(name="org/sender", revision="aa", num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8)
RECEIVER = ModelSpec(name="receiver", revision="bb", num_layers=4, num_heads=6, num_kv_heads=3, head_dim=8)
LAYERS = (
    LayerPlan(mode=Mode.COMPUTE),
    LayerPlan(mode=Mode.STATIC, sink_blocks=2, local_blocks=3),
    LayerPlan(mode=Mode.GUIDE, sender_layer=2, top_p=0.9, error=0.25),
    LayerPlan(mode=Mode.TRANSLATE, sender_layer=0, top_p=0.8),
)


def make_plan() -> Plan:
    generator = torch.Generator().manual_seed(0)
    return Plan(
        name="pair",
        tokenizer_fingerprint="ab",
        chunk_tokens=512,
        block=64,
        sender=SENDER,
        receiver=RECEIVER,
        layers=LAYERS,
        head_map={2: torch.rand(6, 4, generator=generator)},
        head_index={3: torch.randint(0, 4, (6, 2), generator=generator, dtype=torch.int32)},
        head_weight={3: torch.rand(6, 2, generator=generator)},
        tile_dtype="bf16",
    )


def test_a_plan_survives_saving(tmp_path: Path) -> None:
    plan = make_plan()
    path = tmp_path / "pair.safetensors"
    plan.save(path)
    assert [file.name for file in tmp_path.iterdir()] == ["pair.safetensors"]
    loaded = load_plan(path)
    for name in (
        "name",
        "tokenizer_fingerprint",
        "chunk_tokens",
        "block",
        "sender",
        "receiver",
        "layers",
        "tile_dtype",
    ):
        assert getattr(loaded, name) == getattr(plan, name)
    for name in ("head_map", "head_index", "head_weight"):
        before, after = getattr(plan, name), getattr(loaded, name)
        assert before.keys() == after.keys()
        assert all(torch.equal(before[layer], after[layer]) for layer in before)
    assert loaded.digest == plan.digest


def test_the_name_is_the_files_stem(tmp_path: Path) -> None:
    make_plan().save(tmp_path / "other.safetensors")
    assert load_plan(tmp_path / "other.safetensors").name == "other"
    assert load_plan(tmp_path / "other.safetensors").digest == make_plan().digest


def test_what_is_derived() -> None:
    plan = make_plan()
    assert plan.map_layers == (0, 2)
    assert plan.sender.model_id == "org/sender@aa"
    assert [layer.needs_map for layer in plan.layers] == [False, False, True, True]
    expected = Namespace(tokenizer_fingerprint="ab", chunk_tokens=512, block=64, tenant="t")
    assert plan.namespace("t") == expected


@pytest.mark.parametrize(
    "change",
    [
        {"tokenizer_fingerprint": "cd"},
        {"chunk_tokens": 1024},
        {"tile_dtype": "e4m3"},
        {"sender": replace(SENDER, revision="cc")},
        {"layers": (*LAYERS[:3], replace(LAYERS[3], top_p=0.7))},
        {"head_map": {2: torch.zeros(6, 4)}},
        {"head_weight": {3: torch.zeros(6, 2)}},
    ],
)
def test_whatever_could_change_a_result_changes_the_digest(change: dict[str, Any]) -> None:
    assert replace(make_plan(), **change).digest != make_plan().digest


def test_with_top_p_changes_mapped_layers_only() -> None:
    changed = with_top_p(make_plan(), 0.5)
    assert [layer.top_p for layer in changed.layers] == [1.0, 1.0, 0.5, 0.5]
    assert changed.layers[:2] == LAYERS[:2]
    with pytest.raises(ValueError, match="top_p must be in"):
        with_top_p(make_plan(), 1.5)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"mode": Mode.GUIDE}, "mode guide and sender layer None do not go together"),
        ({"mode": Mode.TRANSLATE}, "mode translate and sender layer None"),
        ({"mode": Mode.COMPUTE, "sender_layer": 0}, "mode compute and sender layer 0"),
        ({"mode": Mode.STATIC, "sender_layer": 1}, "mode static and sender layer 1"),
        ({"mode": Mode.STATIC, "top_p": 0.0}, r"top_p must be in \(0, 1\], got 0.0"),
        ({"mode": Mode.STATIC, "top_p": 1.1}, "got 1.1"),
        ({"mode": Mode.STATIC, "top_p": float("nan")}, "got nan"),
        ({"mode": Mode.STATIC, "sink_blocks": -1}, "need sink_blocks >= 0"),
        ({"mode": Mode.STATIC, "local_blocks": 0}, "local_blocks >= 1, got 1 and 0"),
    ],
)
def test_bad_layers_are_named(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        LayerPlan(**values)


INDEX = torch.zeros(6, 2, dtype=torch.int32)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layers": LAYERS[:3]}, "3 layers planned for a receiver of 4"),
        ({"tile_dtype": "fp4"}, "tile_dtype must be e4m3 or bf16, got fp4"),
        ({"layers": (*LAYERS[:2], replace(LAYERS[2], sender_layer=3), LAYERS[3])}, "layer 2: sender layer 3 of 3"),
        ({"head_map": {}}, r"layer 2: expected a head map of torch.float32 \[6, 4\], got None"),
        ({"head_map": {2: torch.zeros(4, 6)}}, r"layer 2: .* \[6, 4\], got \(torch.float32, \(4, 6\)\)"),
        ({"head_map": {2: torch.zeros(6, 4, dtype=torch.float64)}}, "got .*float64"),
        ({"head_map": {2: torch.full((6, 4), float("inf"))}}, "layer 2: the head map holds values that are not finite"),
        ({"head_index": {}}, "layer 3: expected a head map of torch.int32"),
        ({"head_index": {3: INDEX.long()}}, "layer 3: expected a head map of torch.int32"),
        ({"head_index": {3: INDEX + 4}}, r"layer 3: needs one sender head or more, each in \[0, 4\)"),
        ({"head_index": {3: INDEX - 1}}, r"layer 3: needs one sender head or more, each in \[0, 4\)"),
        ({"head_weight": {}}, "layer 3: expected a head map of torch.float32"),
        ({"head_weight": {3: torch.zeros(6, 3)}}, r"layer 3: .* \[6, 2\], got .*\(6, 3\)"),
        ({"head_weight": {3: torch.full((6, 2), float("nan"))}}, "layer 3: .* not finite"),
    ],
)
def test_contradictions_are_named(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        replace(make_plan(), **change)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        PlanError, match=r"plan file .*nowhere.safetensors does not exist; make one with `mapflow calib"
    ):
        load_plan(tmp_path / "nowhere.safetensors")
    with pytest.raises(PlanError, match="does not exist"):
        load_plan(tmp_path)


@pytest.mark.parametrize("content", [b"", b"hello, this is no plan", b"\xff" * 64])
def test_a_file_that_is_no_safetensors_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "plan.safetensors"
    path.write_bytes(content)
    with pytest.raises(PlanError, match=r"plan\.safetensors cannot be read as safetensors"):
        load_plan(path)


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
def test_a_safetensors_file_that_is_no_plan_is_named(tmp_path: Path, metadata: dict[str, str] | None) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"weight": torch.zeros(2)}, str(path), metadata=metadata)
    with pytest.raises(PlanError, match=r"model\.safetensors is a safetensors file but holds no plan"):
        load_plan(path)


def _rewrite(path: Path, change: Callable[[dict[str, Any], dict[str, Any]], Any]) -> None:
    with safe_open(str(path), "pt") as file:
        document = json.loads(file.metadata()["mapflow_plan"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    changed = change(document, tensors)
    save_file(tensors, str(path), metadata={"mapflow_plan": json.dumps(document if changed is None else changed)})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda document, _: document.update(version=2), "its version is 2, this release reads version 1"),
        (lambda document, _: document.pop("version") and None, "version"),
        (lambda document, _: document.pop("block") and None, "block"),
        (lambda document, _: document.update(surprise=1), "surprise"),
        (lambda document, _: document["layers"][0].update(mode="magic"), "magic"),
        (lambda document, _: document["sender"].pop("revision") and None, "revision"),
        (lambda document, _: document.update(layers=document["layers"][:2]), "2 layers planned for a receiver of 4"),
        (lambda _, tensors: tensors.pop("head_map.2") is None or None, "layer 2: expected a head map"),
        (lambda _, tensors: tensors.update({"weight.0": torch.zeros(1)}), "weight"),
        (lambda _, tensors: tensors.update({"head_map.x": torch.zeros(1)}), "x"),
        (lambda document, _: [document], ""),
        (lambda document, _: document.update(layers=[1, 2, 3, 4]), ""),
    ],
)
def test_damaged_plans_are_named(tmp_path: Path, change: Callable[..., Any], words: str) -> None:
    path = tmp_path / "pair.safetensors"
    make_plan().save(path)
    _rewrite(path, change)
    with pytest.raises(PlanError, match=rf"pair\.safetensors is not usable: .*{words}") as caught:
        load_plan(path)
    assert "make it again with `mapflow calibrate`" in str(caught.value)
