"""`calibrate` with a budget, on real tiny models: what was asked for is kept, and what was seen is written down."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from mapflow.calibration.calibrate import calibrate  # noqa: E402
from mapflow.calibration.config import CalibrationConfig, CalibrationError  # noqa: E402
from mapflow.calibration.planned_run import frontier_file  # noqa: E402
from mapflow.calibration.progress import Progress  # noqa: E402
from mapflow.connector.plan import Mode, load_plan  # noqa: E402

from .conftest import write_texts  # noqa: E402


def config_of(pair, folder: Path, **changes: object) -> CalibrationConfig:
    texts = write_texts(folder / "long.jsonl", [700, 640, 650, 660], seed=3)
    base = CalibrationConfig(
        sender=pair.sender,
        receiver=pair.receiver,
        texts=texts,
        out=folder / "plan.safetensors",
        chunk_tokens=64,
        first_layer=1,
        context=1 << 20,  # where attention is worth saving in a model this small
    )
    return replace(base, **changes)


def test_a_damage_that_is_kept(pair, tmp_path: Path) -> None:
    config = config_of(pair, tmp_path, max_kl=0.02)
    seen: list[Progress] = []
    plan = calibrate(config, seen.append)
    found = json.loads(frontier_file(config.out).read_text())
    assert found["chosen"]["measured_kl"] <= 0.02
    assert load_plan(config.out).digest == plan.digest
    modes = {int(number): mode for number, mode in found["chosen"]["modes"].items()}
    assert {number: plan.layers[number].mode.value for number in modes} == modes and set(modes) == {1, 2}
    assert plan.layers[0].mode is Mode.COMPUTE
    assert found["frontier"][0]["measured_kl"] == 0.0
    assert found["frontier"][0]["prefill_ms"] == pytest.approx(found["full_prefill_ms"])
    assert len(found["options"]["1"]) == 1 + 4 + 5 + 3
    assert found["frontier"][-1]["measured_kl"] > 0.02, "or the budget says nothing"
    assert any("held-out" in one.note for one in seen)
    runs = [one for one in seen if one.stage == "single layers"]
    assert runs[-1].done == runs[-1].total == 2 * 12 and runs[-1].remaining_s == 0.0


def test_options_harm_less_the_more_they_keep(pair, tmp_path: Path) -> None:
    config = config_of(pair, tmp_path, max_kl=0.0)
    plan = calibrate(config)
    assert all(layer.mode is Mode.COMPUTE for layer in plan.layers)
    for options in json.loads(frontier_file(config.out).read_text())["options"].values():
        guided = [one for one in options if one["mode"] == "guide"]
        assert [one["top_p"] for one in guided] == [0.4, 0.5, 0.6, 0.7, 0.8]
        assert guided[0]["damage"] > guided[-1]["damage"] >= 0.0
        assert guided[0]["density"] < guided[-1]["density"] <= 1.0
        assert all(one["num_bytes"] == 0 for one in options if one["mode"] in ("static", "compute"))


def test_an_interrupted_run_goes_on(pair, tmp_path: Path) -> None:
    """It makes the runs that are missing, ends in the same plan, and leaves nothing behind."""
    whole = calibrate(config_of(pair, tmp_path, max_kl=0.02))
    config = config_of(pair, tmp_path, max_kl=0.02, out=tmp_path / "again" / "plan.safetensors")
    config.out.parent.mkdir()

    def stop(progress: Progress) -> None:
        if progress.stage == "single layers" and progress.done == 7:
            raise KeyboardInterrupt

    def stop_again(progress: Progress) -> None:
        if progress.stage == "single layers" and progress.done == 11:
            raise KeyboardInterrupt

    for interrupt in (stop, stop_again):
        with pytest.raises(KeyboardInterrupt):
            calibrate(config, interrupt)
        kept = config.run_log.read_text()
        config.run_log.write_text(kept + '{"run": "0 1 gui')  # cut off while it was written
    seen: list[Progress] = []
    assert calibrate(config, seen.append).digest == whole.digest
    assert any("resuming after 11 of 24 runs" in one.note for one in seen)
    assert sorted(path.name for path in config.out.parent.iterdir()) == ["plan.frontier.json", "plan.safetensors"]


def test_runs_of_other_texts_are_made_again(pair, tmp_path: Path) -> None:
    config = config_of(pair, tmp_path, max_kl=0.02)
    config.run_log.write_text('{"digest": "of another calibration"}\n{"run": "0 1 guide", "outcome": [0, 0]}\n')
    seen: list[Progress] = []
    calibrate(config, seen.append)
    assert not any("resuming" in one.note for one in seen)


def test_a_time_that_is_kept(pair, tmp_path: Path) -> None:
    config = config_of(pair, tmp_path, target_ttft=0.7)
    calibrate(config)
    found = json.loads(frontier_file(config.out).read_text())
    assert found["chosen"]["prefill_ms"] <= 0.7 * found["full_prefill_ms"]
    assert found["chosen"]["measured_kl"] > 0.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_kl": 0.1, "target_ttft": 0.5}, "cannot both"),
        ({"max_kl": -0.1}, "max_kl .* got -0.1"),
        ({"target_ttft": 1.5}, r"target_ttft .* \(0, 1\], got 1.5"),
        ({"max_kl": 0.1, "context": 3}, "context .* got 3"),
    ],
)
def test_budgets_that_make_no_sense(pair, tmp_path: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(CalibrationError, match=message):
        config_of(pair, tmp_path, **changes)


def test_a_single_document_cannot_be_fitted_and_judged(pair, tmp_path: Path) -> None:
    config = config_of(pair, tmp_path, max_kl=0.1)
    write_texts(config.texts, [900])
    with pytest.raises(CalibrationError, match="1 usable document; a budget or tuning needs two"):
        calibrate(config)
