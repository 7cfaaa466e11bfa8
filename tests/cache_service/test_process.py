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
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from mapflow.v1 import cache_pb2, cache_pb2_grpc

pytestmark = pytest.mark.service

PRODUCER = cache_pb2.Producer(id="m@1/float32/tp0of1", model="m@1")
NAMESPACE = cache_pb2.Namespace(
    format_version=1, tokenizer_fingerprint="f00d", chunk_tokens=512, block=64, key_hash=cache_pb2.KEY_HASH_XXH3_128
)
OPEN = cache_pb2.SessionRequest(open=cache_pb2.OpenSession(client_name="test", namespace=NAMESPACE, producer=PRODUCER))
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


class Client:
    """A session over blocking stubs, with one blob published, leased, and another one reserved."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.stub: Any = cache_pb2_grpc.CacheStub(channel)  # type: ignore[no-untyped-call]
        self._stop = False
        self.stream = self.stub.Session(self._requests())
        self.session = next(self.stream).opened.session_id

    def _requests(self) -> Iterator[cache_pb2.SessionRequest]:
        yield OPEN
        while not self._stop:
            yield cache_pb2.SessionRequest(heartbeat=cache_pb2.Heartbeat())
            time.sleep(0.1)

    def close(self) -> None:
        """End the session."""
        self._stop = True
        with contextlib.suppress(grpc.RpcError):
            for _ in self.stream:
                pass

    def publish(self, key: bytes = KEY, data: bytes = b"blob") -> None:
        """Store one blob."""
        entry = cache_pb2.NewEntry(key=key, layer=0, num_bytes=len(data))
        header = cache_pb2.StoreHeader(
            session_id=self.session, kind=cache_pb2.KIND_MAP, producer=PRODUCER.id, entry=entry
        )
        requests = [cache_pb2.StoreRequest(header=header), cache_pb2.StoreRequest(data=data)]
        assert self.stub.Store(iter(requests)).state == cache_pb2.RESERVATION_STATE_RESERVED

    def lookup(self, key: bytes = KEY, lease_s: float = 30.0) -> cache_pb2.LookupResponse:
        """Look one blob up."""
        want = cache_pb2.Want(kind=cache_pb2.KIND_MAP, model="m@1", layers=[0])
        request = cache_pb2.LookupRequest(
            session_id=self.session, keys=key, key_bytes=16, wants=[want], lease_s=lease_s
        )
        response = self.stub.Lookup(request)
        assert isinstance(response, cache_pb2.LookupResponse)
        return response

    def reserve(self, key: bytes) -> cache_pb2.Reservation:
        """Ask for room for one blob."""
        entry = cache_pb2.NewEntry(key=key, layer=0, num_bytes=100)
        request = cache_pb2.ReserveRequest(
            session_id=self.session, kind=cache_pb2.KIND_MAP, producer=PRODUCER.id, entries=[entry]
        )
        (reservation,) = self.stub.Reserve(request).reservations
        assert isinstance(reservation, cache_pb2.Reservation)
        return reservation


@contextlib.contextmanager
def connected(endpoint: str) -> Iterator[Client]:
    """A client with an open session."""
    with grpc.insecure_channel(endpoint) as channel:
        client = Client(channel)
        try:
            yield client
        finally:
            client.close()


def until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Wait for something that happens in another process."""
    give_up_at = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up_at, "it did not happen in time"
        time.sleep(0.02)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


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


def test_sigterm_waits_for_readers_and_writers(daemon: Daemon) -> None:
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


def test_draining_has_a_bound(start_daemon: StartDaemon) -> None:
    daemon = start_daemon(options=("--drain", "0.5"))
    with connected(daemon.endpoint) as client:
        client.reserve(KEY)
        started = time.monotonic()
        assert daemon.terminate() == 0
        assert 0.5 <= time.monotonic() - started < 8.0
    assert "event=drained complete=false" in daemon.log


def test_a_second_signal_ends_it_at_once(start_daemon: StartDaemon) -> None:
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
    until(lambda: bool(open_segments(process.pid)), 30.0)
    (segment,) = open_segments(process.pid)
    process.send_signal(signal.SIGTERM)
    _, log = process.communicate(timeout=30)
    assert process.returncode == 0, log
    assert "event=stopping" in log
    assert "event=serving" not in log
    assert not segment.exists()


def test_a_crashed_daemon_comes_back_as_another_boot(daemon: Daemon) -> None:
    boot, segment = daemon.stats().boot_id, daemon.segment_path
    with grpc.insecure_channel(daemon.endpoint) as channel:
        client = Client(channel)
        client.publish()
        session = client.session
        daemon.kill()
        assert segment.exists()
        assert daemon.socket_path.exists()
        daemon.restart()
        with pytest.raises(grpc.RpcError):
            list(client.stream)
        client.close()
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
        done = run_daemon("--endpoint", f"127.0.0.1:{port}", "--arena", "1MiB")
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
def test_a_client_that_is_gone_holds_nothing(start_daemon: StartDaemon, way: str) -> None:
    daemon = start_daemon(options=("--session-timeout", "2"))
    script = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import grpc, time
from test_process import Client
client = Client(grpc.insecure_channel({daemon.endpoint!r}))
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


def test_metrics_can_be_scraped(start_daemon: StartDaemon) -> None:
    port = free_port()
    daemon = start_daemon(arena="1MiB", options=("--metrics-port", str(port)))
    with connected(daemon.endpoint) as client:
        client.publish()
        client.lookup()
        client.lookup(b"n" * 16)
        with pytest.raises(grpc.RpcError):
            client.stub.Commit(cache_pb2.CommitRequest(session_id=client.session, reservation_ids=[1]))
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
            text = response.read().decode()
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    expected = {
        "mapflow_lookups_total": 2,
        "mapflow_lookup_chunks_total": 2,
        "mapflow_hit_chunks_total": 1,
        "mapflow_miss_chunks_total": 1,
        "mapflow_evicted_entries_total": 0,
        "mapflow_arena_bytes": 1 << 20,
        "mapflow_used_bytes": 64,
        "mapflow_num_entries": 1,
        "mapflow_num_sessions": 1,
        "mapflow_num_leases": 1,
        'mapflow_rpc_seconds_count{code="OK",method="Lookup"}': 2,
        'mapflow_rpc_seconds_count{code="NOT_FOUND",method="Commit"}': 1,
    }
    assert {name: float(values[name]) for name in expected} == expected
    assert daemon.terminate() == 0


def test_health_and_reflection(daemon: Daemon) -> None:
    assert health(daemon.endpoint, "") == health_pb2.HealthCheckResponse.SERVING
    with grpc.insecure_channel(daemon.endpoint) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        assert {"mapflow.v1.Cache", "grpc.health.v1.Health"} <= set(database.get_services())
        file = database.FindFileContainingSymbol("mapflow.v1.Cache")
        assert [method.name for method in file.service[0].method][:3] == ["Handshake", "Session", "Lookup"]


def test_logs_are_lines_of_json_on_request_and_hold_no_keys(socket_folder: Path) -> None:
    import json

    command = [sys.executable, "-P", "-m", "mapflow.cache_service", "--arena", "1MiB", "--log-format", "json"]
    endpoint = f"unix://{socket_folder / 's'}"
    process = subprocess.Popen([*command, "--endpoint", endpoint], stderr=subprocess.PIPE, text=True)
    try:
        until(lambda: (socket_folder / "s").exists(), 30.0)
        with connected(endpoint) as client:
            client.publish()
    finally:
        process.terminate()
        _, log = process.communicate(timeout=30)
    events = [json.loads(line) for line in log.splitlines()]
    names = [event["event"] for event in events]
    assert names[-2:] == ["drained", "stopped"]
    assert {"serving", "session_opened", "session_ended", "stopping"} <= set(names)
    assert next(event for event in events if event["event"] == "serving")["endpoint"] == endpoint
    assert KEY.decode() not in log
    assert KEY.hex() not in log
