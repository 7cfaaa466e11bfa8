"""Tuned head weights bring the receiver closer to itself, on texts that were not tuned on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from mapflow.calibration.attention import ObservedModel  # noqa: E402
from mapflow.calibration.calibrate import calibrate  # noqa: E402
from mapflow.calibration.config import CalibrationConfig, CalibrationError  # noqa: E402
from mapflow.calibration.evaluate import evaluate  # noqa: E402
from mapflow.calibration.evaluation_config import EvaluationConfig  # noqa: E402
from mapflow.calibration.models import read_facts  # noqa: E402
from mapflow.calibration.pair_models import PairModels  # noqa: E402
from mapflow.calibration.progress import Progress  # noqa: E402
from mapflow.calibration.reuse import Recorder, ReuseAttention  # noqa: E402
from mapflow.calibration.reuse_runs import Run  # noqa: E402
from mapflow.calibration.texts import load_tokenizer, read_documents  # noqa: E402
from mapflow.calibration.tuning import TuningConfig, _Piece, _Translated, pieces, tune  # noqa: E402
from mapflow.connector.plan import Mode, Plan  # noqa: E402


def config_of(pair, folder: Path, **changes: object) -> CalibrationConfig:
    config = CalibrationConfig(
        sender=pair.sender,
        receiver=pair.receiver,
        texts=pair.texts,
        out=folder / "plan.safetensors",
        mode=Mode.TRANSLATE,
        heads_per_head=2,
        top_p=0.7,
        chunk_tokens=64,
        first_layer=1,
    )
    return replace(config, **changes)


def models_of(pair) -> tuple[ObservedModel, ObservedModel]:
    return PairModels(read_facts(pair.sender), read_facts(pair.receiver), device="cpu", dtype="float32").both


def documents_of(pair, texts: Path) -> list[list[int]]:
    return read_documents(texts, load_tokenizer(pair.receiver), max_tokens=256)


def test_tuned_through_the_reuse_that_is_judged(pair, tmp_path: Path, texts_of: Callable[..., Path]) -> None:
    """Before the first step the differentiable pass gives what `ReuseAttention` gives."""
    plan = calibrate(config_of(pair, tmp_path))
    sender, receiver = models_of(pair)
    (ids,) = documents_of(pair, texts_of(256, seed=5))
    text = _Piece(plan, sender, ids, TuningConfig(steps=1))
    recorder = Recorder(frozenset(plan.map_layers), num_rows=len(ids), block=plan.block)
    sender.run(ids, recorder)
    wanted = receiver.run(ids, ReuseAttention(plan, recorder.records, num_rows=len(ids)), logits_from=0)
    dense = {
        layer: torch.zeros(weight.shape[0], plan.sender.num_heads).scatter(1, plan.head_index[layer].long(), weight)
        for layer, weight in plan.head_weight.items()
    }
    got = receiver.run_for_gradients(ids, _Translated(text.tiles, dense), logits_from=0)
    torch.testing.assert_close(got, wanted.clone(), atol=1e-4, rtol=1e-4)


def test_pieces_of_texts() -> None:
    """The first of every text before the second of any, whole blocks, and no short rests."""
    texts = [list(range(2600)), list(range(1000)), list(range(300)), list(range(50))]
    found = pieces(texts, 64, TuningConfig(steps=1))
    assert [(len(one), one[0]) for one in found] == [(1024, 0), (960, 0), (1024, 1024), (512, 2048)]
    assert len(pieces(texts, 64, TuningConfig(steps=1, max_pieces=3))) == 3
    assert [len(one) for one in pieces([list(range(200))], 64, TuningConfig(steps=1))] == [192]
    assert pieces([list(range(50))], 64, TuningConfig(steps=1)) == []


def kl_of(pair, plan: Plan, texts: Path) -> float:
    config = EvaluationConfig(sender=pair.sender, receiver=pair.receiver, texts=texts, suffix_tokens=2)
    (judged,) = evaluate(config, [plan])
    return judged.quality[Run.PLAN].prefix_kl


def test_weights_that_are_off_are_found_again(pair, tmp_path: Path, texts_of: Callable[..., Path]) -> None:
    """Judged by `mapflow evaluate`'s own runs, on texts that neither tuned nor chose."""
    plan = calibrate(config_of(pair, tmp_path))
    off = replace(plan, head_weight={layer: 0.5 * weight for layer, weight in plan.head_weight.items()})
    documents = documents_of(pair, texts_of(*[256] * 6, seed=6))
    tuned = tune(off, *models_of(pair), documents[:4], documents[4:], TuningConfig(steps=32, rate=0.05))
    other = texts_of(258, 258, 258, seed=7)
    fitted, halved, found = (kl_of(pair, one, other) for one in (plan, off, tuned))
    assert found - fitted < 0.5 * (halved - fitted), "most of the way back"
    assert tuned.head_index == off.head_index and tuned.layers == off.layers


def test_calibrate_tunes(pair, tmp_path: Path, texts_of: Callable[..., Path]) -> None:
    texts = texts_of(*[258] * 8, seed=6)
    plain = calibrate(config_of(pair, tmp_path, texts=texts))
    seen: list[Progress] = []
    tuned = calibrate(config_of(pair, tmp_path, texts=texts, tune_steps=24), seen.append)
    other = texts_of(258, 258, 258, seed=7)
    assert kl_of(pair, tuned, other) < kl_of(pair, plain, other)
    tuning = [one for one in seen if one.stage == "tuning"]
    assert [one.done for one in tuning] == [0, 8, 16, 24] and tuning[-1].remaining_s == 0.0


def test_worse_weights_are_not_kept(pair, tmp_path: Path, texts_of: Callable[..., Path]) -> None:
    """At an absurd rate."""
    plan = calibrate(config_of(pair, tmp_path))
    documents = documents_of(pair, texts_of(200, 200, seed=8))
    models = models_of(pair)
    same = tune(plan, *models, documents[:1], documents[1:], TuningConfig(steps=3, rate=50.0))
    assert same.digest == plan.digest


def test_a_plan_that_translates_nothing_stays(pair, tmp_path: Path) -> None:
    plan = calibrate(config_of(pair, tmp_path, mode=Mode.GUIDE, heads_per_head=None))
    assert tune(plan, *models_of(pair), [], [], TuningConfig(steps=5)) is plan


def test_what_cannot_be_tuned_is_refused(pair, tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="tune_steps is for translate"):
        config_of(pair, tmp_path, mode=Mode.GUIDE, heads_per_head=None, tune_steps=5)
    with pytest.raises(CalibrationError, match="tune_steps must be at least 0, got -1"):
        config_of(pair, tmp_path, tune_steps=-1)
    with pytest.raises(CalibrationError, match=r"tune_tokens must be at least one block \(64\), got 32"):
        config_of(pair, tmp_path, tune_tokens=32)
