"""The stream of calls: order, deadlines, late answers, and its end, with a daemon that is a pair of queues."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator

import pytest

from mapflow.connector.call_stream import CallStream, PendingCall
from mapflow.connector.reasons import Reason, Refused, Unavailable
from mapflow.v1 import cache_pb2

from .conftest import wait_until

LOST = Unavailable(Reason.SESSION_LOST, "over")


class _Daemon:
    """Answers when the test says so."""

    def __init__(self) -> None:
        self.requests: list[cache_pb2.CallRequest] = []
        self.answers: queue.SimpleQueue[cache_pb2.CallResponse | Exception | None] = queue.SimpleQueue()

    def open(self, requests: Iterator[cache_pb2.CallRequest]) -> Iterator[cache_pb2.CallResponse]:
        while (answer := self.answers.get()) is not None:
            if isinstance(answer, Exception):
                raise answer
            self.requests.append(next(requests))
            yield answer


class _Call:
    """What a call was told."""

    def __init__(self, stream: CallStream, number: int = 0, deadline: float = 1e9) -> None:
        self.answers: list[tuple[int, bool]] = []
        self.errors: list[Unavailable] = []
        call = PendingCall(
            deadline=deadline,
            answered=lambda answer, is_late: self.answers.append((answer.lookup.lease_id, is_late)),
            failed=self.errors.append,
        )
        stream.send(cache_pb2.CallRequest(lookup=cache_pb2.LookupRequest(session_id=number)), call)


def answer(lease_id: int) -> cache_pb2.CallResponse:
    return cache_pb2.CallResponse(lookup=cache_pb2.LookupResponse(lease_id=lease_id))


@pytest.fixture
def daemon() -> Iterator[_Daemon]:
    one = _Daemon()
    yield one
    one.answers.put(None)


@pytest.fixture
def stream(daemon: _Daemon) -> CallStream:
    return CallStream(daemon.open, lambda error: LOST)


def test_answers_find_their_calls_in_order(stream: CallStream, daemon: _Daemon) -> None:
    calls = [_Call(stream, number) for number in range(3)]
    for lease_id in (7, 8, 9):
        daemon.answers.put(answer(lease_id))
    wait_until(lambda: bool(calls[2].answers))
    assert [call.answers for call in calls] == [[(7, False)], [(8, False)], [(9, False)]]
    assert [request.lookup.session_id for request in daemon.requests] == [0, 1, 2]


def test_a_refusal_ends_its_call_alone(stream: CallStream, daemon: _Daemon) -> None:
    refused, next_one = _Call(stream), _Call(stream)
    daemon.answers.put(cache_pb2.CallResponse(code=9, message="session 3 has ended"))
    daemon.answers.put(answer(5))
    wait_until(lambda: bool(next_one.answers))
    (error,) = refused.errors
    assert (error.reason, error.detail) == (Reason.SESSION_LOST, "session 3 has ended") and not refused.answers


def test_asking_waits_for_the_answer(stream: CallStream, daemon: _Daemon) -> None:
    daemon.answers.put(answer(3))
    assert stream.ask(cache_pb2.CallRequest(), 10.0).lookup.lease_id == 3
    daemon.answers.put(cache_pb2.CallResponse(code=5, message="no such reservation"))
    with pytest.raises(Refused, match="no such reservation"):
        stream.ask(cache_pb2.CallRequest(), 10.0)


def test_asking_in_vain(stream: CallStream, daemon: _Daemon) -> None:
    late: list[int] = []
    clock = threading.Timer(0.1, lambda: stream.expire(time.monotonic()))
    clock.start()
    with pytest.raises(Unavailable, match="deadline") as caught:
        stream.ask(cache_pb2.CallRequest(), 0.01, lambda answer: late.append(answer.lookup.lease_id))
    assert not isinstance(caught.value, Refused)
    daemon.answers.put(answer(9))
    wait_until(lambda: late == [9])


def test_a_caller_that_fails_keeps_nobody_else_from_its_answer(
    stream: CallStream, daemon: _Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(response: cache_pb2.CallResponse, is_late: bool) -> None:
        raise RuntimeError("a bug")

    stream.send(cache_pb2.CallRequest(), PendingCall(deadline=1e9, answered=fail, failed=lambda error: None))
    after = _Call(stream)
    daemon.answers.put(answer(1))
    daemon.answers.put(answer(2))
    wait_until(lambda: after.answers == [(2, False)])
    assert "a bug" in caplog.text


def test_a_code_that_grpc_does_not_know(stream: CallStream, daemon: _Daemon) -> None:
    call = _Call(stream)
    daemon.answers.put(cache_pb2.CallResponse(code=99, message="?"))
    wait_until(lambda: bool(call.errors))
    assert call.errors[0].reason is Reason.INTERNAL


def test_a_late_answer_comes_after_the_failure_and_says_so(stream: CallStream, daemon: _Daemon) -> None:
    late, patient = _Call(stream, deadline=10.0), _Call(stream, deadline=20.0)
    stream.expire(9.0)
    assert not late.errors
    stream.expire(10.0)
    stream.expire(11.0)
    assert [error.reason for error in late.errors] == [Reason.DEADLINE] and not patient.errors
    daemon.answers.put(answer(7))
    daemon.answers.put(answer(8))
    wait_until(lambda: bool(patient.answers))
    assert late.answers == [(7, True)] and patient.answers == [(8, False)]


def test_a_late_refusal_is_nobodys(stream: CallStream, daemon: _Daemon) -> None:
    late, after = _Call(stream, deadline=1.0), _Call(stream)
    stream.expire(1.0)
    daemon.answers.put(cache_pb2.CallResponse(code=5, message="late"))
    daemon.answers.put(answer(8))
    wait_until(lambda: bool(after.answers))
    assert len(late.errors) == 1 and not late.answers


@pytest.mark.parametrize("end", [None, ValueError("the channel is closed")])
def test_the_end_fails_what_is_under_way_and_what_comes_after(
    stream: CallStream, daemon: _Daemon, end: Exception | None
) -> None:
    late, waiting = _Call(stream, deadline=1.0), _Call(stream)
    stream.expire(1.0)
    daemon.answers.put(end)
    wait_until(lambda: bool(waiting.errors))
    assert waiting.errors == [LOST] and len(late.errors) == 1
    with pytest.raises(Unavailable, match="over"):
        _Call(stream)


def test_an_answer_too_many_ends_the_stream(daemon: _Daemon) -> None:
    ended: list[Exception | None] = []
    stream = CallStream(daemon.open, lambda error: ended.append(error) or LOST)  # type: ignore[func-returns-value]
    call = _Call(stream)
    daemon.answers.put(answer(1))
    wait_until(lambda: bool(call.answers))
    stream._outbox.put(cache_pb2.CallRequest())  # the daemon's answer to it belongs to no call
    daemon.answers.put(answer(2))
    wait_until(lambda: bool(ended))
    assert isinstance(ended[0], IndexError)


def test_a_daemon_that_answers_nothing_does_not_fill_the_memory(stream: CallStream) -> None:
    begun = time.monotonic()
    for number in range(1024):
        _Call(stream, number)
    with pytest.raises(Unavailable, match="1024 calls are unanswered"):
        _Call(stream)
    assert time.monotonic() - begun < 2.0
