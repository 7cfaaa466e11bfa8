"""Measures of how close a receiver stays to itself under reuse. Knows logits, not how they came about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """How close a receiver stays to itself, averaged over documents.

    Attributes:
        prefix_kl: mean KL(exact || reused) in nats over the last reused rows.
        prefix_top1: share of those rows with the same most likely token.
        suffix_kl: the same KL over the rows after them.
        suffix_top1: the same share over the rows after them.
        density: kept causal blocks / causal blocks, averaged over the layers that reuse.
    """

    prefix_kl: float
    prefix_top1: float
    suffix_kl: float
    suffix_top1: float
    density: float


def compare(exact: torch.Tensor, reused: torch.Tensor, num_prefix: int, density: float) -> Quality:
    """Compare logits, f32 [num_prefix + num_suffix, vocab_size] each."""
    log_p, log_q = exact.log_softmax(-1), reused.log_softmax(-1)
    kl = (log_p.exp() * (log_p - log_q)).sum(-1)
    same = (exact.argmax(-1) == reused.argmax(-1)).float()
    return Quality(
        prefix_kl=float(kl[:num_prefix].mean()),
        prefix_top1=float(same[:num_prefix].mean()),
        suffix_kl=float(kl[num_prefix:].mean()),
        suffix_top1=float(same[num_prefix:].mean()),
        density=density,
    )


def mean(qualities: Sequence[Quality]) -> Quality:
    """Average over documents, each counting the same."""
    names = [field.name for field in fields(Quality)]
    return Quality(**{name: sum(getattr(quality, name) for quality in qualities) / len(qualities) for name in names})
