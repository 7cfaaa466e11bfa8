"""Publishing off the engine's path: finished maps wait in a bounded queue for threads that hand them to the daemon.

The first thread learns from a GPU what maps are made of, in the order in which it was handed over. Two more reserve,
copy and commit: while one waits for the daemon the other one's maps are copied. They pause while a step is launched,
unless the GPU is well ahead, and again when a prefill is done and the engine takes its outcome; and the interpreter,
which runs them and the engine, switches between threads after half a millisecond instead of five.

A full queue, a full arena or a daemon that is away cost maps, never time: what cannot be published is dropped and
counted.
"""

from __future__ import annotations

import logging
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from mapflow.connector.client import Client
from mapflow.connector.counters import Counters
from mapflow.connector.messages import Kind, PendingBlob
from mapflow.connector.reasons import Unavailable
from mapflow.connector.vllm.capture import BlobSource, FinishedMap, HostBlob
from mapflow.connector.vllm.map_identity import map_identity

logger = logging.getLogger(__name__)

_LONGEST_PAUSE_S = 1.0
_WRITERS = 2
_WAITING = 4  # batches that no writer has begun; more of them wait in the queue
_SWITCH_S = 5e-4
_QUIET_S = 1e-2
_POLL_S = 2e-3


class Publisher:
    """One queue, the thread that empties it, and two that write."""

    def __init__(self, client: Client, producer_id: str, counters: Counters, capacity: int) -> None:
        self._client = client
        self._producer_id = producer_id
        self._counters = counters
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue(maxsize=capacity)
        self._resumed = threading.Event()
        self._resumed.set()
        self._may_run: Callable[[], bool] = lambda: True
        self._is_done: Callable[[], bool] | None = None
        self._paused_until = self._quiet_until = 0.0
        self._writers = ThreadPoolExecutor(_WRITERS, thread_name_prefix="mapflow-writer")
        self._room = threading.BoundedSemaphore(_WRITERS + _WAITING)
        sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_S))  # engines wait for the interpreter many times
        self._thread = threading.Thread(target=self._run, name="mapflow-publisher", daemon=True)
        self._thread.start()

    def submit(self, maps: Sequence[FinishedMap]) -> None:
        """Hand over one step's maps; never waits."""
        if not self.defer(partial(self._hand_over, maps)):
            self._counters.add("publish_dropped", "queue_full", len(maps))

    def defer(self, job: Callable[[], None]) -> bool:
        """Run a job on the thread, after what was handed over before; never waits. False if the queue is full."""
        try:
            self._queue.put_nowait(job)
        except queue.Full:
            return False
        return True

    def pause(self, may_run: Callable[[], bool] = lambda: False) -> None:
        """Until `resume`, or for a second, begin only what `may_run` allows: the engine's thread needs Python."""
        self._may_run = may_run
        self._paused_until = time.monotonic() + _LONGEST_PAUSE_S
        self._resumed.clear()

    def resume(self, is_done: Callable[[], bool] | None = None) -> None:
        """Go on, but not in the moment when `is_done` becomes true."""
        self._is_done = is_done or self._is_done
        self._resumed.set()

    def _wait(self) -> None:
        """Until this thread may run."""
        while not (self._resumed.is_set() or self._may_run()) and time.monotonic() < self._paused_until:
            self._resumed.wait(_POLL_S)
        is_done = self._is_done
        if is_done is not None and is_done():
            self._is_done, self._quiet_until = None, time.monotonic() + _QUIET_S
        rest = self._quiet_until - time.monotonic()
        if rest > 0:
            time.sleep(rest)

    def close(self, timeout_s: float) -> None:
        """Publish what is queued, for at most `timeout_s`, and end the threads."""
        self.resume()
        try:
            self._queue.put(None, timeout=timeout_s)
        except queue.Full:
            return
        self._thread.join(timeout_s)
        self._writers.shutdown(wait=not self._thread.is_alive(), cancel_futures=True)

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            try:
                self._wait()
                with torch.inference_mode():  # as in a step: what was made there may be written to here
                    job()
            except Exception:
                logger.exception("mapflow: maps on their way to being published are lost")
                self._counters.add("publish_dropped", "internal")
            del job  # with it goes memory on the GPU
        for _ in range(_WRITERS + _WAITING):  # until all is written
            self._room.acquire()

    def _hand_over(self, maps: Sequence[FinishedMap]) -> None:
        self._room.acquire()
        self._writers.submit(self._publish, maps).add_done_callback(lambda done: self._room.release())

    @torch.inference_mode()  # as in a step: what was made there may be written to here
    def _publish(self, maps: Sequence[FinishedMap]) -> None:
        try:
            self._wait()
            blobs = [blob for item in maps if (blob := self._blob(item)) is not None]
            report = self._client.publish(Kind.MAP, self._producer_id, blobs)
        except Unavailable as error:
            self._counters.add("publish_dropped", error.reason, len(maps))
        except Exception:
            logger.exception("mapflow: publishing failed; the maps are dropped")
            self._counters.add("publish_dropped", "internal", len(maps))
        else:
            self._counters.add("published", "published", report.published)
            self._counters.add("published", "existed", report.existed)
            self._counters.add("publish_dropped", "no_room", report.no_room)

    def _begin(self, source: BlobSource, buffer: memoryview) -> None:
        self._wait()
        source.begin(buffer)

    def _blob(self, item: FinishedMap) -> PendingBlob | None:
        """What to publish; None, and counted, where nothing of it could be measured."""
        source = item.map if isinstance(item.map, HostBlob) else item.map.source()
        if source is None:
            self._counters.add("publish_dropped", "not_measured")
            return None
        return PendingBlob(
            key=item.chunk.key,
            parent_key=item.chunk.parent_key,
            layer=item.layer,
            num_bytes=source.num_bytes,
            begin=partial(self._begin, source),
            end=source.end,
            write=partial(source.write, identity=map_identity(item.chunk.key, self._producer_id, item.layer)),
        )
