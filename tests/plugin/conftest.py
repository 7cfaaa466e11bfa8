"""Two tiny model directories with one tokenizer, and plans between them; no weights that anybody would run."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
from safetensors.torch import save_file  # noqa: E402

from mapflow.connector.model_identity import model_id  # noqa: E402
from mapflow.connector.plan import LayerPlan, Mode, ModelSpec, Plan  # noqa: E402
from mapflow.connector.tokenizer import tokenizer_fingerprint  # noqa: E402
from mapflow.connector.vllm.facts import EngineFacts  # noqa: E402

LAYERS, HEADS, KV_HEADS, DIM = 2, 2, 1, 64


def write_model(directory: Path, seed: int, vocab: dict[str, int] | None = None) -> Path:
    """A directory with a configuration, weights and a word-level tokenizer."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"num_hidden_layers": LAYERS}))
    save_file({"w": torch.full((4,), float(seed))}, str(directory / "model.safetensors"))
    model = {"type": "WordLevel", "vocab": vocab or {"<unk>": 0, "a": 1}, "unk_token": "<unk>"}
    document = {"version": "1.0", "added_tokens": [], "normalizer": None, "pre_tokenizer": None, "model": model}
    (directory / "tokenizer.json").write_text(json.dumps(document))
    return directory


def spec(directory: Path) -> ModelSpec:
    name, revision = model_id(directory)
    return ModelSpec(
        name=name, revision=revision, num_layers=LAYERS, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM
    )


@dataclass(frozen=True)
class Pair:
    """Sender, receiver, and where plans go."""

    sender: Path
    receiver: Path
    folder: Path

    def plan(self, name: str = "plan", chunk_tokens: int = 128, **changes: object) -> str:
        """Save a guide plan of this pair; returns its path."""
        plan = Plan(
            name=name,
            tokenizer_fingerprint=tokenizer_fingerprint(self.sender),
            chunk_tokens=chunk_tokens,
            block=64,
            sender=spec(self.sender),
            receiver=spec(self.receiver),
            layers=(LayerPlan(mode=Mode.COMPUTE), LayerPlan(mode=Mode.GUIDE, sender_layer=1, top_p=0.9)),
            head_map={1: torch.eye(HEADS)},
        )
        path = self.folder / f"{name}.safetensors"
        replace(plan, **changes).save(path)  # type: ignore[arg-type]
        return str(path)


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(write_model(tmp_path / "sender", 1), write_model(tmp_path / "receiver", 2), tmp_path)


@pytest.fixture
def facts() -> Callable[..., EngineFacts]:
    """`facts(directory, publishes=True)`: what an engine that serves that model would say of itself."""

    def make(directory: Path, *, publishes: bool = False, reuses: bool = False, **changes: object) -> EngineFacts:
        base = EngineFacts(
            model=str(directory),
            revision=None,
            tokenizer=str(directory),
            tokenizer_revision=None,
            dtype="float32",
            num_layers=LAYERS,
            num_heads=HEADS,
            num_kv_heads=KV_HEADS,
            head_dim=DIM,
            tp_rank=0,
            tp_size=1,
            page_size=32,
            publishes=publishes,
            reuses=reuses,
        )
        return replace(base, **changes)  # type: ignore[arg-type]

    return make
