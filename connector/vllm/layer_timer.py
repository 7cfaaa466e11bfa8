"""How long a layer of a step takes on the GPU, from events around the layers that reuse; nothing waits for them."""

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


class LayerTimer:
    """Of one worker. Without a GPU nothing is observed."""

    def __init__(self, device: torch.device, first: int, last: int) -> None:
        """first, last: layers of the receiver between whose attention a step is timed."""
        self._device = device
        self._first, self._last = first, last
        self._now: _Step | None = None
        self._done: deque[_Step] = deque()

    def begin(self, layer: int, size: StepSize) -> None:
        """A layer's attention is about to be launched."""
        if self._device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return
        if layer == self._first < self._last:
            self._now = _Step(size, self._event())

    def end(self, layer: int) -> None:
        """It was launched."""
        if self._now is not None and layer == self._last:
            self._now.ended = self._event()
            self._done.append(self._now)
            self._now = None

    def observed(self) -> list[tuple[StepSize, float]]:
        """Steps that ended since the last call, and seconds of a layer of each."""
        found = []
        while self._done and self._done[0].ended.query():
            one = self._done.popleft()
            found.append((one.size, 1e-3 * one.started.elapsed_time(one.ended) / (self._last - self._first)))
        return found

    def drop(self) -> None:
        """A step ended in the middle."""
        self._now = None

    def _event(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event
