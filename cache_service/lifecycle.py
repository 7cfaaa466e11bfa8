"""When to stop: the first SIGTERM or SIGINT asks the daemon to finish, the second ends it at once.

Knows signals only. What finishing means is written in `server.py`.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable

import structlog

_log = structlog.get_logger(__name__)

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """Handlers of the process's stop signals, while the context lasts."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        """Set by the first signal."""
        self._last_acts: list[Callable[[], None]] = []

    def before_exit(self, act: Callable[[], None]) -> None:
        """Have something tiny done (a file removed) even if a second signal ends the process at once."""
        self._last_acts.append(act)

    def __enter__(self) -> StopSignals:
        for number in _SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self._receive, number)
        return self

    def __exit__(self, *_: object) -> None:
        for number in _SIGNALS:
            asyncio.get_running_loop().remove_signal_handler(number)

    def _receive(self, number: signal.Signals) -> None:
        if not self.asked.is_set():
            _log.info("stopping", signal=number.name)
            self.asked.set()
            return
        _log.warning("stopping_at_once", signal=number.name)
        for act in self._last_acts:
            act()
        os._exit(128 + number)
