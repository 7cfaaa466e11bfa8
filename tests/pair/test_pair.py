"""The example pair: identical tokenizers, sizes, copying, loss, and attention that has structure.

Everything is computed with transformers from the checked-in weights. Never downloads anything.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

EXAMPLES = Path(__file__).parents[2] / "examples"
PAIR = EXAMPLES / "pair"
EXCERPT = Path(__file__).parent / "eip-6963-excerpt.txt"  # CC0-1.0; not in the training text
MODELS = ("sender", "receiver")
MOST_BYTES = 9_800_000
MOST_NATS = {"sender": 3.3, "receiver": 3.45}  # a token of the excerpt; its subject is foreign to both models
CONTEXT, ANSWER = 8192, 512  # tokens


@pytest.fixture(scope="module")
def evaluate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pair_evaluate", PAIR / "training" / "evaluate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module", params=MODELS)
def loaded(request: pytest.FixtureRequest, evaluate: ModuleType) -> tuple[str, Any, Any]:
    """(name, model with eager attention, tokenizer)"""
    torch.set_num_threads(1)
    model, tokenizer = evaluate.load(PAIR / request.param, attention="eager")
    return request.param, model, tokenizer


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (EXAMPLES / name).read_text(encoding="utf-8").split("\n") if line]


def test_tokenizers_are_identical() -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (PAIR / "sender" / name).read_bytes() == (PAIR / "receiver" / name).read_bytes()


def test_folder_is_small() -> None:
    files = [path for path in PAIR.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert sum(path.stat().st_size for path in files) <= MOST_BYTES


def test_models_differ_in_depth_and_heads() -> None:
    sender, receiver = (json.loads((PAIR / name / "config.json").read_text()) for name in MODELS)
    assert sender["num_hidden_layers"] != receiver["num_hidden_layers"]
    assert sender["num_attention_heads"] != receiver["num_attention_heads"]
    assert sender["vocab_size"] == receiver["vocab_size"] <= 8192
    assert min(sender["max_position_embeddings"], receiver["max_position_embeddings"]) >= CONTEXT


def test_text_round_trips(loaded: tuple[str, Any, Any]) -> None:
    tokenizer = loaded[2]
    for text in ("Hello  wörld\n\n\t漢字 🎉 123456\r\n", '{"name": "f", "arguments": {"a": [1, 2.50]}}', "", "  x "):
        ids = tokenizer(text).input_ids
        assert ids[0] == tokenizer.bos_token_id
        assert tokenizer.decode(ids[1:]) == text


def test_chat_template_writes_every_role(loaded: tuple[str, Any, Any]) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "find", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "found", "tool_call_id": "1"},
        {"role": "assistant", "content": "Done."},
    ]
    text = loaded[2].apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        '<|begin|><|system|>S<|end|><|user|>hi<|end|><|assistant|>{"name": "find", "arguments": {"a": 1}}<|end|>'
        "<|tool|>found<|end|><|assistant|>Done.<|end|><|assistant|>"
    )


def test_a_longer_conversation_begins_with_the_tokens_of_a_shorter_one(loaded: tuple[str, Any, Any]) -> None:
    tokenizer = loaded[2]
    conversations = rows("conversations.jsonl")
    assert len(conversations) >= 4
    for conversation in conversations:
        assert conversation["licence"] in ("MIT", "Apache-2.0")
        messages = conversation["messages"]
        assert sum(message["role"] == "user" for message in messages) >= 4
        whole = tokenizer.apply_chat_template(messages, return_dict=False)
        assert len(whole) == conversation["num_tokens"] <= CONTEXT - ANSWER
        for count in range(1, len(messages)):
            part = tokenizer.apply_chat_template(messages[:count], return_dict=False)
            assert whole[: len(part)] == part


def test_calibration_texts_fit_the_context(loaded: tuple[str, Any, Any]) -> None:
    texts = rows("calibration.jsonl")
    demo = {conversation["id"] for conversation in rows("conversations.jsonl")}
    assert len(texts) >= 6
    for text in texts:
        assert text["id"] not in demo
        assert 4000 <= len(loaded[2](text["text"]).input_ids) == text["num_tokens"] <= CONTEXT


@pytest.mark.parametrize("distance", [64, 700])
def test_a_repeated_random_string_is_copied(loaded: tuple[str, Any, Any], evaluate: ModuleType, distance: int) -> None:
    assert evaluate.copy_accuracy(loaded[1], strings=8, distance=distance, seed=20) >= 0.9


def test_copying_needs_the_first_copy(loaded: tuple[str, Any, Any], evaluate: ModuleType) -> None:
    """The measure itself: with another string in the first one's place, nothing is predicted."""
    row = evaluate.copy_rows(strings=1, distance=200, vocabulary=4096, seed=3)[0]
    row[1:65] = row[1:65].flip(0)
    with torch.no_grad():
        predicted = loaded[1](row[None]).logits[0, -65:-1].argmax(-1)
    assert (predicted == row[-64:]).float().mean() < 0.1


def test_loss_on_unseen_text(loaded: tuple[str, Any, Any], evaluate: ModuleType) -> None:
    name, model, tokenizer = loaded
    loss, count = evaluate.text_loss(model, tokenizer(EXCERPT.read_text(encoding="utf-8")).input_ids)
    assert count > 1000
    assert loss / count < MOST_NATS[name]


def test_attention_has_structure(loaded: tuple[str, Any, Any], evaluate: ModuleType) -> None:
    """A head that finds the earlier occurrence, one that rests on the first token, one for the previous token."""
    _, model, tokenizer = loaded
    ids = tokenizer(EXCERPT.read_text(encoding="utf-8")).input_ids[:1200]
    heads = [head for layer in evaluate.attention_structure(model, ids) for head in layer]
    best = {kind: max(head[kind] for head in heads) for kind in heads[0]}
    assert best["induction"] > 0.5
    assert best["first"] > 0.4
    assert best["previous"] > 0.4
    assert best["far"] > 0.1
    assert best["local"] > 0.9
