"""Measure a model of the pair with transformers on a CPU: loss on text, copying at a distance, attention structure.

    python evaluate.py MODEL_DIR [--texts heldout.jsonl documents.jsonl] [--chats workflows.jsonl]

Prints JSON. Needs no other file of this folder, and never trains or writes anything.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

CONTEXT = 8192  # tokens
FIRST_TEXT_ID = 8  # ids below are special tokens
HELD_OUT_PREFIXES = ("tau-retail", "GorillaFileSystem", "TradingBot")


def load(folder: Path, attention: str = "sdpa") -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model in float32 and its tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention)
    return model.eval(), AutoTokenizer.from_pretrained(folder)


@torch.no_grad()
def text_loss(model: PreTrainedModel, ids: list[int], first: int = 1) -> tuple[float, int]:
    """Summed cross entropy (nats) of ids[first:] given what precedes them, and their number; at most 8,192 ids."""
    row = torch.tensor(ids[:CONTEXT])
    logits = model(row[None]).logits[0]
    return torch.nn.functional.cross_entropy(logits[first - 1 : -1], row[first:], reduction="sum").item(), len(
        row
    ) - first


def mean_loss(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> dict[str, float]:
    """Loss over the texts (each cut at 8,192 tokens), in nats per token and bits per byte."""
    total, tokens, num_bytes = 0.0, 0, 0
    for text in texts:
        ids = tokenizer(text).input_ids[:CONTEXT]
        loss, count = text_loss(model, ids)
        total, tokens = total + loss, tokens + count
        num_bytes += len(tokenizer.decode(ids[1:]).encode())
    return {"texts": len(texts), "tokens": tokens, "nats_per_token": total / tokens,
            "bits_per_byte": total / math.log(2) / num_bytes}  # fmt: skip


def copy_rows(strings: int, distance: int, vocabulary: int, seed: int, span: int = 64) -> Tensor:
    """i64 [strings, 1 + distance + span]: <|begin|>, `span` random tokens, random filler, and the same `span` tokens
    again, `distance` tokens after the first."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(FIRST_TEXT_ID, vocabulary, (strings, 1 + distance + span), generator=generator)
    rows[:, 0] = 1
    rows[:, 1 + distance :] = rows[:, 1 : 1 + span]
    return rows


@torch.no_grad()
def copy_accuracy(model: PreTrainedModel, strings: int, distance: int, seed: int, span: int = 64) -> float:
    """Share of all `span` tokens of the second copy that are the model's first choice. The first of them can't be
    known, so the best possible is 63 / 64."""
    rows = copy_rows(strings, distance, model.config.vocab_size, seed, span)
    hits = [model(row[None], logits_to_keep=span + 1).logits[0, :-1].argmax(-1) == row[-span:] for row in rows]
    return torch.stack(hits).float().mean().item()


@torch.no_grad()
def attention_structure(model: PreTrainedModel, text_ids: list[int]) -> list[list[dict[str, float]]]:
    """Per layer and head: mean attention mass by what it looks at. The model must use eager attention.

    On text (rows 512 and later): `first` token, `previous` token, the last 64 tokens `local`, further than 512 `far`.
    On a random string of 128 tokens repeated at distance 512: `induction`, the mass on the token after the earlier
    occurrence, and `match`, the mass on the earlier occurrence itself.
    """
    ids = torch.tensor(text_ids[:2048])[None]
    maps = model(ids, output_attentions=True).attentions
    span, distance = 128, 512
    repeated = copy_rows(1, distance, model.config.vocab_size, seed=5, span=span)
    copies = model(repeated, output_attentions=True).attentions
    rows = torch.arange(512, ids.shape[1])
    queries = 1 + distance + torch.arange(1, span - 1)
    columns = torch.arange(ids.shape[1])
    age = rows[:, None] - columns  # [rows, columns]
    layers = []
    for text_map, copy_map in zip(maps, copies, strict=True):
        heads = []
        for on_text, on_copy in zip(text_map[0], copy_map[0], strict=True):
            a = on_text[rows]  # [rows, columns]
            heads.append({
                "first": a[:, 0].mean().item(),
                "previous": on_text[rows, rows - 1].mean().item(),
                "local": (a * ((age >= 0) & (age < 64))).sum(-1).mean().item(),
                "far": (a * ((age >= 512) & (columns > 0))).sum(-1).mean().item(),
                "induction": on_copy[queries, queries - distance + 1].mean().item(),
                "match": on_copy[queries, queries - distance].mean().item(),
            })  # fmt: skip
        layers.append(heads)
    return layers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--texts", type=Path, nargs="*", default=[], help="texts (id, text), one JSON object a line")
    parser.add_argument("--chats", type=Path, help="conversations (id, prefix_id, messages); the held-out half is used")
    parser.add_argument("--strings", type=int, default=16, help="random strings at each distance")
    options = parser.parse_args()
    model, tokenizer = load(options.model)
    result: dict[str, object] = {"parameters": sum(p.numel() for p in model.parameters()), "loss": {}}
    losses: dict[str, dict[str, float]] = {}
    for path in options.texts:
        rows = [json.loads(line) for line in path.open(encoding="utf-8")]
        losses[path.stem] = mean_loss(model, tokenizer, [row["text"] for row in rows if not row.get("heldout")])
    if options.chats:
        chats = [json.loads(line) for line in options.chats.open(encoding="utf-8")]
        total, tokens = 0.0, 0
        for chat in chats:
            if not any(part in chat["prefix_id"] for part in HELD_OUT_PREFIXES):
                continue
            prefix = tokenizer.apply_chat_template(chat["messages"][:1], return_dict=False)
            loss, count = text_loss(
                model, tokenizer.apply_chat_template(chat["messages"], return_dict=False), len(prefix)
            )
            total, tokens = total + loss, tokens + count
        losses["chat turns after the system prompt"] = {"tokens": tokens, "nats_per_token": total / tokens}
    result["loss"] = losses
    result["copy"] = {
        d: copy_accuracy(model, options.strings, d, seed=d) for d in (64, 128, 256, 512, 1024, 2048, 4096)
    }
    sample = json.loads(options.texts[-1].open(encoding="utf-8").readline())["text"] if options.texts else ""
    if sample:
        eager, _ = load(options.model, attention="eager")
        result["attention"] = attention_structure(eager, tokenizer(sample).input_ids)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
