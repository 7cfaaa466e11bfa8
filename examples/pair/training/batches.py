"""Training rows: windows of text, and made-up rows that can only be predicted by looking back.

Tokens are drawn on the device; sizes by `random`, so that the host never waits. Rows have `length + 1` tokens; weights
say which targets count. Never reads files other than the token files of tokenizer.py.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

BEGIN_ID = 1
FIRST_TEXT_ID = 8  # ids below are special tokens
SHORTEST_SPAN, LONGEST_SPAN = 16, 512  # tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Token ids i16 [num_tokens] and text starts i64 [num_texts], both on the device."""

    ids: Tensor
    starts: Tensor
    vocabulary: int

    @staticmethod
    def load(folder: Path, name: str, vocabulary: int, device: torch.device) -> Corpus:
        ids = torch.from_numpy(np.fromfile(folder / f"{name}.bin", dtype=np.int16)).to(device)
        starts = torch.from_numpy(np.fromfile(folder / f"{name}.starts.bin", dtype=np.int64)).to(device)
        return Corpus(ids=ids, starts=starts, vocabulary=vocabulary)

    def windows(self, rows: int, length: int, generator: torch.Generator) -> Tensor:
        """i64 [rows, length + 1]: <|begin|>, then text; half of the rows begin where a text does."""
        device, last = self.ids.device, len(self.ids) - length
        anywhere = torch.randint(last, (rows,), device=device, generator=generator)
        chosen = torch.randint(len(self.starts), (rows,), device=device, generator=generator)
        aligned = torch.rand(rows, device=device, generator=generator) < 0.5
        begin = torch.where(aligned, self.starts[chosen].clamp(max=last), anywhere)
        text = self.ids[begin[:, None] + torch.arange(length, device=device)].long()
        return torch.cat((torch.full((rows, 1), BEGIN_ID, device=device), text), dim=1)


def random_tokens(rows: int, width: int, vocabulary: int, device: torch.device, generator: torch.Generator) -> Tensor:
    """i64 [rows, width] of uniformly random text tokens."""
    return torch.randint(FIRST_TEXT_ID, vocabulary, (rows, width), device=device, generator=generator)


def repeat_spans(tokens: Tensor, num_slots: int, generator: torch.Generator) -> Tensor:
    """Copy spans of earlier tokens to later places of `tokens` i64 [rows, width], in place.

    The row is cut into `num_slots` slots; each but the first gets one span of 16 to 512 tokens (log-uniform), from
    directly before it (three in ten) or from anywhere before. Returns bool [rows, width]: tokens that a span made
    predictable (all of it but its first).
    """
    rows, width = tokens.shape
    device, slot = tokens.device, width // num_slots
    offsets = torch.arange(min(LONGEST_SPAN, slot - 1), device=device)
    copied = torch.zeros(rows, width, dtype=torch.bool, device=device)
    for index in range(1, num_slots):
        u = torch.rand(4, rows, 1, device=device, generator=generator)
        span = (SHORTEST_SPAN * (len(offsets) / SHORTEST_SPAN) ** u[0]).long()  # [rows, 1]
        target = index * slot + (u[1] * (slot - span)).long()
        source = (u[2] * (target - span)).long().clamp(min=1)
        source = torch.where(u[3] < 0.3, (target - span).clamp(min=1), source)
        inside = offsets < span
        places = (target + offsets).clamp(max=width - 1)
        values = tokens.gather(1, (source + offsets).clamp(max=width - 1))
        tokens.scatter_(1, places, torch.where(inside, values, tokens.gather(1, places)))
        copied.scatter_(1, places, (inside & (offsets > 0)) | copied.gather(1, places))
    return copied


def recall_rows(
    rows: int, width: int, vocabulary: int, device: torch.device, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Records of two key tokens and some value tokens; later ones repeat one of the first half at random.

    Returns tokens i64 [rows, width] and bool [rows, width], true for the values of repeated records.
    """
    record = random.randint(4, 16)
    count = width // record
    tokens = random_tokens(rows, width, vocabulary, device, generator)
    body = tokens[:, : count * record].view(rows, count, record)
    first = count // 2
    chosen = torch.randint(first, (rows, count - first), device=device, generator=generator)
    body[:, first:] = body.gather(1, chosen[:, :, None].expand(-1, -1, record))
    recalled = torch.zeros(rows, width, dtype=torch.bool, device=device)
    recalled[:, : count * record].view(rows, count, record)[:, first:, 2:] = True
    return tokens, recalled


def training_batch(
    corpus: Corpus, rows: int, length: int, lookback_share: float, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Tokens i64 [rows, length + 1] and weights f32 [rows, length] of the targets tokens[:, 1:].

    About `lookback_share` of the rows are made up: repeated spans in random tokens, repeated spans in text, recall.
    """
    device = corpus.ids.device
    tokens = corpus.windows(rows, length, generator)
    weights = torch.ones(rows, length + 1, device=device)
    made = max(3, round(rows * lookback_share))
    spans, texts = made - made // 3 - made // 4, made // 4
    recalls = made - spans - texts
    slots = max(3, length // random.randint(256, 700))
    tokens[:spans, 1:] = random_tokens(spans, length, corpus.vocabulary, device, generator)
    weights[:spans] = repeat_spans(tokens[:spans], slots, generator).float()
    if texts:
        repeat_spans(tokens[spans : spans + texts], slots, generator)
    recalled_tokens, recalled = recall_rows(recalls, length, corpus.vocabulary, device, generator)
    tokens[spans + texts : made, 1:], weights[spans + texts : made, 1:] = recalled_tokens, recalled.float()
    return tokens, weights[:, 1:]
