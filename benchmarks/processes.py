"""What the benchmarks share that start a daemon or processes that answer them; needs no torch."""

from __future__ import annotations

import json
import os
import random
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from mapflow.cli.demo.processes import Services, daemon_command, wait_ready
from mapflow.cli.status import fetch_stats
from mapflow.connector.client import Client
from mapflow.connector.client_config import ClientConfig
from mapflow.connector.messages import Producer
from mapflow.connector.namespace import Namespace
from mapflow.v1.cache_pb2 import StatsResponse

_T = TypeVar("_T")


class Child:
    """A process that answers JSON lines on standard input by JSON lines on standard output."""

    def __init__(self, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> None:
        """Start it; environment: beside this process's own."""
        with log.open("wb") as stderr:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env={**os.environ, "PYTHONSAFEPATH": "1", **(environment or {})},
                text=True,
            )
        self._log = log

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """One request, and its answer."""
        assert self._process.stdin is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """The next line, read as JSON.

        Raises:
            RuntimeError: the process ended.
        """
        answer: dict[str, Any] = json.loads(self.line())
        return answer

    def line(self) -> str:
        """The next line.

        Raises:
            RuntimeError: the process ended.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._log.stem} ended: {self._log.read_text(errors='replace')[-3000:]}")
        return line

    def stop(self, patience_s: float = 0.0) -> None:
        """End it: by the end of its input, and after `patience_s` by force."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(patience_s)
        self._process.kill()
        self._process.wait()


@contextmanager
def daemon(folder: Path, arena: str, *options: str, logs: Path | None = None) -> Iterator[str]:
    """One daemon; its endpoint."""
    endpoint = f"unix://{folder / 'mapflow.sock'}"
    services = Services(logs=logs or folder)
    try:
        command = [*daemon_command(endpoint, arena), *options]
        one = services.start("daemon", command, endpoint=endpoint)
        while wait_ready([one], time.monotonic() + 120.0):
            time.sleep(0.1)
        yield endpoint
    finally:
        services.stop()


def settled(endpoint: str, still_s: float = 0.5) -> StatsResponse:
    """Wait until nothing is published or copied to a GPU any more; what the daemon then says of itself."""
    before, since = (), time.monotonic()
    while True:
        stats = fetch_stats(endpoint)
        now = (stats.num_entries, *(one.promoted_entries for one in stats.device_arenas))
        if now != before:
            before, since = now, time.monotonic()
        elif time.monotonic() - since > still_s:
            return stats
        time.sleep(0.05)


def orders(items: Sequence[_T], repeats: int, chance: random.Random) -> Iterator[list[_T]]:
    """One for each repeat, the second of two the first one backwards: what a GPU did before tells in its clocks."""
    order: list[_T] = []
    for repeat in range(repeats):
        order = order[::-1] if repeat % 2 else chance.sample(items, len(items))
        yield order


@contextmanager
def connected(endpoint: str, namespace: Namespace, producer: Producer | None) -> Iterator[Client]:
    """A client with a session."""
    config = ClientConfig(
        endpoint=endpoint,
        client_name="benchmark",
        namespace=namespace,
        producer=producer,
        transfer_deadline_s=60.0,
    )
    client = Client(config)
    client.start()
    try:
        if not client.wait_connected(30.0):
            raise RuntimeError(f"no session with the daemon at {endpoint} within 30 s")
        yield client
    finally:
        client.close()
