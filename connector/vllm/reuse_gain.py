"""Whether reuse makes steps faster, told by the steps themselves: what a layer took with it, and without it.

Reuse costs the host some hundred microseconds a layer. Where a GPU needs no longer than that, in short prompts and
small models, it would make a hit slower than a miss. No formula knows both sides, but both are observed: misses,
requests that opt out and, where there are none of these, a step now and then that is computed to see. Pure arithmetic
on seconds.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median_low

_WORTHWHILE = 0.98  # of the time without reuse
_SAMPLE_AFTER = 4  # steps with reuse of a kind that was never seen without it
_KEPT = (
    5  # latest steps of which the middle one counts: one that compiled a kernel or waited for the host tells nothing
)
_JUDGED_FROM = 2  # steps with reuse, the faster of which counts
_RETRY_AFTER = 32  # steps of a kind that reuse made slower


@dataclass(slots=True)
class _Kind:
    """Steps of the same size: the latest seconds a row of a layer, by plans (none: without reuse)."""

    seconds: dict[frozenset[str], deque[float]] = field(default_factory=dict)
    reused: dict[frozenset[str], int] = field(default_factory=dict)
    refused: dict[frozenset[str], int] = field(default_factory=dict)


class ReuseGain:
    """Of one worker."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[int, int], _Kind] = {}

    def observe(self, num_rows: int, context: int, plans: frozenset[str], seconds: float) -> None:
        """A layer of a step took so long; `plans` reused all of its rows, or none did."""
        if num_rows > 0 and seconds > 0:
            kind = self._kind(num_rows, context)
            kind.seconds.setdefault(plans, deque(maxlen=_KEPT)).append(seconds / num_rows)

    def pays(self, num_rows: int, context: int, plans: frozenset[str]) -> bool:
        """Whether a step of so many rows, of prompts up to `context`, should reuse; asked once a step."""
        kind = self._kind(num_rows, context)
        with_reuse, without = kind.seconds.get(plans, ()), kind.seconds.get(frozenset())
        if without is None:
            kind.reused[plans] = kind.reused.get(plans, 0) + 1
            return kind.reused[plans] % _SAMPLE_AFTER != 0
        if len(with_reuse) < _JUDGED_FROM or median_low(with_reuse) < _WORTHWHILE * median_low(without):
            return True
        kind.refused[plans] = kind.refused.get(plans, 0) + 1
        return kind.refused[plans] % _RETRY_AFTER == 0

    def saved_s(self, num_rows: int, context: int, plans: frozenset[str]) -> float | None:
        """Seconds that reuse saves in a layer of such a step; None where one side was never seen."""
        seconds = self._kind(num_rows, context).seconds
        if plans not in seconds or frozenset() not in seconds:
            return None
        return num_rows * (median_low(seconds[frozenset()]) - median_low(seconds[plans]))

    def _kind(self, num_rows: int, context: int) -> _Kind:
        """Within a fifth of the rows, of which seconds are counted a row, and a tenth of the context."""
        size = (round(4 * math.log2(max(num_rows, 1))), round(8 * math.log2(max(context, 1))))
        return self._kinds.setdefault(size, _Kind())
