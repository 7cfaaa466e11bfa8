"""How far two next-token distributions are apart. Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Mapping


def kl_divergence(exact: Mapping[int, float], other: Mapping[int, float]) -> float:
    """KL(exact || other) in nats, from log-probabilities over the same vocabulary.

    Raises:
        ValueError: a token of `exact` that has probability mass is missing in `other`.
    """
    total = 0.0
    for token, logprob in exact.items():
        probability = math.exp(logprob)
        if probability == 0.0:
            continue
        if token not in other:
            raise ValueError(f"token {token} with probability {probability:.2e} has none in the other distribution")
        total += probability * (logprob - other[token])
    return max(total, 0.0)


def top_token(logprobs: Mapping[int, float]) -> int:
    """The most probable token."""
    return max(logprobs, key=lambda token: logprobs[token])
