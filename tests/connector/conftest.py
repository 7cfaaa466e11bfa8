"""Clients of a real daemon, and what they publish."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

from mapflow.connector.client import Client
from mapflow.connector.client_config import ClientConfig
from mapflow.connector.events import Event
from mapflow.connector.messages import PendingBlob, Producer
from mapflow.connector.namespace import Namespace
from mapflow.v1 import cache_pb2

MODEL = "sender@0123456789abcdef"
PRODUCER = Producer.of(MODEL, "float32")


class DaemonProcess(Protocol):
    """What these tests use of the `daemon` fixture."""

    endpoint: str
    socket_path: Path
    segment_path: Path

    def kill(self) -> None: ...
    def restart(self) -> None: ...
    def signal(self, number: signal.Signals) -> None: ...
    def wait(self, timeout_s: float = ...) -> int: ...
    def stats(self) -> cache_pb2.StatsResponse: ...


StartDaemon = Callable[..., DaemonProcess]
StartClient = Callable[..., Client]


def wait_until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Wait for something that another thread or process brings about."""
    give_up_at = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up_at, "it did not happen in time"
        time.sleep(0.005)


def make_blobs(namespace: Namespace, num_chunks: int, layers: tuple[int, ...] = (0, 1), num_bytes: int = 1000) -> Any:
    """Blobs of a chain of chunks, and its keys; each blob has bytes of its own."""
    keys = namespace.chunk_keys(list(range(num_chunks * namespace.chunk_tokens)))

    def blob(chunk: int, layer: int) -> PendingBlob:
        def write(view: memoryview) -> int:
            view[:] = blob_bytes(keys[chunk], layer, num_bytes)
            return num_bytes

        parent = keys[chunk - 1] if chunk else b""
        return PendingBlob(key=keys[chunk], parent_key=parent, layer=layer, num_bytes=num_bytes, write=write)

    return [blob(chunk, layer) for chunk in range(num_chunks) for layer in layers], keys


def blob_bytes(key: bytes, layer: int, num_bytes: int) -> bytes:
    """The bytes that `make_blobs` writes for an entry."""
    unit = key + bytes([layer])
    return (unit * (num_bytes // len(unit) + 1))[:num_bytes]


@pytest.fixture
def namespace() -> Namespace:
    return Namespace(tokenizer_fingerprint="0123456789abcdef0123456789abcdef", chunk_tokens=128)


@pytest.fixture
def start_client(namespace: Namespace) -> Iterator[StartClient]:
    """`start_client(endpoint, wait=True, listener=None, **config)` starts a client; all are closed with the test."""
    clients: list[Client] = []
    threads = set(threading.enumerate())

    def start(
        endpoint: str, *, wait: bool = True, listener: Callable[[Event], None] | None = None, **values: Any
    ) -> Client:
        config = ClientConfig(
            **{"endpoint": endpoint, "client_name": "test", "namespace": namespace, "call_deadline_s": 1.0, **values}
        )
        client = Client(config, listener=listener)
        clients.append(client)
        client.start()
        assert not wait or client.wait_connected(10.0)
        return client

    yield start
    for client in clients:
        client.close()
    wait_until(lambda: not any("mapflow" in thread.name for thread in set(threading.enumerate()) - threads))
