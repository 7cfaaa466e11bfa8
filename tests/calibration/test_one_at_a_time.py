"""Pairs too large to be in memory together: one model at a time, the same results."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from mapflow.calibration import pair_models  # noqa: E402
from mapflow.calibration.calibrate import calibrate  # noqa: E402
from mapflow.calibration.config import CalibrationConfig  # noqa: E402
from mapflow.calibration.evaluate import evaluate  # noqa: E402
from mapflow.calibration.evaluation_config import EvaluationConfig  # noqa: E402
from mapflow.calibration.models import load_model  # noqa: E402
from mapflow.calibration.progress import Progress  # noqa: E402
from mapflow.connector.plan import Mode  # noqa: E402


class Loads:
    """Notes the models that are loaded, and checks that no other is alive then."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        self._alive: list[weakref.ref[Any]] = []
        monkeypatch.setattr(pair_models, "load_model", self._load)

    def _load(self, facts: Any, **options: Any) -> Any:
        gc.collect()
        assert all(one() is None for one in self._alive), "two models in memory"
        self.names.append(facts.directory.name)
        model = load_model(facts, **options)
        self._alive.append(weakref.ref(model))
        return model


def config_of(pair, folder: Path, **changes: object) -> CalibrationConfig:
    folder.mkdir(exist_ok=True)
    config = CalibrationConfig(
        sender=pair.sender,
        receiver=pair.receiver,
        texts=pair.texts,
        out=folder / "plan.safetensors",
        chunk_tokens=64,
        row_fraction=0.5,
    )
    return replace(config, **changes)


def test_each_model_is_loaded_once_for_the_fit(pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both = calibrate(config_of(pair, tmp_path / "both"))
    loads = Loads(monkeypatch)
    seen: list[Progress] = []
    alone = calibrate(config_of(pair, tmp_path / "alone", one_at_a_time=True), seen.append)
    assert alone.digest == both.digest and loads.names == ["receiver", "sender"]
    assert [one.done for one in seen if "receiver" in one.stage] == [1, 2, 3, 4]
    assert [path.name for path in (tmp_path / "alone").iterdir()] == ["plan.safetensors"]


@pytest.mark.parametrize("changes", [{"max_kl": 0.05}, {"mode": Mode.TRANSLATE, "tune_steps": 8}])
def test_judged_plans_are_the_same(
    pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    both = calibrate(config_of(pair, tmp_path / "both", **changes))
    loads = Loads(monkeypatch)
    alone = calibrate(config_of(pair, tmp_path / "alone", one_at_a_time=True, **changes))
    assert alone.digest == both.digest and set(loads.names) == {"sender", "receiver"}


def test_an_interrupted_fit_goes_on(pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the receiver left is not made again."""
    config = config_of(pair, tmp_path / "alone", one_at_a_time=True)

    def stop(progress: Progress) -> None:
        if progress.stage == "documents" and progress.done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate(config, stop)
    assert config.spool.is_dir()
    loads = Loads(monkeypatch)
    assert calibrate(config).digest == calibrate(config_of(pair, tmp_path / "both", one_at_a_time=True)).digest
    assert loads.names[0] == "sender" and not config.spool.exists()


def test_what_another_run_left_is_not_used(pair, tmp_path: Path) -> None:
    config = config_of(pair, tmp_path / "alone", one_at_a_time=True)
    config.spool.mkdir()
    (config.spool / "digest").write_text("of another calibration")
    (config.spool / "0.safetensors").write_text("nonsense")
    assert calibrate(config).digest == calibrate(config_of(pair, tmp_path / "both")).digest


def test_evaluation(pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, texts_of: Callable[..., Path]) -> None:
    plan = calibrate(config_of(pair, tmp_path / "both"))
    config = EvaluationConfig(sender=pair.sender, receiver=pair.receiver, texts=texts_of(330, 330, seed=9))
    wanted = evaluate(config, [plan])
    loads = Loads(monkeypatch)
    assert evaluate(replace(config, one_at_a_time=True), [plan]) == wanted
    assert loads.names == ["sender", "receiver", "sender", "receiver"]
