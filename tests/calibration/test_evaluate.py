"""Whole evaluations on real tiny models: equal to no reuse where they must be, ordered where the truth is known."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
from typer.testing import CliRunner  # noqa: E402

from mapflow.calibration.calibrate import calibrate  # noqa: E402
from mapflow.calibration.config import CalibrationConfig, CalibrationError  # noqa: E402
from mapflow.calibration.evaluate import evaluate, from_layer  # noqa: E402
from mapflow.calibration.evaluation_config import EvaluationConfig  # noqa: E402
from mapflow.calibration.quality import Quality, compare, estimate  # noqa: E402
from mapflow.calibration.retrieval import Task  # noqa: E402
from mapflow.calibration.reuse_runs import Run  # noqa: E402
from mapflow.cli.main import app  # noqa: E402
from mapflow.connector.plan import Mode, Plan, with_top_p  # noqa: E402


def plan_of(pair, folder: Path, **changes: object) -> Plan:
    config = CalibrationConfig(
        sender=pair.sender,
        receiver=pair.receiver,
        texts=pair.texts,
        out=folder / f"{changes.get('mode', Mode.GUIDE)}.safetensors",
        chunk_tokens=64,
        first_layer=0,
    )
    return calibrate(replace(config, **changes))


def evaluation(pair, texts: Path) -> EvaluationConfig:
    return EvaluationConfig(sender=pair.sender, receiver=pair.receiver, texts=texts)


def test_guide_that_keeps_everything_equals_no_reuse(pair, tmp_path: Path, texts_of) -> None:
    plan = plan_of(pair, tmp_path, top_p=1.0)
    (judged,) = evaluate(evaluation(pair, texts_of(330, 200, seed=9)), [plan])
    assert set(judged.quality) == set(Run)
    for quality in judged.quality.values():
        assert abs(quality.prefix_kl) < 1e-6 and abs(quality.suffix_kl) < 1e-6
        assert quality.prefix_top1 == quality.suffix_top1 == quality.density == 1.0


def test_compute_everywhere_is_exact(pair, tmp_path: Path, texts_of) -> None:
    (judged,) = evaluate(evaluation(pair, texts_of(330, seed=9)), [from_layer(plan_of(pair, tmp_path), 3)])
    assert judged.quality[Run.PLAN].prefix_kl == judged.quality[Run.PLAN].suffix_kl == 0.0
    assert Run.ORACLE not in judged.quality


def test_dropping_blocks_costs_quality_and_lowers_density(pair, tmp_path: Path, texts_of) -> None:
    plan = plan_of(pair, tmp_path, local_blocks=1)
    plans = [with_top_p(plan, 0.7), with_top_p(plan, 0.3)]
    loose, tight = evaluate(evaluation(pair, texts_of(600, seed=9)), plans)
    assert tight.quality[Run.PLAN].density < loose.quality[Run.PLAN].density < 1.0
    assert tight.quality[Run.PLAN].prefix_kl > loose.quality[Run.PLAN].prefix_kl > 0.0
    for run in (Run.STATIC, Run.ONLINE):
        assert tight.quality[run].density >= tight.quality[Run.PLAN].density


def test_copied_heads_guide_as_well_as_the_receivers_own(copied_pair, tmp_path: Path, texts_of) -> None:
    plan = plan_of(copied_pair.pair, tmp_path, top_p=0.6)
    (judged,) = evaluate(evaluation(copied_pair.pair, texts_of(600, seed=9)), [plan])
    found = judged.quality
    assert found[Run.PLAN].density == pytest.approx(found[Run.ORACLE].density, abs=0.02)
    assert 0.3 < found[Run.PLAN].density < 0.95


def test_maps_of_another_text_are_others(pair, tmp_path: Path, texts_of) -> None:
    """The first text has no other, and one that is longer than the text before it neither."""
    plan = plan_of(pair, tmp_path, top_p=0.4, local_blocks=1)
    (judged,) = evaluate(evaluation(pair, texts_of(600, 600, 300, 600, seed=9)), [plan])
    assert judged.quality[Run.OTHER_TEXT].num_documents == 2 and judged.quality[Run.PLAN].num_documents == 4
    (alone,) = evaluate(evaluation(pair, texts_of(600, 600, seed=9)), [plan])
    other = alone.quality[Run.OTHER_TEXT]
    assert other.num_documents == 1 and other.prefix_kl > 0
    assert other.density != pytest.approx(alone.quality[Run.PLAN].density, rel=1e-6)


def test_compare_against_a_loop_over_rows() -> None:
    generator = torch.Generator().manual_seed(1)
    exact, reused = (torch.randn(7, 11, generator=generator) for _ in range(2))
    next_ids = [3, 1, 4, 1, 5, 9]  # none behind the last row
    quality = compare(exact, reused, next_ids, 4, 0.5)
    losses = [
        float((exact[row].log_softmax(0) - reused[row].log_softmax(0))[token]) for row, token in enumerate(next_ids)
    ]
    assert quality.prefix_loss_rise == pytest.approx(sum(losses[:4]) / 4, rel=1e-4)
    assert quality.suffix_loss_rise == pytest.approx(sum(losses[4:]) / 2, rel=1e-4)
    kls = [
        float(
            torch.distributions.kl_divergence(
                *(torch.distributions.Categorical(logits=x[row]) for x in (exact, reused))
            )
        )
        for row in range(7)
    ]
    same = [int(exact[row].argmax()) == int(reused[row].argmax()) for row in range(7)]
    assert quality.prefix_kl == pytest.approx(sum(kls[:4]) / 4, rel=1e-5)
    assert quality.suffix_kl == pytest.approx(sum(kls[4:]) / 3, rel=1e-5)
    assert (quality.prefix_top1, quality.suffix_top1) == (sum(same[:4]) / 4, pytest.approx(sum(same[4:]) / 3))


def test_an_average_says_how_far_it_may_be_off() -> None:
    """About as the normal approximation does, where that holds; a point for one document."""
    generator = torch.Generator().manual_seed(2)
    draws = torch.rand(200, generator=generator).tolist()
    rest = {"prefix_loss_rise": 0.0, "suffix_top1": 0.5, "suffix_loss_rise": 0.0, "density": 0.1}
    qualities = [Quality(prefix_kl=x, prefix_top1=1 - x, suffix_kl=2 * x, **rest) for x in draws]
    found = estimate(qualities)
    average, error = sum(draws) / 200, 1.96 * float(torch.tensor(draws).std()) / 200**0.5
    assert found.prefix_kl == pytest.approx(average) and found.num_documents == 200
    assert found.low.prefix_kl == pytest.approx(average - error, abs=0.006)
    assert found.high.prefix_kl == pytest.approx(average + error, abs=0.006)
    assert found.high.suffix_kl == pytest.approx(2 * found.high.prefix_kl)
    assert found.low.prefix_top1 == pytest.approx(1 - found.high.prefix_kl)
    assert found.low.density == found.high.density == pytest.approx(0.1)
    alone = estimate(qualities[:1])
    assert alone.low.prefix_kl == alone.prefix_kl == alone.high.prefix_kl


def test_an_interrupted_evaluation_goes_on(pair, tmp_path: Path, texts_of) -> None:
    """It runs only what is missing, other texts' maps included, and ends in the same figures."""
    plan = plan_of(pair, tmp_path, top_p=0.4, local_blocks=1)
    config = replace(evaluation(pair, texts_of(600, 600, 600, seed=9)), samples_per_task=1)
    whole, resume = evaluate(config, [plan]), tmp_path / "partial.jsonl"

    for seen in (2, 5):
        with pytest.raises(KeyboardInterrupt):
            evaluate(config, [plan], _stop_at(seen), resume)
        kept = resume.read_text().splitlines()
        assert len(kept) == 1 + seen
        resume.write_text("\n".join([*kept, kept[-1][:20]]))  # cut off while it was written
    assert evaluate(config, [plan], resume=resume) == whole
    assert evaluate(replace(config, prefix_rows=64), [plan], resume=resume) != whole, "of other rows nothing is known"


def _stop_at(text: int) -> Callable[[int, int], None]:
    def stop(done: int, total: int) -> None:
        if done == text:
            raise KeyboardInterrupt

    return stop


def test_plans_of_other_models_and_short_texts_are_refused(pair, copied_pair, tmp_path: Path, texts_of) -> None:
    plan = plan_of(pair, tmp_path)
    with pytest.raises(CalibrationError, match=r"plan guide was made for sender@.* is sender@"):
        evaluate(evaluation(copied_pair.pair, texts_of(330, seed=9)), [plan])
    with pytest.raises(CalibrationError, match="holds no document of at least 128 tokens"):
        evaluate(evaluation(pair, texts_of(100, seed=8)), [plan])


def test_command_prints_a_row_for_every_setting(pair, tmp_path: Path, texts_of) -> None:
    plan_of(pair, tmp_path, mode=Mode.TRANSLATE, heads_per_head=2)
    common = ["--sender", str(pair.sender), "--receiver", str(pair.receiver), "--texts", str(texts_of(700, seed=9))]
    sweep = ["--top-p", "0.5", "--top-p", "0.9", "--first-layer", "1", "--first-layer", "2", "--retrieval", "1"]
    invoke = CliRunner().invoke
    out = ["--out", str(tmp_path / "quality.json")]
    done = invoke(app, ["evaluate", str(tmp_path / "translate.safetensors"), *common, *sweep, *out])
    assert done.exit_code == 0, done.output
    assert done.stdout.count(" 1, .9 ") == done.stdout.count(" 2, .5 ") == 3, "the plan, static, online"
    assert done.stdout.count("multi_key") == 4
    assert "a prefill of 16,384 tokens" in done.stdout and "1 compute, 2 translate" in done.stdout
    cases = json.loads((tmp_path / "quality.json").read_text())["cases"]
    assert [case["method"] for case in cases] == 4 * ["translate", "static", "online"]
    assert {case["from_layer"] for case in cases} == {1, 2}
    assert all(case["low"] <= case["prefix_kl"] <= case["high"] and case["prefix"] == 576 for case in cases)
    assert all(set(case["retrieval"]) == set(Task) for case in cases)
    costs = [case for case in cases if case["method"] == "translate"]
    assert all("estimated_ms" not in case for case in cases if case not in costs)
    assert costs[0]["map_bytes"] < costs[2]["map_bytes"], "more of each map crosses at 0.9 than at 0.5"
    assert costs[1]["map_bytes"] < costs[0]["map_bytes"], "and fewer layers from 2 on"
    lost = invoke(app, ["evaluate", str(tmp_path / "translate.safetensors"), *common, "--out", "/nowhere/at/all.json"])
    assert lost.exit_code == 2 and "/nowhere/at, where all.json is to be written" in lost.stderr
    gone = invoke(app, ["evaluate", str(tmp_path / "absent.safetensors"), *common])
    assert gone.exit_code == 2 and "absent.safetensors does not exist" in gone.stderr
    short = invoke(app, ["evaluate", str(tmp_path / "translate.safetensors"), *common, "--dtype", "int8"])
    assert short.exit_code == 2 and "dtype must be one of" in short.stderr
