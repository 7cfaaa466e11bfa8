"""The whole flow on real tiny models: known parents, resuming, refusals, the file it writes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from rich.console import Console  # noqa: E402

from mapflow.calibration.calibrate import calibrate  # noqa: E402
from mapflow.calibration.config import CalibrationConfig, CalibrationError  # noqa: E402
from mapflow.calibration.inspect import plan_table  # noqa: E402
from mapflow.calibration.progress import Progress  # noqa: E402
from mapflow.connector.plan import Mode, Plan, load_plan  # noqa: E402


def config_of(pair, out: Path, **changes: object) -> CalibrationConfig:
    base = CalibrationConfig(
        sender=pair.sender, receiver=pair.receiver, texts=pair.texts, out=out, chunk_tokens=64, first_layer=0
    )
    return replace(base, **changes)


def same(one: Plan, two: Plan) -> bool:
    return one.digest == two.digest


def test_guide_recovers_layer_map_and_head_map(copied_pair, tmp_path: Path) -> None:
    plan = calibrate(config_of(copied_pair.pair, tmp_path / "guide.safetensors", top_p=0.8))
    assert tuple(layer.sender_layer for layer in plan.layers) == copied_pair.parents
    assert {layer.mode for layer in plan.layers} == {Mode.GUIDE}
    for number, heads in enumerate(copied_pair.heads):
        expected = torch.nn.functional.one_hot(torch.tensor(heads), 4).float()
        torch.testing.assert_close(plan.head_map[number], expected, rtol=0, atol=2e-3)
        assert plan.layers[number].error < 1e-2
        assert plan.layers[number].top_p == 0.8


def test_translate_with_one_head_picks_the_right_head(copied_pair, tmp_path: Path) -> None:
    config = config_of(
        copied_pair.pair, tmp_path / "t.safetensors", mode=Mode.TRANSLATE, heads_per_head=1, tile_dtype="bf16"
    )
    plan = calibrate(config)
    assert plan.tile_dtype == "bf16"
    for number, heads in enumerate(copied_pair.heads):
        assert plan.layers[number].mode is Mode.TRANSLATE
        assert plan.layers[number].sender_layer == copied_pair.parents[number]
        assert plan.head_index[number].flatten().tolist() == list(heads)
        torch.testing.assert_close(plan.head_weight[number], torch.ones(6, 1), rtol=0, atol=2e-3)


def test_a_fraction_of_the_rows_finds_the_same_parents(copied_pair, tmp_path: Path) -> None:
    plan = calibrate(config_of(copied_pair.pair, tmp_path / "few.safetensors", row_fraction=0.1))
    assert tuple(layer.sender_layer for layer in plan.layers) == copied_pair.parents


def test_plan_describes_the_pair_and_survives_the_file(pair, tmp_path: Path) -> None:
    out = tmp_path / "pair.safetensors"
    seen: list[Progress] = []
    plan = calibrate(config_of(pair, out, first_layer=1, chunk_tokens=128, sink_blocks=2, local_blocks=3), seen.append)
    loaded = load_plan(out)
    assert same(plan, loaded) and loaded.name == "pair"
    assert (plan.chunk_tokens, plan.block) == (128, 64)
    sender, receiver = plan.sender, plan.receiver
    assert (sender.num_layers, sender.num_heads, sender.num_kv_heads, sender.head_dim) == (4, 4, 2, 8)
    assert (receiver.num_layers, receiver.num_heads, receiver.num_kv_heads, receiver.head_dim) == (3, 6, 3, 12)
    assert sender.name == "sender" and receiver.name == "receiver" and sender.revision != receiver.revision
    assert [layer.mode for layer in plan.layers] == [Mode.COMPUTE, Mode.GUIDE, Mode.GUIDE]
    assert all(0 < layer.error <= 1 and layer.sink_blocks == 2 and layer.local_blocks == 3 for layer in plan.layers[1:])
    assert [entry.name for entry in tmp_path.iterdir()] == ["pair.safetensors"]
    assert [progress.done for progress in seen] == [0, 0, 1, 2, 3, 4]
    assert [progress.note for progress in seen] == ["", "loading the models", "", "", "", ""]
    assert {progress.total for progress in seen} == {4}
    assert seen[1].remaining_s is None and seen[2].remaining_s and seen[-1].remaining_s == 0


class Interrupted(Exception):
    """Stands for Ctrl-C."""


def interrupt_after(documents: int):
    def progress(state: Progress) -> None:
        if state.done == documents:
            raise Interrupted

    return progress


def test_an_interrupted_run_resumes_to_the_identical_plan(pair, tmp_path: Path) -> None:
    whole = calibrate(config_of(pair, tmp_path / "whole.safetensors"))
    config = config_of(pair, tmp_path / "resumed.safetensors")
    with pytest.raises(Interrupted):
        calibrate(config, interrupt_after(2))
    assert config.checkpoint.name == "resumed.partial.safetensors"
    assert config.checkpoint.exists() and not config.out.exists()
    seen: list[Progress] = []
    resumed = calibrate(config, seen.append)
    assert [progress.done for progress in seen] == [2, 2, 3, 4]
    assert "resuming after 2 documents" in seen[0].note
    assert same(whole, resumed)
    assert not config.checkpoint.exists()


def test_a_checkpoint_of_another_run_is_discarded_with_a_word(pair, tmp_path: Path) -> None:
    config = config_of(pair, tmp_path / "p.safetensors")
    with pytest.raises(Interrupted):
        calibrate(config, interrupt_after(3))
    seen: list[Progress] = []
    changed = replace(config, row_fraction=0.5)
    plan = calibrate(changed, seen.append)
    assert seen[0].done == 0
    assert "p.partial.safetensors was left by a run with other models, texts or options" in seen[0].note
    assert same(plan, calibrate(replace(changed, out=tmp_path / "fresh.safetensors")))


def test_different_tokenizers_are_refused_by_their_first_difference(
    pair, tmp_path: Path, tokenizer_with_swapped_ids
) -> None:
    other = tmp_path / "other"
    transformers.LlamaForCausalLM.from_pretrained(str(pair.receiver)).save_pretrained(str(other))
    tokenizer_with_swapped_ids(other)
    with pytest.raises(CalibrationError, match=r"the tokenizers of .*sender and .*other differ: .*w7") as caught:
        calibrate(replace(config_of(pair, tmp_path / "p.safetensors"), receiver=other))
    assert "\n" not in str(caught.value)


def test_too_little_text_is_refused(pair, tmp_path: Path, texts_of) -> None:
    config = config_of(pair, tmp_path / "p.safetensors", texts=texts_of(200, 40), chunk_tokens=128)
    message = r"holds 200 usable tokens in 1 documents of at least 64; calibration needs 512: add texts"
    with pytest.raises(CalibrationError, match=message):
        calibrate(config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"texts": Path("nowhere.jsonl")}, "texts file nowhere.jsonl does not exist"),
        ({"sender": Path("nowhere")}, "model directory nowhere does not exist"),
        ({"out": Path("nowhere/p.safetensors")}, "the plan's folder nowhere does not exist"),
        ({"first_layer": 3}, "first_layer 3 leaves no layer to reuse: the receiver has 3 layers"),
        ({"mode": Mode.TRANSLATE, "heads_per_head": 5}, "heads_per_head is 5 but the sender has 4 heads"),
    ],
)
def test_bad_input_is_named(pair, tmp_path: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(CalibrationError, match=message):
        calibrate(replace(config_of(pair, tmp_path / "p.safetensors"), **changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mode": Mode.STATIC}, "mode must be guide or translate, got static"),
        ({"out": Path("p.bin")}, "must end in .safetensors, got p.bin"),
        ({"block": 96}, "block must be 64 or 128 tokens, got 96"),
        ({"chunk_tokens": 100}, r"multiple of the block \(64\), got 100"),
        ({"max_tokens": 10}, r"max_tokens must be at least one block \(64\), got 10"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\], got 0.0"),
        ({"row_fraction": 1.5}, r"row_fraction must be in \(0, 1\], got 1.5"),
        ({"first_layer": -1}, "first_layer must be at least 0, got -1"),
        ({"local_blocks": 0}, "local_blocks must be at least 1, got 0"),
        ({"dtype": "int8"}, "dtype must be one of float32, bfloat16, float16, got int8"),
        ({"tile_dtype": "fp4"}, "tile_dtype must be e4m3 or bf16, got fp4"),
        ({"heads_per_head": 2}, "heads_per_head is for translate"),
    ],
)
def test_bad_values_are_named(changes: dict[str, object], message: str) -> None:
    fine = CalibrationConfig(sender=Path("s"), receiver=Path("r"), texts=Path("t.jsonl"), out=Path("p.safetensors"))
    with pytest.raises(CalibrationError, match=message):
        replace(fine, **changes)


@pytest.mark.parametrize(("num_layers", "first"), [(2, 1), (6, 1), (12, 2), (18, 3), (36, 3)])
def test_default_first_layer_grows_with_depth(num_layers: int, first: int) -> None:
    config = CalibrationConfig(sender=Path("s"), receiver=Path("r"), texts=Path("t.jsonl"), out=Path("p.safetensors"))
    assert config.resolve_first_layer(num_layers) == first


def test_messages_and_plain_text_are_read(pair, tmp_path: Path, texts_of) -> None:
    words = [json.loads(line)["text"] for line in texts_of(300, 280).read_text(encoding="utf-8").splitlines()]
    chat = tmp_path / "chat.jsonl"
    lines = [json.dumps({"messages": [{"role": "user", "content": text}]}) for text in words]
    chat.write_text("\n".join(lines), encoding="utf-8")
    plain = tmp_path / "plain.txt"
    plain.write_text(" ".join(words), encoding="utf-8")
    for texts, expected in ((chat, 2), (plain, 3)):
        seen: list[Progress] = []
        calibrate(config_of(pair, tmp_path / f"{texts.stem}.safetensors", texts=texts, max_tokens=256), seen.append)
        assert seen[-1].total == expected  # the third of the plain text is its rest of 68 tokens


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{not json", "line 1 is not JSON"),
        ('{"body": "w1"}', 'line 1 needs a "text" or a "messages" field'),
        ('{"text": 5}', 'line 1: "text" must be a string, got int'),
    ],
)
def test_bad_lines_are_named(pair, tmp_path: Path, line: str, message: str) -> None:
    texts = tmp_path / "bad.jsonl"
    texts.write_text(line + "\n", encoding="utf-8")
    with pytest.raises(CalibrationError, match=message):
        calibrate(config_of(pair, tmp_path / "p.safetensors", texts=texts))


def test_inspect_shows_every_layer(pair, tmp_path: Path) -> None:
    plan = calibrate(
        config_of(pair, tmp_path / "shown.safetensors", mode=Mode.TRANSLATE, heads_per_head=2, first_layer=1)
    )
    console = Console(width=140, record=True, file=None, quiet=False)
    with console.capture() as capture:
        console.print(plan_table(plan))
    text = capture.get()
    for part in (plan.sender.model_id, plan.receiver.model_id, plan.tokenizer_fingerprint, "chunk 64", plan.digest):
        assert part in text
    assert text.count("│ translate") == 2 and text.count("│ compute") == 1
    assert f"{plan.layers[2].error:.3f}" in text
