"""The capturing attention function inside real transformers models, against their own eager attention."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from mapflow.calibration.attention import AttentionCall, ObservedModel  # noqa: E402
from mapflow.calibration.config import CalibrationError  # noqa: E402
from mapflow.calibration.models import load_model, read_facts  # noqa: E402

IDS = [(7 * n * n + 3 * n) % 90 + 3 for n in range(70)]


class Keep:
    """Exact attention; keeps the calls."""

    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []

    def attend(self, call: AttentionCall) -> torch.Tensor:
        self.calls.append(call)
        return call.output()


def eager(directory: Path) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(str(directory), attn_implementation="eager").eval()


@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_probabilities_and_logits_equal_eager_attention(pair, side: str) -> None:
    directory = getattr(pair, side)
    with torch.no_grad():
        expected = eager(directory)(torch.tensor([IDS]), use_cache=False, output_attentions=True)
    keep = Keep()
    model = ObservedModel(load_model(read_facts(directory), device="cpu", dtype="float32"))
    logits = model.run(IDS, keep, logits_from=20)
    torch.testing.assert_close(logits, expected.logits[0, 20:], rtol=1e-4, atol=1e-4)
    assert [call.layer for call in keep.calls] == list(range(len(expected.attentions)))
    for call, attention in zip(keep.calls, expected.attentions):
        rows = torch.tensor([0, 5, 6, 33, 58])
        torch.testing.assert_close(call.probabilities(rows), attention[0][:, rows, :59], rtol=1e-4, atol=1e-6)


def test_sliding_window_layers_run_exactly_and_are_not_shared(tmp_path: Path) -> None:
    torch.manual_seed(5)
    config = transformers.Qwen3Config(
        vocab_size=99,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        use_sliding_window=True,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )
    transformers.Qwen3ForCausalLM(config).save_pretrained(str(tmp_path))
    facts = read_facts(tmp_path)
    assert facts.full_layers == (1,)
    with torch.no_grad():
        expected = eager(tmp_path)(torch.tensor([IDS]), use_cache=False, output_attentions=True)
    keep = Keep()
    logits = ObservedModel(load_model(facts, device="cpu", dtype="float32")).run(IDS, keep, logits_from=0)
    torch.testing.assert_close(logits, expected.logits[0], rtol=1e-4, atol=1e-4)
    assert [call.window for call in keep.calls] == [8, None, 8]
    rows = torch.arange(len(IDS))
    for call, attention in zip(keep.calls, expected.attentions):
        torch.testing.assert_close(call.probabilities(rows), attention[0], rtol=1e-4, atol=1e-6)


def test_kept_restricts_the_softmax(pair) -> None:
    keep = Keep()
    ObservedModel(load_model(read_facts(pair.receiver), device="cpu", dtype="float32")).run(IDS, keep)
    call = keep.calls[1]
    rows = torch.arange(40, 50)
    kept = (torch.rand(call.num_heads, 1, 50, generator=torch.Generator().manual_seed(1)) < 0.4) | (
        torch.arange(50) >= 40
    )
    full = call.probabilities(rows) * kept
    torch.testing.assert_close(call.probabilities(rows, kept), full / full.sum(-1, keepdim=True), rtol=1e-4, atol=1e-7)


def test_models_that_alter_their_scores_are_refused(tmp_path: Path) -> None:
    config = transformers.Gemma2Config(
        vocab_size=99,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        attn_logit_softcapping=20.0,
    )
    transformers.Gemma2ForCausalLM(config).save_pretrained(str(tmp_path))
    model = ObservedModel(load_model(read_facts(tmp_path), device="cpu", dtype="float32"))
    with pytest.raises(CalibrationError, match="Gemma2Attention alters its attention by softcap"):
        model.run(IDS, Keep())


def test_missing_and_broken_models_are_named(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match=r"model directory .*absent does not exist"):
        read_facts(tmp_path / "absent")
    with pytest.raises(CalibrationError, match=r"holds no config\.json"):
        read_facts(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    (tmp_path / "config.json").write_text('{"model_type": "nothing"}', encoding="utf-8")
    with pytest.raises(CalibrationError, match=r"no model configuration can be read from .*") as caught:
        read_facts(tmp_path)
    assert "\n" not in str(caught.value)
