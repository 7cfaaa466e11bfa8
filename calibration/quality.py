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
        prefix_loss_rise: what those rows' cross entropy on the text's own next tokens rises by, in nats a token; its
            exponential is the ratio of the perplexities.
        suffix_kl: the same KL over the rows after them.
        suffix_top1: the same share over the rows after them.
        suffix_loss_rise: the same rise over the rows after them.
        density: kept causal blocks / causal blocks, averaged over the layers that reuse.
    """

    prefix_kl: float
    prefix_top1: float
    prefix_loss_rise: float
    suffix_kl: float
    suffix_top1: float
    suffix_loss_rise: float
    density: float


def kl_divergence(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """KL(p || q) in nats of each row, f32 [rows]; f32 [rows, vocab_size] log-probabilities."""
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def compare(
    exact: torch.Tensor, reused: torch.Tensor, next_ids: Sequence[int], num_prefix: int, density: float
) -> Quality:
    """Compare logits, f32 [num_prefix + num_suffix, vocab_size] each.

    next_ids: the token behind each row; of the last row, behind which there is none, it may be missing.
    """
    log_p, log_q = exact.log_softmax(-1), reused.log_softmax(-1)
    kl = kl_divergence(log_p, log_q)
    same = (exact.argmax(-1) == reused.argmax(-1)).float()
    targets = torch.tensor(next_ids, device=exact.device)[:, None]
    rise = (log_p[: len(targets)].gather(1, targets) - log_q[: len(targets)].gather(1, targets))[:, 0]
    return Quality(
        prefix_kl=float(kl[:num_prefix].mean()),
        prefix_top1=float(same[:num_prefix].mean()),
        prefix_loss_rise=float(rise[:num_prefix].mean()),
        suffix_kl=float(kl[num_prefix:].mean()),
        suffix_top1=float(same[num_prefix:].mean()),
        suffix_loss_rise=float(rise[num_prefix:].mean()),
        density=density,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate(Quality):
    """The average over documents, and how far it may be off.

    Attributes:
        low: of each measure, the lower bound of its 95 % interval.
        high: the upper bound.
        num_documents: how many documents were measured.
    """

    low: Quality
    high: Quality
    num_documents: int


def estimate(qualities: Sequence[Quality], *, resamples: int = 2000, seed: int = 0) -> Estimate:
    """Average over documents, each counting the same, with percentile bootstrap intervals over the documents.

    Source: Efron and Tibshirani, An Introduction to the Bootstrap, 1993, section 13.3. Of one document nothing is known
    beyond itself: its interval is a point.
    """
    names = [field.name for field in fields(Quality)]
    values = torch.tensor([[getattr(quality, name) for name in names] for quality in qualities], dtype=torch.float64)
    drawn = torch.randint(
        len(qualities), (resamples, len(qualities)), generator=torch.Generator().manual_seed(seed)
    )  # of each resample, the documents in it
    bounds = values[drawn].mean(1).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64), dim=0)
    low, high = (Quality(**dict(zip(names, bound.tolist()))) for bound in bounds)
    average = dict(zip(names, values.mean(0).tolist()))
    return Estimate(**average, low=low, high=high, num_documents=len(qualities))
