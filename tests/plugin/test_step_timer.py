"""A step is timed from its first layer to its last, whatever it turns out to be on the way."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from mapflow.connector.vllm.step_timer import StepSize, StepTimer

PLAIN = StepSize(num_rows=2048, context=4096)
REUSED = StepSize(num_rows=2048, context=4096, plans=frozenset({"guide"}))
LAST = 4


@dataclass
class _Event:
    """Recorded at a time of a GPU that the test moves on."""

    at: float
    is_done: bool = True

    def query(self) -> bool:
        return self.is_done

    def elapsed_time(self, other: _Event) -> float:
        return other.at - self.at


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[_Event]:
    """Events in the order in which they were recorded, 100 ms apart."""
    events: list[_Event] = []

    def record(self: StepTimer) -> _Event:
        events.append(_Event(100.0 * len(events)))
        return events[-1]

    monkeypatch.setattr(StepTimer, "_event", record)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return events


def test_what_the_step_turned_out_to_be_counts(clock: list[_Event]) -> None:
    timer = StepTimer(torch.device("cuda"), LAST)
    timer.begin(PLAIN)
    for layer in range(LAST + 1):
        if layer == 3:
            timer.resize(REUSED)
        timer.end(layer)
    timer.begin(PLAIN)
    timer.end(LAST)
    clock[3].is_done = False
    assert timer.observed() == [(REUSED, 0.1 / LAST)], "the GPU is still busy with the second"
    clock[3].is_done = True
    assert timer.observed() == [(PLAIN, 0.1 / LAST)]
    assert timer.observed() == []


def test_a_step_that_ends_in_the_middle_is_forgotten(clock: list[_Event]) -> None:
    timer = StepTimer(torch.device("cuda"), LAST)
    timer.begin(REUSED)
    timer.end(2)
    timer.begin(PLAIN)
    timer.end(LAST)
    assert timer.observed() == [(PLAIN, 0.1 / LAST)]
    timer.begin(REUSED)
    timer.begin(None)
    timer.resize(REUSED)
    timer.end(LAST)
    assert timer.observed() == [], "the last step is not timed"


def test_without_a_gpu_nothing_is_timed() -> None:
    timer = StepTimer(torch.device("cpu"), LAST)
    timer.begin(PLAIN)
    timer.end(LAST)
    assert timer.observed() == []
