"""Publishing off the engine's path: finished maps wait in a bounded queue for a thread that hands them to the daemon.

A full queue, a full arena or a daemon that is away cost maps, never time: what cannot be published is dropped and
counted.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Sequence

from mapflow.connector.client import Client
from mapflow.connector.counters import Counters
from mapflow.connector.messages import Kind, PendingBlob
from mapflow.connector.reasons import Unavailable
from mapflow.connector.vllm.capture import FinishedMap
from mapflow.connector.vllm.map_identity import map_identity
from mapflow.kernels.blob import blob_num_bytes, write_blob

logger = logging.getLogger(__name__)


class Publisher:
    """One thread, one queue."""

    def __init__(self, client: Client, producer_id: str, counters: Counters, capacity: int) -> None:
        self._client = client
        self._producer_id = producer_id
        self._counters = counters
        self._queue: queue.Queue[Sequence[FinishedMap] | None] = queue.Queue(maxsize=capacity)
        self._thread = threading.Thread(target=self._run, name="mapflow-publisher", daemon=True)
        self._thread.start()

    def submit(self, maps: Sequence[FinishedMap]) -> None:
        """Hand over one step's maps; never waits."""
        try:
            self._queue.put_nowait(maps)
        except queue.Full:
            self._counters.add("publish_dropped", "queue_full", len(maps))

    def close(self, timeout_s: float) -> None:
        """Publish what is queued, for at most `timeout_s`, and end the thread."""
        try:
            self._queue.put(None, timeout=timeout_s)
        except queue.Full:
            return
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (maps := self._queue.get()) is not None:
            try:
                report = self._client.publish(Kind.MAP, self._producer_id, [self._blob(item) for item in maps])
            except Unavailable as error:
                self._counters.add("publish_dropped", error.reason, len(maps))
            except Exception:
                logger.exception("mapflow: publishing failed; the maps are dropped")
                self._counters.add("publish_dropped", "internal", len(maps))
            else:
                self._counters.add("published", "published", report.published)
                self._counters.add("published", "existed", report.existed)
                self._counters.add("publish_dropped", "no_room", report.no_room)

    def _blob(self, item: FinishedMap) -> PendingBlob:
        identity = map_identity(item.chunk.key, self._producer_id, item.layer)

        def write(buffer: memoryview) -> int:
            return write_blob(item.map, buffer, identity=identity)

        return PendingBlob(
            key=item.chunk.key,
            parent_key=item.chunk.parent_key,
            layer=item.layer,
            num_bytes=blob_num_bytes(item.map),
            write=write,
        )
