"""Counts of what happened and why, and log lines that an outage cannot multiply.

Plain objects that any thread may use. Whoever exports metrics reads `Counters.snapshot()`; nothing here knows how.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping


class Counters:
    """Events by name and reason."""

    def __init__(self) -> None:
        """Start with nothing counted."""
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, str]] = Counter()

    def add(self, name: str, reason: str = "", n: int = 1) -> None:
        """Count `n` more events called `name`, for `reason` where there is one."""
        with self._lock:
            self._counts[name, str(reason)] += n

    def get(self, name: str, reason: str = "") -> int:
        """How many so far."""
        with self._lock:
            return self._counts[name, str(reason)]

    def snapshot(self) -> Mapping[tuple[str, str], int]:
        """All counts so far, by (name, reason); a copy."""
        with self._lock:
            return dict(self._counts)


class CounterLog:
    """The counts as a log line now and then, for whoever has no other way to read them."""

    def __init__(
        self,
        counters: Counters,
        logger: logging.Logger,
        *,
        every_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Write to `logger` at level info."""
        self._counters = counters
        self._logger = logger
        self._every_s = every_s
        self._clock = clock
        self._next = clock() + every_s
        self._shown: Mapping[tuple[str, str], int] = {}

    def tick(self) -> None:
        """Log what changed since the last line, if that was long enough ago; cheap enough for every step."""
        if self._clock() >= self._next:
            self.flush()

    def flush(self) -> None:
        """Log what changed since the last line, if anything did."""
        self._next = self._clock() + self._every_s
        counts = self._counters.snapshot()
        changed = sorted((key, count) for key, count in counts.items() if count != self._shown.get(key, 0))
        self._shown = counts
        if changed:
            text = " ".join(f"{name}{f'[{reason}]' if reason else ''}={count}" for (name, reason), count in changed)
            self._logger.info("mapflow: counts so far: %s", text)


class LimitedLog:
    """At most one line per key and `every_s` seconds; the next line says how many were left out."""

    def __init__(
        self, logger: logging.Logger, *, every_s: float = 30.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Write to `logger`."""
        self._logger = logger
        self._every_s = every_s
        self._clock = clock
        self._lock = threading.Lock()
        self._last: dict[str, float] = {}
        self._left_out: Counter[str] = Counter()

    def warning(self, key: str, message: str, *values: object) -> None:
        """Log `message % values` at level warning, unless `key` was logged just now."""
        now = self._clock()
        with self._lock:
            if key in self._last and now - self._last[key] < self._every_s:
                self._left_out[key] += 1
                return
            self._last[key] = now
            left_out = self._left_out.pop(key, 0)
        if left_out:
            message, values = message + " (and %d more like it)", (*values, left_out)
        self._logger.warning(message, *values)
