"""Every call with messages made from the protocol's descriptors: a status with a reason each, and a daemon that lives.

`MAPFLOW_FUZZ=100000 pytest -m service tests/cache_service/test_fuzz.py` makes so many instead of three thousand.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message_factory import GetMessageClass

from mapflow.v1 import cache_pb2

pytestmark = [pytest.mark.service, pytest.mark.timeout(3600)]

_INPUTS = int(os.environ.get("MAPFLOW_FUZZ", "3000"))
_METHODS = list(cache_pb2.DESCRIPTOR.services_by_name["Cache"].methods)
_REFUSALS = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
}
_KEYS = [bytes([number]) * size for number in range(4) for size in (16, 32)]
_INTEGERS = [0, 1, 2, 3, 63, 64, 100, 4096, 2**31 - 1, 2**32 - 1, 2**63, 2**64 - 1]
_LIMITS = {
    FieldDescriptor.CPPTYPE_UINT32: 2**32 - 1,
    FieldDescriptor.CPPTYPE_INT32: 2**31 - 1,
    FieldDescriptor.CPPTYPE_ENUM: 2**31 - 1,
    FieldDescriptor.CPPTYPE_UINT64: 2**64 - 1,
    FieldDescriptor.CPPTYPE_INT64: 2**63 - 1,
}
_NUMBERS = [0.0, 0.01, 1.0, 30.0, 1e9, -1.0, math.inf, math.nan]
_PRODUCER = "m@1/float32/tp0of1"
_SENSIBLE = {  # by the field's name, what makes sense; three times out of four
    "kind": [1],
    "key": _KEYS[::2],
    "parent_key": [b""],
    "keys": [b"".join(_KEYS[::2]), _KEYS[0]],
    "key_bytes": [16],
    "layer": [0, 1],
    "layers": [0, 1],
    "num_bytes": [1, 64, 100],
    "producer": [_PRODUCER],
    "id": [_PRODUCER],
    "model": ["m@1"],
    "lease_s": [0.0, 1.0, 30.0],
    "device_arena_id": [0],
}
_TEXTS = [_PRODUCER, "m@1", "", "fuzz", "a/b/c/d", "\0", "\u2028" * 20, "x" * 5000]


class Known:
    """Ids that the daemon gave out, so that some messages name what is there."""

    def __init__(self) -> None:
        self.ids: dict[str, list[int]] = {"session_id": [], "lease_id": [], "reservation_id": []}

    def note(self, response: Any) -> None:
        """Remember the ids in an answer."""
        for field, value in response.ListFields():
            if field.name in self.ids:
                ids = self.ids[field.name]
                if field.name != "session_id":  # of streams that have ended
                    ids[:] = [*ids[-5:], value]
            elif field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
                for one in [value] if hasattr(value, "ListFields") else value:
                    self.note(one)


def _scalar(chance: random.Random, field: FieldDescriptor, known: Known) -> Any:
    sensible = known.ids.get(field.name.removesuffix("s")) or _SENSIBLE.get(field.name)
    if sensible and chance.random() < 0.75:
        return chance.choice(sensible)
    if field.cpp_type in _LIMITS:
        return min(chance.choice(_INTEGERS), _LIMITS[field.cpp_type])
    if field.cpp_type in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return chance.choice(_NUMBERS)
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return chance.random() < 0.5
    if field.type == FieldDescriptor.TYPE_BYTES:
        return chance.choice([*_KEYS, b"".join(_KEYS[::2]), b"", chance.randbytes(chance.randrange(70))])
    return chance.choice(_TEXTS)


def _message(chance: random.Random, descriptor: Descriptor, known: Known) -> Any:
    message = GetMessageClass(descriptor)()
    for field in descriptor.fields:
        if chance.random() < 0.1:
            continue
        for _ in range(chance.randrange(4) if field.is_repeated else 1):
            if field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
                part = _message(chance, field.message_type, known)
                if field.is_repeated:
                    getattr(message, field.name).append(part)
                else:
                    getattr(message, field.name).CopyFrom(part)
            elif field.is_repeated:
                getattr(message, field.name).append(_scalar(chance, field, known))
            else:
                setattr(message, field.name, _scalar(chance, field, known))
    return message


def _answers(stub: Any, method: Any, requests: list[Any]) -> Iterator[Any]:
    call = getattr(stub, method.name)
    sent = iter(requests) if method.client_streaming else requests[0]
    if method.server_streaming:
        yield from call(sent, timeout=10)
    else:
        yield call(sent, timeout=10)


def test_every_call_answers_anything(daemon: Any, connected: Callable[[str], AbstractContextManager[Any]]) -> None:
    known, outcomes = Known(), {method.name: set() for method in _METHODS}

    def resident_bytes() -> int:
        return int(Path(f"/proc/{daemon.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def fuzz(seed: int) -> None:
        chance = random.Random(seed)
        method = chance.choice(_METHODS)
        count = chance.randrange(1, 5) if method.client_streaming else 1
        requests = [_message(chance, method.input_type, known) for _ in range(count)]
        refusal = None
        try:
            for answer in _answers(client.stub, method, requests):
                known.note(answer)
                if method.name == "Calls" and answer.code:
                    assert answer.code in {one.value[0] for one in _REFUSALS} and answer.message
        except grpc.RpcError as error:
            refusal = error
        code = grpc.StatusCode.OK if refusal is None else refusal.code()
        assert refusal is None or (code in _REFUSALS and refusal.details()), f"seed {seed}, {method.name}: {refusal}"
        outcomes[method.name].add(code)

    with connected(daemon.endpoint) as client:
        known.ids["session_id"] = [client.session]
        before = resident_bytes()
        for seed in range(_INPUTS):
            fuzz(seed)
        assert resident_bytes() - before < 64 << 20
        client.publish(key=b"z" * 16)
        assert client.lookup(key=b"z" * 16).hits[0].num_chunks == 1
    assert "Traceback" not in daemon.log
    refused = {name for name, codes in outcomes.items() if grpc.StatusCode.OK not in codes}
    assert refused <= {"Store", "Fetch"}, "messages that make no sense find nothing"  # bytes seldom fit their header


@pytest.mark.parametrize("method", [method.name for method in _METHODS if not method.client_streaming])
def test_bytes_that_are_no_message(daemon: Any, method: str) -> None:
    """gRPC itself refuses them."""
    with grpc.insecure_channel(daemon.endpoint) as channel:
        call = channel.stream_stream(f"/mapflow.v1.Cache/{method}", _registered_method=False)
        with pytest.raises(grpc.RpcError) as caught:
            list(call(iter([b"\xff\xff\xff"]), timeout=10))
        assert caught.value.code() in {grpc.StatusCode.UNKNOWN, *_REFUSALS} and caught.value.details()
    assert daemon.stats().num_sessions == 0
