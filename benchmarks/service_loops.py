"""How load is made: one call after another, a window of calls, or arrivals that wait for no answer.

Standard library only, so that the process that asks LMCache can use it in a virtual environment of its own.
"""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

Submit = Callable[[int], Future[Any]]
_PATIENCE_S = 10.0  # for what is still on its way when a loop ends


class _Tally:
    """Latencies, from gRPC's threads too."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.latencies_s: list[float] = []
        self.errors: dict[str, int] = {}
        self.open = 0

    def begin(self, submit: Submit, number: int, since: float) -> None:
        """Send a call whose latency counts from `since`."""
        with self._changed:
            self.open += 1
        submit(number).add_done_callback(lambda done: self._end(done, since))

    def wait(self, most_open: int, timeout_s: float) -> None:
        """Until no more calls than that are on their way."""
        with self._changed:
            self._changed.wait_for(lambda: self.open <= most_open, timeout_s)

    def _end(self, done: Future[Any], since: float) -> None:
        latency, error = time.perf_counter() - since, done.exception()
        with self._changed:
            self.open -= 1
            if error is None:
                self.latencies_s.append(latency)
            else:
                kind = str(error)[:80]
                self.errors[kind] = self.errors.get(kind, 0) + 1
            self._changed.notify()


def closed(submit: Submit, calls: int, window: int = 1) -> dict[str, Any]:
    """So many calls, never more than `window` at a time."""
    tally = _Tally()
    begin = time.perf_counter()
    for number in range(calls):
        tally.wait(window - 1, _PATIENCE_S)
        tally.begin(submit, number, time.perf_counter())
    tally.wait(0, _PATIENCE_S)
    return _outcome(tally, time.perf_counter() - begin)


def open_loop(submit: Submit, rate: float, seconds: float, seed: int) -> dict[str, Any]:
    """Poisson arrivals; a latency counts from when a call was due, also where this process was late to send it."""
    tally, chance = _Tally(), random.Random(seed)
    begin = due = time.perf_counter()
    number = 0
    while due - begin < seconds:
        while (early := due - time.perf_counter()) > 0:
            time.sleep(max(0.0, early - 1e-4))
        tally.begin(submit, number, due)
        number += 1
        due += chance.expovariate(rate)
    took = time.perf_counter() - begin
    tally.wait(0, _PATIENCE_S)
    return _outcome(tally, took)


def _outcome(tally: _Tally, seconds: float) -> dict[str, Any]:
    return {
        "latencies_ms": [round(1e3 * one, 4) for one in tally.latencies_s],
        "seconds": seconds,
        "errors": tally.errors,
        "unanswered": tally.open,
    }


def serve(operations: Mapping[str, Submit], after: Callable[[], None] = lambda: None) -> None:
    """Answer commands on standard input, JSON lines: {"operation", "loop": "closed" or "open", and its arguments}.

    after: called behind every loop, to give back what its calls hold.
    """
    print(json.dumps({"operations": list(operations)}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        submit = operations[command.pop("operation")]
        loop = {"closed": closed, "open": open_loop}[command.pop("loop")]
        answer = loop(submit, **command)
        after()
        print(json.dumps(answer), flush=True)
