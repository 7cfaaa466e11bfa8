"""Keeps Python's cyclic garbage collector from stopping the daemon.

What the index holds has no cycles, but the collector looks through all of it now and then: 1.3 s with a million chunks.
So whatever has lived for a second is set aside from collection (`gc.freeze`). Reference counts free it as ever; only
cycles among what is set aside, which sessions may leave behind, stay until the next full collection.
"""

from __future__ import annotations

import gc

_SESSIONS_BETWEEN_COLLECTIONS = 1000


class Garbage:
    """Of one process; the collector is the interpreter's."""

    def __init__(self) -> None:
        """Set everything aside that is there."""
        self._collected_at = 0
        gc.collect()
        gc.freeze()

    def tend(self, ended_sessions: int) -> None:
        """Set aside what is there; to be called every second.

        Args:
            ended_sessions: since the start. Every thousand of them cost a full collection.
        """
        if ended_sessions - self._collected_at >= _SESSIONS_BETWEEN_COLLECTIONS:
            self._collected_at = ended_sessions
            gc.unfreeze()
            gc.collect()
        else:
            gc.collect(1)
        gc.freeze()
