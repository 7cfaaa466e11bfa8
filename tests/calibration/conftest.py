"""Tiny real models with one tiny tokenizer, made in a temporary folder."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

NUM_WORDS = 96
TEMPLATE = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Directories of two models and a file of texts."""

    sender: Path
    receiver: Path
    texts: Path


def write_tokenizer(directory: Path, *, swap: bool = False) -> None:
    """A word-level tokenizer over `w0` ... `w95`; `swap` exchanges two ids."""
    vocabulary = {"<unk>": 0, "user": 1, "assistant": 2} | {f"w{n}": n + 3 for n in range(NUM_WORDS)}
    if swap:
        vocabulary["w7"], vocabulary["w8"] = vocabulary["w8"], vocabulary["w7"]
    raw = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    raw.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>", chat_template=TEMPLATE)
    fast.save_pretrained(str(directory))


def write_texts(path: Path, lengths: list[int], *, seed: int = 0) -> Path:
    """Documents of random words with repeats, one a line."""
    generator = random.Random(seed)
    lines = []
    for length in lengths:
        phrase = [f"w{generator.randrange(NUM_WORDS)}" for _ in range(24)]
        words = [w for _ in range(length // 24 + 1) for w in (*phrase[:12], *generator.sample(phrase, 12))]
        lines.append(json.dumps({"text": " ".join(words[:length])}))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def llama(seed: int, **shape: int) -> transformers.LlamaForCausalLM:
    """A Llama with random weights, large enough that attention is not uniform."""
    torch.manual_seed(seed)
    sizes = {"vocab_size": NUM_WORDS + 3, "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 1024}
    config = transformers.LlamaConfig(
        **(sizes | shape), tie_word_embeddings=False, bos_token_id=None, eos_token_id=None
    )
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                weight.normal_(0.0, 1.0 if "embed" in name else 0.3)
    return model


SENDER = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
RECEIVER = {
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 12,
    "hidden_size": 24,
}


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Two unrelated models that differ in depth, heads, head size, KV groups and width."""
    root = tmp_path_factory.mktemp("pair")
    for name, seed, shape in (("sender", 1, SENDER), ("receiver", 2, RECEIVER)):
        llama(seed, **shape).save_pretrained(str(root / name))
        write_tokenizer(root / name)
    return Pair(
        sender=root / "sender",
        receiver=root / "receiver",
        texts=write_texts(root / "texts.jsonl", [300, 230, 290, 64]),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CopiedPair:
    """A receiver whose every head is a known sender head.

    Attributes:
        parents: receiver layer -> sender layer.
        heads: receiver layer -> sender head of each receiver head.
    """

    pair: Pair
    parents: tuple[int, ...]
    heads: tuple[tuple[int, ...], ...]


@pytest.fixture(scope="session")
def copied_pair(tmp_path_factory: pytest.TempPathFactory) -> CopiedPair:
    """No layer writes to the residual stream, so maps depend on weights alone and copied heads attend alike."""
    root = tmp_path_factory.mktemp("copied")
    sender = llama(3, **SENDER, hidden_size=48)
    receiver = llama(4, **(RECEIVER | {"head_dim": 8, "hidden_size": 48}))
    parents = (3, 0, 2)
    heads = ((2, 3, 0, 1, 3, 2), (0, 1, 0, 0, 2, 3), (3, 2, 1, 0, 2, 2))  # pairs share a KV head of the sender
    with torch.no_grad():
        receiver.model.embed_tokens.weight.copy_(sender.model.embed_tokens.weight)
        for model in (sender, receiver):
            for layer in model.model.layers:
                layer.self_attn.o_proj.weight.zero_()
                layer.mlp.down_proj.weight.zero_()
        for layer, parent, chosen in zip(receiver.model.layers, parents, heads):
            source, target = sender.model.layers[parent].self_attn, layer.self_attn
            query, key = source.q_proj.weight.view(4, 8, 48), source.k_proj.weight.view(2, 8, 48)
            target.q_proj.weight.copy_(query[list(chosen)].reshape(48, 48))
            target.k_proj.weight.copy_(key[[head // 2 for head in chosen[::2]]].reshape(24, 48))
    for name, model in (("sender", sender), ("receiver", receiver)):
        model.save_pretrained(str(root / name))
        write_tokenizer(root / name)
    pair = Pair(sender=root / "sender", receiver=root / "receiver", texts=write_texts(root / "texts.jsonl", [280] * 3))
    return CopiedPair(pair=pair, parents=parents, heads=heads)


@pytest.fixture
def texts_of(tmp_path: Path) -> Callable[..., Path]:
    """Writes a `.jsonl` of documents with the given numbers of words."""

    def make(*lengths: int, seed: int = 0) -> Path:
        return write_texts(tmp_path / f"texts-{seed}.jsonl", list(lengths), seed=seed)

    return make


@pytest.fixture
def tokenizer_with_swapped_ids() -> Callable[[Path], None]:
    """Writes the tokenizer with the ids of `w7` and `w8` exchanged."""
    return lambda directory: write_tokenizer(directory, swap=True)
