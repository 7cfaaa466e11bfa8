"""The daemon as a process: how it starts, refuses to start, stops, crashes, and comes back."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from mapflow.v1 import cache_pb2, cache_pb2_grpc

pytestmark = pytest.mark.service

KEY = b"k" * 16


class Daemon(Protocol):
    """What `tests/conftest.py` hands out."""

    endpoint: str
    socket_path: Path

    @property
    def pid(self) -> int: ...
    @property
    def log(self) -> str: ...
    @property
    def segment_path(self) -> Path: ...
    def kill(self) -> None: ...
    def signal(self, number: signal.Signals) -> None: ...
    def wait(self, timeout_s: float = ...) -> int: ...
    def terminate(self) -> int: ...
    def restart(self) -> None: ...
    def stats(self) -> cache_pb2.StatsResponse: ...


StartDaemon = Callable[..., Daemon]
Connect = Callable[[str], AbstractContextManager[Any]]


def until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    """Wait for something that happens in another process."""
    give_up_at = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up_at, "it did not happen in time"
        time.sleep(0.02)


def run_daemon(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Start a daemon that is expected not to come up."""
    command = [sys.executable, "-P", "-m", "mapflow.cache_service", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def assert_refused(done: subprocess.CompletedProcess[str], *texts: str) -> None:
    """Status 2 and one line that says why."""
    lines = [line for line in done.stderr.splitlines() if "event=stale_segment_removed" not in line]
    assert done.returncode == 2, done.stderr
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("mapflow: ")
    for text in texts:
        assert text in lines[0]


def health(endpoint: str, service: str = "mapflow.v1.Cache") -> int:
    with grpc.insecure_channel(endpoint) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        return int(stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=10).status)


def test_a_ready_daemon_says_so_and_leaves_nothing_behind(daemon: Daemon) -> None:
    (line,) = [line for line in daemon.log.splitlines() if "event=serving" in line]
    assert f"endpoint={daemon.endpoint} " in line
    segment = daemon.segment_path
    assert stat.S_IMODE(segment.stat().st_mode) == 0o600
    assert stat.S_IMODE(daemon.socket_path.stat().st_mode) == 0o600
    assert daemon.terminate() == 0
    assert not segment.exists()
    assert not daemon.socket_path.exists()
    assert "Traceback" not in daemon.log


def test_sigterm_waits_for_readers_and_writers(daemon: Daemon, connected: Connect) -> None:
    with connected(daemon.endpoint) as client:
        client.publish()
        lease = client.lookup().lease_id
        reservation = client.reserve(b"w" * 16)
        assert health(daemon.endpoint) == health_pb2.HealthCheckResponse.SERVING
        daemon.signal(signal.SIGTERM)
        until(lambda: health(daemon.endpoint) == health_pb2.HealthCheckResponse.NOT_SERVING)
        with pytest.raises(grpc.RpcError) as refused:
            client.lookup()
        assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
        client.stub.Release(cache_pb2.ReleaseRequest(session_id=client.session, lease_ids=[lease]))
        with pytest.raises(subprocess.TimeoutExpired):
            daemon.wait(0.5)  # the writer is not done
        commit = cache_pb2.CommitRequest(session_id=client.session, reservation_ids=[reservation.reservation_id])
        client.stub.Commit(commit)
        assert daemon.wait(5.0) == 0
        with pytest.raises(grpc.RpcError) as ended:
            list(client.stream)
        assert ended.value.code() == grpc.StatusCode.UNAVAILABLE
    assert "event=drained complete=true" in daemon.log
    assert not daemon.socket_path.exists()


def test_draining_has_a_bound(start_daemon: StartDaemon, connected: Connect) -> None:
    daemon = start_daemon(options=("--drain", "0.5"))
    with connected(daemon.endpoint) as client:
        client.reserve(KEY)
        started = time.monotonic()
        assert daemon.terminate() == 0
        assert 0.5 <= time.monotonic() - started < 8.0
    assert "event=drained complete=false" in daemon.log


def test_a_second_signal_ends_it_at_once(start_daemon: StartDaemon, connected: Connect) -> None:
    daemon = start_daemon(options=("--drain", "60"))
    with connected(daemon.endpoint) as client:
        client.reserve(KEY)
        segment = daemon.segment_path
        daemon.signal(signal.SIGTERM)
        until(lambda: "event=stopping " in daemon.log)
        daemon.signal(signal.SIGINT)
        assert daemon.wait(5.0) == 128 + signal.SIGINT
        assert not segment.exists()
        assert not daemon.socket_path.exists()


def open_segments(pid: int) -> list[Path]:
    """Shared-memory segments that a process has open."""
    with contextlib.suppress(FileNotFoundError):
        targets = [Path(os.readlink(link)) for link in Path(f"/proc/{pid}/fd").iterdir()]
        return [target for target in targets if target.parent == Path("/dev/shm")]
    return []


def test_a_signal_while_memory_is_fetched_is_heard(socket_folder: Path) -> None:
    free = os.statvfs("/dev/shm").f_bavail * os.statvfs("/dev/shm").f_frsize
    command = [sys.executable, "-P", "-m", "mapflow.cache_service", "--arena", str(min(2 << 30, free // 2))]
    command += ["--endpoint", f"unix://{socket_folder / 's'}"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    until(lambda: bool(open_segments(process.pid)))
    (segment,) = open_segments(process.pid)
    process.send_signal(signal.SIGTERM)
    _, log = process.communicate(timeout=30)
    assert process.returncode == 0, log
    assert "event=stopping" in log
    assert "event=serving" not in log
    assert not segment.exists()


def test_a_crashed_daemon_comes_back_as_another_boot(daemon: Daemon, connected: Connect) -> None:
    boot, segment = daemon.stats().boot_id, daemon.segment_path
    with connected(daemon.endpoint) as client:
        client.publish()
        session = client.session
        daemon.kill()
        assert segment.exists()
        assert daemon.socket_path.exists()
        daemon.restart()
        with pytest.raises(grpc.RpcError):
            list(client.stream)
    assert not segment.exists()
    assert f"event=stale_segment_removed segment_name={segment.name}" in daemon.log
    assert daemon.stats().boot_id != boot
    with connected(daemon.endpoint) as client:
        client.session, current = session, client.session
        with pytest.raises(grpc.RpcError) as refused:
            client.lookup()
        assert refused.value.code() == grpc.StatusCode.FAILED_PRECONDITION
        assert "another start" in refused.value.details()
        client.session = current
        assert not client.lookup().hits


def test_two_daemons_cannot_share_a_socket(daemon: Daemon) -> None:
    done = run_daemon("--endpoint", daemon.endpoint, "--arena", "1MiB")
    assert_refused(done, str(daemon.socket_path), "in use by a running daemon")
    assert daemon.stats().num_sessions == 0
    assert daemon.segment_path.exists()


def test_a_stopped_daemon_still_owns_its_socket(daemon: Daemon) -> None:
    daemon.signal(signal.SIGSTOP)
    done = run_daemon("--endpoint", daemon.endpoint, "--arena", "1MiB")
    daemon.signal(signal.SIGCONT)
    assert_refused(done, "in use by a running daemon")
    assert daemon.stats().num_sessions == 0


def test_two_daemons_cannot_share_a_port() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = run_daemon("--endpoint", f"127.0.0.1:{port}", "--insecure-tcp", "--arena", "1MiB")
    lines = done.stderr.splitlines()
    assert done.returncode == 2
    assert lines[-1].startswith(f"mapflow: endpoint 127.0.0.1:{port} cannot be bound")
    assert "Traceback" not in done.stderr


def test_many_daemons_racing_for_one_socket_leave_one(socket_folder: Path) -> None:
    endpoint = f"unix://{socket_folder / 's'}"
    command = [sys.executable, "-P", "-m", "mapflow.cache_service", "--endpoint", endpoint, "--arena", "1MiB"]
    racers = [subprocess.Popen(command, stderr=subprocess.DEVNULL) for _ in range(3)]
    try:
        until(lambda: sum(racer.poll() is not None for racer in racers) == 2, 60.0)
        assert sorted(str(racer.poll()) for racer in racers) == ["2", "2", "None"]
        with grpc.insecure_channel(endpoint) as channel:
            stub: Any = cache_pb2_grpc.CacheStub(channel)  # type: ignore[no-untyped-call]
            stub.Handshake(cache_pb2.HandshakeRequest(), timeout=10, wait_for_ready=True)
    finally:
        for racer in racers:
            racer.terminate()
            racer.wait(30)


def test_an_arena_that_does_not_fit(socket_folder: Path) -> None:
    endpoint = f"unix://{socket_folder / 's'}"
    assert_refused(
        run_daemon("--endpoint", endpoint, "--arena", "4096TiB"),
        str(4096 << 40),
        "bytes free",
        "choose a smaller arena",
    )
    assert not (socket_folder / "s").exists()


def test_what_else_keeps_it_from_starting(socket_folder: Path) -> None:
    endpoint = f"unix://{socket_folder / 's'}"
    assert_refused(run_daemon("--endpoint", endpoint, "--arena", "lots"), "'lots' is no size", "4GiB")
    assert_refused(run_daemon("--endpoint", "0.0.0.0:7070"), "0.0.0.0:7070", "--insecure-tcp")
    (socket_folder / "file").write_text("precious")
    assert_refused(run_daemon("--endpoint", f"{endpoint[:-1]}file", "--arena", "1MiB"), "is no socket")
    assert (socket_folder / "file").read_text() == "precious"
    assert_refused(run_daemon("--endpoint", f"{endpoint[:-1]}file/s", "--arena", "1MiB"), "choose another endpoint")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = run_daemon("--endpoint", endpoint, "--arena", "1MiB", "--metrics-port", port)
    assert_refused(done, f"metrics port 127.0.0.1:{port}", "Address already in use")


@pytest.mark.parametrize("way", ["killed", "stopped"])
def test_a_client_that_is_gone_holds_nothing(start_daemon: StartDaemon, way: str, connected: Connect) -> None:
    daemon = start_daemon(options=("--session-timeout", "2"))
    script = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import grpc, time
from conftest import BlockingClient
client = BlockingClient(grpc.insecure_channel({daemon.endpoint!r}))
client.publish()
client.lookup()
client.reserve(b"w" * 16)
print("ready", flush=True)
time.sleep(600)
"""
    process = subprocess.Popen([sys.executable, "-P", "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        stats = daemon.stats()
        assert (stats.num_sessions, stats.num_leases, stats.num_reservations) == (1, 1, 1)
        process.send_signal(signal.SIGKILL if way == "killed" else signal.SIGSTOP)
        until(lambda: daemon.stats().num_sessions == 0)
        stats = daemon.stats()
        assert (stats.num_leases, stats.num_reservations, stats.num_entries) == (0, 0, 1)
        with connected(daemon.endpoint) as client:
            assert client.reserve(b"w" * 16).state == cache_pb2.RESERVATION_STATE_RESERVED
    finally:
        process.kill()
        process.communicate()
