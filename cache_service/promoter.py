"""Makes the copies that the core has begun: one thread per device arena, in batches, off the event loop.

Decides nothing: how each promotion ended goes back to the core, on the loop. What a GPU's memory is, it does not know;
`device_memory.py` does.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from queue import Empty, SimpleQueue
from typing import Protocol

import structlog

from mapflow.cache_service.core.cache import Cache
from mapflow.cache_service.core.device_tier import FIRST_ARENA_ID
from mapflow.cache_service.core.extents import padded
from mapflow.cache_service.core.values import Promotion

_log = structlog.get_logger(__name__)

_BATCH_BYTES = 64 << 20

Pair = tuple[int, int, int]
"""What to copy: offset in the host arena, offset in the device arena, number of bytes."""


class DeviceMemory(Protocol):
    """A device arena's memory, as the daemon sees it. `copy_in` is only called from one thread at a time."""

    @property
    def num_bytes(self) -> int:
        """Size."""

    @property
    def device_uuid(self) -> str:
        """Which GPU, as nvidia-smi prints it."""

    @property
    def handle(self) -> bytes:
        """How another process of this host opens it."""

    def copy_in(self, pairs: Sequence[Pair]) -> None:
        """Copy from the host arena; when it returns or raises, no copy is under way."""

    def close(self) -> None:
        """Give the memory back."""


class Promoter:
    """The threads of all device arenas, from `start` to `stop`; both, and `kick`, belong to the event loop."""

    def __init__(self, cache: Cache, memories: Sequence[DeviceMemory]) -> None:
        """memories: of the device arenas, in the order of their numbers."""
        self._cache = cache
        self._loop = asyncio.get_running_loop()
        self._copiers = {
            arena_id: _Copier(arena_id, memory, self._report)
            for arena_id, memory in enumerate(memories, start=FIRST_ARENA_ID)
        }
        self._logged: set[type[Exception]] = set()

    def start(self) -> None:
        """Start the threads."""
        for copier in self._copiers.values():
            copier.start()

    def kick(self) -> None:
        """Hand what the core has begun to the threads; to be called after whatever may have begun something."""
        for promotion in self._cache.take_promotions():
            self._copiers[promotion.arena_id].queue.put(promotion)

    async def stop(self) -> None:
        """Let each thread finish the batch that it is at, and wait for it."""
        for copier in self._copiers.values():
            copier.ask_to_stop()
        for copier in self._copiers.values():
            await asyncio.to_thread(copier.join)

    def _report(self, batch: Sequence[Promotion], error: Exception | None) -> None:
        """Called on a copier's thread."""
        self._loop.call_soon_threadsafe(self._end, batch, error)

    def _end(self, batch: Sequence[Promotion], error: Exception | None) -> None:
        if error is not None and type(error) not in self._logged:
            self._logged.add(type(error))
            _log.error("promotion_failed", device_arena_id=batch[0].arena_id, exc_info=error)
        for promotion in batch:
            if error is None:
                self._cache.promoted(promotion.id)
            else:
                self._cache.promotion_failed(promotion.id)


_Report = Callable[[Sequence[Promotion], Exception | None], None]


class _Copier(threading.Thread):
    def __init__(self, arena_id: int, memory: DeviceMemory, report: _Report) -> None:
        super().__init__(name=f"mapflow-copier-{arena_id}", daemon=True)
        self.queue: SimpleQueue[Promotion | None] = SimpleQueue()
        self._memory = memory
        self._report = report
        self._stopping = False

    def ask_to_stop(self) -> None:
        """End the thread after the batch that it is at, whatever waits."""
        self._stopping = True
        self.queue.put(None)

    def run(self) -> None:
        """Copy until asked to stop."""
        while not self._stopping and (first := self.queue.get()) is not None:
            batch = self._batch(first)
            try:
                self._memory.copy_in(joined(_pairs(batch)))
            except Exception as error:
                self._report(batch, error)
            else:
                self._report(batch, None)

    def _batch(self, first: Promotion) -> list[Promotion]:
        """What waits now, up to a size."""
        batch, num_bytes = [first], _num_bytes(first)
        while num_bytes < _BATCH_BYTES:
            try:
                promotion = self.queue.get_nowait()
            except Empty:
                break
            if promotion is None:
                break
            batch.append(promotion)
            num_bytes += _num_bytes(promotion)
        return batch


def joined(pairs: Iterable[Pair]) -> list[Pair]:
    """The same copies in fewer: those that lie behind each other on both sides become one, padding included."""
    result: list[Pair] = []
    for source, target, num_bytes in pairs:
        if result:
            before_source, before_target, before_bytes = result[-1]
            step = padded(before_bytes)
            if (source, target) == (before_source + step, before_target + step):
                result[-1] = (before_source, before_target, step + num_bytes)
                continue
        result.append((source, target, num_bytes))
    return result


def _pairs(batch: Iterable[Promotion]) -> Iterator[Pair]:
    for promotion in batch:
        for extent, offset in promotion.pairs:
            yield extent.offset, offset, extent.num_bytes


def _num_bytes(promotion: Promotion) -> int:
    return sum(extent.num_bytes for extent, _ in promotion.pairs)
