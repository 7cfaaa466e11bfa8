"""How long a layer of a step takes on the GPU, from an event at either end of the step; nothing waits for them.

Timed is everything from the first attention layer to the last, and so also what the host makes a GPU wait for.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSize:
    """What the time of a step depends on.

    Attributes:
        num_rows: rows of its batch.
        context: tokens of the longest prompt in it, up to its last row.
        plans: names of the plans that reuse its rows, none for a step without reuse; None where some rows are reused
            and some are not.
    """

    num_rows: int
    context: int
    plans: frozenset[str] | None = frozenset()


@dataclass(slots=True)
class _Step:
    size: StepSize
    started: Any
    ended: Any = None


class StepTimer:
    """Of one worker. Without a GPU nothing is observed."""

    def __init__(self, device: torch.device, last: int) -> None:
        """last: number of the model's last layer."""
        self._device = device
        self._last = last
        self._now: _Step | None = None
        self._done: deque[_Step] = deque()

    def begin(self, size: StepSize | None) -> None:
        """The attention of a step's first layer is about to be launched; None: of one that is not timed."""
        self._now = None  # the step before may have ended in the middle
        if size is None or self._device.type != "cuda" or not self._last:
            return
        if not torch.cuda.is_current_stream_capturing():
            self._now = _Step(size, self._event())

    def resize(self, size: StepSize) -> None:
        """What the step is turned out to be."""
        if self._now is not None:
            self._now.size = size

    def end(self, layer: int) -> None:
        """A layer's attention was launched."""
        if self._now is not None and layer == self._last:
            self._now.ended = self._event()
            self._done.append(self._now)
            self._now = None

    def observed(self) -> list[tuple[StepSize, float]]:
        """Steps that ended since the last call, and seconds of a layer of each."""
        found = []
        while self._done and self._done[0].ended.query():
            one = self._done.popleft()
            found.append((one.size, 1e-3 * one.started.elapsed_time(one.ended) / self._last))
        return found

    def _event(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event
