"""The plans beside the example pair: made for the very models and tokenizer there, and as good as the demo needs."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from mapflow.calibration.evaluate import evaluate
from mapflow.calibration.evaluation_config import EvaluationConfig
from mapflow.calibration.models import read_facts
from mapflow.calibration.reuse_runs import Run
from mapflow.connector.plan import Mode, load_plan
from mapflow.connector.tokenizer import tokenizer_fingerprint

EXAMPLES = Path(__file__).parents[2] / "examples"
PAIR = EXAMPLES / "pair"


@pytest.mark.parametrize("mode", [Mode.GUIDE, Mode.TRANSLATE])
def test_a_plan_names_the_models_beside_it(mode: Mode) -> None:
    plan = load_plan(PAIR / "plans" / f"{mode.value}.safetensors")
    assert read_facts(PAIR / "sender").spec == plan.sender
    assert read_facts(PAIR / "receiver").spec == plan.receiver
    assert tokenizer_fingerprint(PAIR / "receiver") == plan.tokenizer_fingerprint
    assert (plan.chunk_tokens, plan.block) == (128, 64)
    assert {layer.mode for layer in plan.layers} == {Mode.COMPUTE, mode}


@pytest.mark.slow
def test_guide_is_near_exact_and_better_than_static_and_translate() -> None:
    plans = [load_plan(PAIR / "plans" / f"{mode}.safetensors") for mode in ("guide", "translate")]
    texts = EXAMPLES / "conversations.jsonl"
    config = EvaluationConfig(
        sender=PAIR / "sender", receiver=PAIR / "receiver", texts=texts, max_tokens=3072, max_documents=2
    )
    guide, translate = evaluate(config, plans)
    for kind in ("prefix_kl", "suffix_kl"):
        assert getattr(guide.quality[Run.PLAN], kind) < 0.05
        assert getattr(guide.quality[Run.PLAN], kind) < getattr(translate.quality[Run.PLAN], kind)
    assert guide.quality[Run.PLAN].density < 0.5
    assert guide.quality[Run.PLAN].prefix_kl < guide.quality[Run.STATIC].prefix_kl
