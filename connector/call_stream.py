"""Calls of one session that carry no bytes of blobs, on one stream: answered in order, and cheaper than one for each.

A thread of its own takes the answers; only `ask` waits for one. What is late fails at its deadline, and its answer is
still handed over when it comes, since it may hold a lease.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass

import grpc

from mapflow.connector.reasons import Reason, Refused, Unavailable, from_status
from mapflow.v1 import cache_pb2

_log = logging.getLogger(__name__)
_MOST_PENDING = 1024
_CODES = {code.value[0]: code for code in grpc.StatusCode}


@dataclass(slots=True, kw_only=True)
class PendingCall:
    """A call under way.

    Attributes:
        deadline: when it fails, in `time.monotonic()` seconds.
        answered: given the answer, once; True with it if the call has failed by its deadline.
        failed: given the reason, unless the call was answered before; on any thread, and at most once.
    """

    deadline: float
    answered: Callable[[cache_pb2.CallResponse, bool], None]
    failed: Callable[[Unavailable], None]
    is_late: bool = False


class CallStream:
    """One stream of calls, from its opening to its end. Every method may be called from any thread."""

    def __init__(
        self,
        open_stream: Callable[[Iterator[cache_pb2.CallRequest]], Iterable[cache_pb2.CallResponse]],
        over: Callable[[Exception | None], Unavailable],
    ) -> None:
        """Open it.

        Args:
            open_stream: the stub's method.
            over: told what ended the stream, None for the daemon; returns what the calls under way failed with.
        """
        self._open_stream = open_stream
        self._over = over
        self._lock = threading.Lock()  # guards the fields below; never held during a callback
        self._outbox: queue.SimpleQueue[cache_pb2.CallRequest | None] = queue.SimpleQueue()
        self._pending: deque[PendingCall] = deque()
        self._ended: Unavailable | None = None
        threading.Thread(target=self._receive, name="mapflow-calls", daemon=True).start()

    def send(self, request: cache_pb2.CallRequest, call: PendingCall) -> None:
        """Send a request; `call` learns what comes of it.

        Raises:
            Unavailable: the stream is over, or too many calls are unanswered.
        """
        with self._lock:
            if self._ended is not None:
                raise Unavailable(self._ended.reason, self._ended.detail)
            if len(self._pending) >= _MOST_PENDING:
                raise Unavailable(Reason.DEADLINE, f"{_MOST_PENDING} calls are unanswered")
            self._pending.append(call)  # in the order of the outbox, which is that of the answers
            self._outbox.put(request)

    def ask(
        self,
        request: cache_pb2.CallRequest,
        deadline_s: float,
        late: Callable[[cache_pb2.CallResponse], None] = lambda answer: None,
    ) -> cache_pb2.CallResponse:
        """Send a request and wait for its answer; not for threads that must not wait.

        Args:
            request: the call.
            deadline_s: most that it may take.
            late: given an answer that comes after the deadline.

        Raises:
            Unavailable: no answer in time, the stream is over, or the call was refused (`Refused`).
        """
        future: Future[cache_pb2.CallResponse] = Future()

        def answered(answer: cache_pb2.CallResponse, is_late: bool) -> None:
            (late if is_late else future.set_result)(answer)

        def failed(error: Unavailable) -> None:
            future.set_exception(type(error)(error.reason, error.detail))  # a traceback belongs to one raise

        deadline = time.monotonic() + deadline_s
        self.send(request, PendingCall(deadline=deadline, answered=answered, failed=failed))
        return future.result()

    def expire(self, now: float) -> None:
        """Let calls fail whose deadline has come; to be called several times a deadline."""
        with self._lock:
            late = [call for call in self._pending if call.deadline <= now and not call.is_late]
            for call in late:
                call.is_late = True
        for call in late:
            call.failed(Unavailable(Reason.DEADLINE, "the daemon did not answer in time"))

    def close(self) -> None:
        """Send no more; the stream ends when the daemon has answered what is under way."""
        self._outbox.put(None)

    def _receive(self) -> None:
        error: Exception | None = None
        try:
            for response in self._open_stream(iter(self._outbox.get, None)):
                with self._lock:
                    call = self._pending.popleft()
                _tell(call, response)
        except Exception as caught:  # the channel was closed, an answer too many: calls under way must learn of any
            error = caught
        why = self._over(error)
        with self._lock:
            self._ended = why
            left = [call for call in self._pending if not call.is_late]
            self._pending.clear()
        for call in left:
            call.failed(why)


def _tell(call: PendingCall, response: cache_pb2.CallResponse) -> None:
    try:
        if not response.code:
            call.answered(response, call.is_late)
        elif not call.is_late:
            why = from_status(_CODES.get(response.code, grpc.StatusCode.UNKNOWN), response.message)
            call.failed(Refused(why.reason, why.detail))
    except Exception:  # of one call; the others wait for their answers
        _log.exception("an answer of the cache could not be taken")
