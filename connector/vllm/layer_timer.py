"""How long a layer of a step takes on the GPU, from events around most of the layers; nothing waits for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(slots=True, kw_only=True)
class _Step:
    """Events at the first layer that was seen and at the last so far."""

    first: int
    started: Any
    num_rows: int
    context: int
    last: int = -1
    ended: Any = None


class LayerTimer:
    """Of one worker. Without a GPU nothing is observed."""

    def __init__(self, device: torch.device, num_layers: int) -> None:
        """num_layers: of the receiver; a step is timed up to its last layer."""
        self._device = device
        self._last_layer = num_layers - 1
        self._now: _Step | None = None
        self._done: list[_Step] = []

    def begin(self, layer: int, num_rows: int, context: int) -> None:
        """A layer's attention is about to be launched, for a batch of `num_rows` rows of prompts up to `context`."""
        if self._device.type == "cuda" and (self._now is None or layer < self._now.first):
            self._now = _Step(first=layer, started=self._event(), num_rows=num_rows, context=context)

    def end(self, layer: int) -> None:
        """It was launched."""
        if self._now is not None and layer == self._last_layer and layer > self._now.first:
            self._now.last, self._now.ended = layer, self._event()
            self._done.append(self._now)
            self._now = None

    def observed(self) -> list[tuple[int, int, float]]:
        """Rows, context, and seconds a layer of the steps that ended since the last call."""
        ended = [one for one in self._done if one.ended.query()]
        self._done = [one for one in self._done if one not in ended]
        return [
            (one.num_rows, one.context, 1e-3 * one.started.elapsed_time(one.ended) / (one.last - one.first))
            for one in ended
        ]

    def drop(self) -> None:
        """A step ended in the middle."""
        self._now = None

    def _event(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event
