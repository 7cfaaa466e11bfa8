"""What operators see of the daemon: metrics, health, reflection and logs."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from mapflow.v1 import cache_pb2

pytestmark = pytest.mark.service

KEY = b"k" * 16

StartDaemon = Callable[..., Any]
Connect = Callable[[str], AbstractContextManager[Any]]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_metrics_can_be_scraped(start_daemon: StartDaemon, connected: Connect) -> None:
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


def test_health_and_reflection(daemon: Any) -> None:
    with grpc.insecure_channel(daemon.endpoint) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        for service in ("", "mapflow.v1.Cache"):
            answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=10)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        database = ProtoReflectionDescriptorDatabase(channel)
        assert {"mapflow.v1.Cache", "grpc.health.v1.Health"} <= set(database.get_services())
        file = database.FindFileContainingSymbol("mapflow.v1.Cache")
        assert [method.name for method in file.service[0].method][:3] == ["Handshake", "Session", "Lookup"]


def test_logs_are_lines_of_json_on_request_and_hold_no_keys(socket_folder: Path, connected: Connect) -> None:
    command = [sys.executable, "-P", "-m", "mapflow.cache_service", "--arena", "1MiB", "--log-format", "json"]
    endpoint = f"unix://{socket_folder / 's'}"
    process = subprocess.Popen([*command, "--endpoint", endpoint], stderr=subprocess.PIPE, text=True)
    try:
        give_up_at = time.monotonic() + 30.0
        while not (socket_folder / "s").exists():
            assert time.monotonic() < give_up_at, "the daemon did not start"
            time.sleep(0.02)
        with connected(endpoint) as client:
            client.publish(KEY)
    finally:
        process.terminate()
        _, log = process.communicate(timeout=30)
    events = [json.loads(line) for line in log.splitlines()]
    names = [event["event"] for event in events]
    assert names[-2:] == ["drained", "stopped"]
    assert {"serving", "session_opened", "session_ended", "stopping"} <= set(names)
    assert next(event for event in events if event["event"] == "serving")["endpoint"] == endpoint
    assert "kkkkkkkk" not in log
    assert KEY.hex() not in log
