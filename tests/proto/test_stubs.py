"""The checked-in stubs are those of cache.proto, and run under the protobuf that is installed."""

import hashlib
import itertools
import os
import re
import subprocess
from pathlib import Path

import pytest

from mapflow.v1 import cache_pb2, cache_pb2_grpc

PROTO = Path(__file__).parents[2] / "proto"
GENERATED = ("cache_pb2.py", "cache_pb2.pyi", "cache_pb2_grpc.py", "cache.proto.sha256")


def test_stubs_were_made_from_this_proto() -> None:
    digest = hashlib.sha256((PROTO / "mapflow/v1/cache.proto").read_bytes()).hexdigest()
    recorded = (PROTO / "mapflow/v1/cache.proto.sha256").read_text().strip()
    assert recorded == digest, "cache.proto changed: run `make proto`"


def test_stubs_are_what_protoc_writes(tmp_path: Path) -> None:
    python = os.environ.get("PROTOC_PYTHON", "")
    if not Path(python).is_file():
        pytest.skip("PROTOC_PYTHON names no Python with grpcio-tools; `make test` sets it")
    subprocess.run([PROTO / "generate.sh", tmp_path], check=True, env={**os.environ, "PROTOC_PYTHON": python})
    for name in GENERATED:
        assert (tmp_path / "mapflow/v1" / name).read_bytes() == (PROTO / "mapflow/v1" / name).read_bytes(), name


def test_stubs_run_under_the_protobuf_of_protoc(tmp_path: Path) -> None:
    """protoc's own environment has protobuf 6, as LMCache wants it; this one has 7, which vLLM brings."""
    python = os.environ.get("PROTOC_PYTHON", "")
    if not Path(python).is_file():
        pytest.skip("PROTOC_PYTHON names no Python with grpcio-tools; `make test` sets it")
    (tmp_path / "mapflow").mkdir()
    (tmp_path / "mapflow/v1").symlink_to(PROTO / "mapflow/v1")
    program = (
        "import google.protobuf as p; from mapflow.v1 import cache_pb2 as m, cache_pb2_grpc as g;"
        "q = m.LookupRequest(session_id=7, keys=b'k');"
        "assert m.LookupRequest.FromString(q.SerializeToString()) == q and g.CacheStub; print(p.__version__)"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([python, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("6.")


def test_every_field_and_value_is_commented() -> None:
    lines = [line.strip() for line in (PROTO / "mapflow/v1/cache.proto").read_text().splitlines()]
    bare = [
        line
        for before, line in itertools.pairwise(lines)
        if re.match(r"(repeated )?[\w.]*( ?\w+)? = \d+;", line) and not before.startswith("//")
    ]
    assert not bare


def test_round_trip_and_service() -> None:
    message = cache_pb2.LookupRequest(session_id=7, keys=b"k" * 32, key_bytes=16, lease_s=1.5)
    assert cache_pb2.LookupRequest.FromString(message.SerializeToString()) == message
    methods = {method.name for method in cache_pb2.DESCRIPTOR.services_by_name["Cache"].methods}
    assert methods == {name for name in vars(cache_pb2_grpc.CacheServicer) if not name.startswith("_")}
