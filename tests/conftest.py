"""Fixtures for every test: the daemon as a real process.

`daemon` is one with an arena of 64 MiB (another size: `@pytest.mark.parametrize("daemon", ["1GiB"], indirect=True)`);
`start_daemon` starts as many as wanted, each with its own options. Tests that use them carry the marker `service`.
"""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest

from mapflow.v1 import cache_pb2, cache_pb2_grpc

START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 30.0


class Daemon:
    """A daemon process on a Unix socket of its own folder; started by the constructor, ready when that returns."""

    def __init__(self, folder: Path, arena: str = "64MiB", options: Sequence[str] = ()) -> None:
        self.socket_path = folder / "mapflow.sock"
        self.endpoint = f"unix://{self.socket_path}"
        self._folder = folder
        self._options = ["--endpoint", self.endpoint, "--arena", arena, *options]
        self._num_starts = 0
        self._process = self._start()

    @property
    def pid(self) -> int:
        """Process id of the current start."""
        return self._process.pid

    @property
    def log(self) -> str:
        """What the current start has written to stderr so far."""
        return self._log_path.read_text()

    @property
    def segment_path(self) -> Path:
        """File of the current start's shared memory."""
        match = re.search(r"event=serving .*segment_name=(\S+)", self.log)
        assert match is not None, f"no segment named in the log: {self.log}"
        return Path("/dev/shm") / match[1]

    def kill(self) -> None:
        """End it as a crash would (SIGKILL)."""
        self._process.kill()
        self._process.wait(STOP_TIMEOUT_S)

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self._process.send_signal(number)

    def wait(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """Wait for its end; returns the exit status."""
        return self._process.wait(timeout_s)

    def terminate(self) -> int:
        """Ask it to stop (SIGTERM) and wait; returns the exit status."""
        self._process.terminate()
        return self.wait()

    def close(self) -> None:
        """Kill it, if it still runs, and clear away what it could not."""
        self.kill()
        self.segment_path.unlink(missing_ok=True)

    def restart(self) -> None:
        """Kill it, if it still runs, and start it again on the same socket."""
        self.kill()
        self._process = self._start()

    def stats(self) -> cache_pb2.StatsResponse:
        """Its counters and gauges."""
        with grpc.insecure_channel(self.endpoint) as channel:
            stub = cache_pb2_grpc.CacheStub(channel)  # type: ignore[no-untyped-call]
            response = stub.Stats(cache_pb2.StatsRequest(), timeout=10.0, wait_for_ready=True)
            assert isinstance(response, cache_pb2.StatsResponse)
            return response

    @property
    def _log_path(self) -> Path:
        return self._folder / f"daemon-{self._num_starts}.log"

    def _start(self) -> subprocess.Popen[bytes]:
        self._num_starts += 1
        command = [sys.executable, "-P", "-m", "mapflow.cache_service", *self._options]
        with self._log_path.open("wb") as log:
            process = subprocess.Popen(command, cwd=self._folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        give_up_at = time.monotonic() + START_TIMEOUT_S
        while "event=serving" not in self.log:
            if process.poll() is not None:
                raise RuntimeError(f"the daemon ended with status {process.returncode}: {self.log}")
            if time.monotonic() > give_up_at:
                process.kill()
                process.wait()
                raise RuntimeError(f"the daemon was not ready within {START_TIMEOUT_S} s: {self.log}")
            time.sleep(0.02)
        return process


StartDaemon = Callable[..., Daemon]


@pytest.fixture
def socket_folder() -> Iterator[Path]:
    """A folder whose path is short enough for a Unix socket."""
    folder = Path(tempfile.mkdtemp(prefix="mapflow-"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def start_daemon() -> Iterator[StartDaemon]:
    """`start_daemon(arena="64MiB", options=("--drain", "1"))` starts a daemon; all are ended with the test."""
    with ExitStack() as stack:

        def start(arena: str = "64MiB", options: Sequence[str] = ()) -> Daemon:
            folder = Path(tempfile.mkdtemp(prefix="mapflow-"))
            stack.callback(shutil.rmtree, folder)
            daemon = Daemon(folder, arena, options)
            stack.callback(daemon.close)
            return daemon

        yield start


@pytest.fixture
def daemon(request: pytest.FixtureRequest, start_daemon: StartDaemon) -> Daemon:
    """A running daemon; the indirect parameter is the size of its arena."""
    return start_daemon(arena=getattr(request, "param", "64MiB"))
