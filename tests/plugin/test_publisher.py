"""What is handed to the publisher's thread: jobs and maps, in order, whatever goes wrong in one of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest

torch = pytest.importorskip("torch")

from mapflow.connector.counters import Counters  # noqa: E402
from mapflow.connector.messages import Kind, PendingBlob, PublishReport  # noqa: E402
from mapflow.connector.vllm.capture import FinishedMap, HostBlob  # noqa: E402
from mapflow.connector.vllm.map_identity import map_identity  # noqa: E402
from mapflow.connector.vllm.messages import CapturedChunk  # noqa: E402
from mapflow.connector.vllm.publisher import Publisher  # noqa: E402
from mapflow.kernels.attention_map import AttentionMap  # noqa: E402
from mapflow.kernels.blob import read_blob  # noqa: E402

CHUNK = CapturedChunk(index=0, key=b"k", parent_key=b"")


class _Client:
    """Keeps what is published."""

    def __init__(self) -> None:
        self.blobs: list[bytes] = []

    def publish(self, kind: Kind, producer: str, blobs: Sequence[PendingBlob]) -> PublishReport:
        for blob in blobs:
            buffer = bytearray(blob.num_bytes)
            blob.begin(memoryview(buffer))
            blob.end()
            blob.write(memoryview(buffer))
            self.blobs.append(bytes(buffer))
        return PublishReport(published=len(blobs), existed=0, no_room=0)


class _Pending:
    """A map that a job finds."""

    def __init__(self) -> None:
        self.found: AttentionMap | None = None

    def fetch(self) -> None:
        mass, counts = torch.full((1, 1, 1), 255, dtype=torch.uint8), torch.tensor([64], dtype=torch.int32)
        self.found = AttentionMap(chunk_index=0, block=64, mass=mass, row_counts=counts)

    def source(self) -> HostBlob | None:
        return None if self.found is None else HostBlob(self.found)


def test_maps_are_published_once_what_they_are_made_of_was_fetched() -> None:
    client, counters = _Client(), Counters()
    publisher = Publisher(client, "p", counters, capacity=8)  # type: ignore[arg-type]
    found, lost = _Pending(), _Pending()

    def fail() -> None:
        raise RuntimeError("a lost device")

    assert publisher.defer(fail) and publisher.defer(found.fetch)
    publisher.submit([FinishedMap(chunk=CHUNK, layer=3, map=one) for one in (found, lost)])
    publisher.close(10.0)
    (blob,) = client.blobs
    assert read_blob(blob, identity=map_identity(b"k", "p", 3)).mass.tolist() == [[[255]]]
    assert counters.get("publish_dropped", "internal") == 1
    assert counters.get("publish_dropped", "not_measured") == 1
    assert counters.get("published", "published") == 1


def test_a_full_queue_never_waits() -> None:
    counters, started, go_on = Counters(), threading.Event(), threading.Event()
    publisher = Publisher(_Client(), "p", counters, capacity=1)  # type: ignore[arg-type]

    def wait() -> None:
        started.set()
        go_on.wait(10.0)

    assert publisher.defer(wait)
    assert started.wait(10.0)
    assert publisher.defer(lambda: None) and not publisher.defer(lambda: None)
    publisher.submit([FinishedMap(chunk=CHUNK, layer=0, map=_Pending())])
    assert counters.get("publish_dropped", "queue_full") == 1
    go_on.set()
    publisher.close(10.0)


def test_a_paused_thread_begins_no_job() -> None:
    publisher = Publisher(_Client(), "p", Counters(), capacity=8)  # type: ignore[arg-type]
    done = threading.Event()
    publisher.pause()
    assert publisher.defer(done.set)
    assert not done.wait(0.2)
    publisher.resume()
    assert done.wait(10.0)
    publisher.pause()
    publisher.close(10.0)


def test_a_paused_thread_runs_while_it_is_allowed_to() -> None:
    publisher = Publisher(_Client(), "p", Counters(), capacity=8)  # type: ignore[arg-type]
    allowed, done = threading.Event(), threading.Event()
    publisher.pause(allowed.is_set)
    assert publisher.defer(done.set)
    assert not done.wait(0.1)
    allowed.set()
    assert done.wait(0.5), "long before the pause ends by itself"
    publisher.close(10.0)


def test_threads_are_quiet_while_the_engine_takes_an_outcome() -> None:
    publisher = Publisher(_Client(), "p", Counters(), capacity=8)  # type: ignore[arg-type]
    done, times = threading.Event(), list[float]()
    publisher.pause()
    publisher.resume(done.is_set)
    for _ in range(3):
        assert publisher.defer(lambda: times.append(time.monotonic()))
        while not publisher._queue.empty():
            time.sleep(1e-3)
        done.set()
    publisher.close(10.0)
    assert times[1] - times[0] >= 0.01, "after the outcome"


def test_no_pause_lasts_for_ever() -> None:
    """A step that failed never ends."""
    publisher = Publisher(_Client(), "p", Counters(), capacity=8)  # type: ignore[arg-type]
    done = threading.Event()
    publisher.pause()
    assert publisher.defer(done.set) and done.wait(10.0)
    publisher.close(10.0)
