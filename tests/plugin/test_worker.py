"""The worker's side of a step: when the publisher's threads may run."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")

from mapflow.connector.counters import Counters  # noqa: E402
from mapflow.connector.vllm.capture import Capture  # noqa: E402
from mapflow.connector.vllm.messages import CapturedChunk, RequestStep  # noqa: E402
from mapflow.connector.vllm.publisher import Publisher  # noqa: E402
from mapflow.connector.vllm.worker import MapWorker  # noqa: E402


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    one = Publisher(None, "p", Counters(), capacity=8)  # type: ignore[arg-type]
    yield one
    one.close(10.0)


@pytest.fixture
def worker(publisher: Publisher) -> MapWorker:
    capture = Capture(chunk_tokens=128, block=64)
    nobody = {"plans": (), "client": None, "wants": dict}
    return MapWorker(**nobody, counters=Counters(), capture=capture, publisher=publisher)  # type: ignore[arg-type]


def runs(publisher: Publisher, within_s: float) -> bool:
    """Whether its thread does."""
    done = threading.Event()
    assert publisher.defer(done.set)
    return done.wait(within_s)


def test_the_publisher_pauses_while_a_capturing_step_is_launched(worker: MapWorker, publisher: Publisher) -> None:
    chunk = CapturedChunk(index=0, key=b"k", parent_key=b"")
    step = RequestStep(request_id="r", row_begin=0, row_end=128, num_prompt=128, last_page=0, capture=(chunk,))
    worker.begin_step([step], [])
    assert not runs(publisher, 0.2)
    worker.end_step()
    assert runs(publisher, 10.0)


def test_a_step_without_a_forward_pass_pauses_nobody(worker: MapWorker, publisher: Publisher) -> None:
    """vLLM begins such steps to clean up, and never ends them."""
    worker.begin_step([], ["r"])
    assert runs(publisher, 0.5)
