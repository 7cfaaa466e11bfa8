"""Models of which some layers have a sliding window, on either side: those layers are neither read nor reused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from mapflow.calibration.calibrate import calibrate  # noqa: E402
from mapflow.calibration.config import CalibrationConfig, CalibrationError  # noqa: E402
from mapflow.calibration.evaluate import evaluate  # noqa: E402
from mapflow.calibration.evaluation_config import EvaluationConfig  # noqa: E402
from mapflow.calibration.reuse_runs import Run  # noqa: E402
from mapflow.connector.plan import Mode, Plan  # noqa: E402

from .conftest import NUM_WORDS, SENDER, Pair, llama, write_tokenizer  # noqa: E402

SLIDING, FULL = "sliding_attention", "full_attention"


def qwen(directory: Path, kinds: list[str]) -> Path:
    """Random weights, another RoPE than Llama's, norms on queries and keys, a window of 24 tokens where they slide."""
    torch.manual_seed(11)
    config = transformers.Qwen3Config(
        vocab_size=NUM_WORDS + 3,
        hidden_size=40,
        intermediate_size=48,
        num_hidden_layers=len(kinds),
        num_attention_heads=5,
        num_key_value_heads=1,
        head_dim=8,
        rope_theta=500_000.0,
        use_sliding_window=True,
        sliding_window=24,
        layer_types=kinds,
        tie_word_embeddings=False,
    )
    transformers.Qwen3ForCausalLM(config).save_pretrained(str(directory))
    write_tokenizer(directory)
    return directory


@pytest.fixture
def fitted(tmp_path: Path, texts_of: Callable[..., Path]) -> Callable[[Path, Path], tuple[Pair, Plan]]:
    """A plan for two models that guides all it may."""

    def fit(sender: Path, receiver: Path) -> tuple[Pair, Plan]:
        pair = Pair(sender=sender, receiver=receiver, texts=texts_of(300, 280, seed=2))
        out = tmp_path / "plan.safetensors"
        config = CalibrationConfig(**asdict(pair), out=out, chunk_tokens=64, first_layer=0)
        return pair, calibrate(config)

    return fit


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A Llama of four layers with full attention."""
    llama(7, **SENDER).save_pretrained(str(tmp_path / "llama"))
    write_tokenizer(tmp_path / "llama")
    return tmp_path / "llama"


def test_a_receivers_sliding_layers_are_computed(tmp_path: Path, other: Path, fitted, texts_of) -> None:
    pair, plan = fitted(other, qwen(tmp_path / "qwen", [SLIDING, FULL, SLIDING, FULL]))
    assert [layer.mode for layer in plan.layers] == [Mode.COMPUTE, Mode.GUIDE, Mode.COMPUTE, Mode.GUIDE]
    assert set(plan.head_map) == {1, 3}
    config = EvaluationConfig(**(asdict(pair) | {"texts": texts_of(500, seed=9)}))
    (judged,) = evaluate(config, [plan])
    found = judged.quality[Run.PLAN]
    assert 0.0 < found.prefix_kl < 1.0 and 0.0 < found.density < 1.0


def test_a_senders_sliding_layers_are_not_read(tmp_path: Path, other: Path, fitted) -> None:
    """The engine publishes none of them."""
    _, plan = fitted(qwen(tmp_path / "qwen", [SLIDING, FULL, SLIDING, FULL]), other)
    assert {layer.mode for layer in plan.layers} == {Mode.GUIDE}
    assert set(plan.map_layers) <= {1, 3}


@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_a_model_without_full_attention_is_refused(tmp_path: Path, other: Path, fitted, side: str) -> None:
    models = {"sender": other, "receiver": other} | {side: qwen(tmp_path / "qwen", [SLIDING] * 3)}
    with pytest.raises(CalibrationError, match="qwen has no layer with full attention to share"):
        fitted(models["sender"], models["receiver"])
