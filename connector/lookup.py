"""One lookup, from request to future: no thread waits for it, and every way it can end resolves the future.

The lease of an answer that nobody wants any more is given back at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import grpc

from mapflow.connector.messages import Lease, LookupResult, Want
from mapflow.connector.reasons import Reason, Unavailable
from mapflow.connector.session import Session
from mapflow.v1 import cache_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup:
    """What to look up, and whom to tell.

    Attributes:
        keys: chunk keys in prefix order.
        key_bytes: length of one key.
        wants: models and layers to look for.
        lease_s: life of the lease, in seconds; 0 looks only.
        deadline_s: most that the call may take.
        is_current: whether a session is still the client's.
        release: gives a lease back.
        fail: is told of every failure.
    """

    keys: Sequence[bytes]
    key_bytes: int
    wants: Sequence[Want]
    lease_s: float
    deadline_s: float
    is_current: Callable[[Session], bool]
    release: Callable[[Lease], None]
    fail: Callable[[Unavailable], None]

    def begin(self, session: Callable[[], Session]) -> Future[LookupResult]:
        """Send it within the session that `session` returns; never blocks or raises."""
        future: Future[LookupResult] = Future()
        try:
            self._send(session(), future)
        except Unavailable as error:
            self._refuse(future, error)
        except (TypeError, ValueError) as error:  # a value that no message can carry
            self._refuse(future, Unavailable(Reason.PROTOCOL, str(error)))
        return future

    def _send(self, session: Session, future: Future[LookupResult]) -> None:
        lease_s = min(self.lease_s, session.limits.max_lease_s)
        keys = self.keys[: session.limits.max_keys]
        sizes = {len(key) for key in keys}
        if sizes != {self.key_bytes}:
            raise Unavailable(Reason.PROTOCOL, f"{len(keys)} keys of {sorted(sizes)} bytes, not {self.key_bytes}")
        request = cache_pb2.LookupRequest(
            session_id=session.session_id,
            keys=b"".join(keys),
            key_bytes=self.key_bytes,
            wants=[cache_pb2.Want(kind=want.kind.value, model=want.model, layers=want.layers) for want in self.wants],
            lease_s=lease_s,
            device_arena_id=session.device_arena_id,
        )
        expires_at = time.monotonic() + lease_s
        call = begin_call(session, session.stub.Lookup, request, self.deadline_s)
        call.add_done_callback(lambda done: self._finish(session, done, len(keys), expires_at, future))

    def _finish(
        self, session: Session, call: Any, num_keys: int, expires_at: float, future: Future[LookupResult]
    ) -> None:
        lease = None
        try:
            response: cache_pb2.LookupResponse = finish_call(session, call)
            if response.lease_id:
                lease = Lease(
                    boot_id=session.boot_id,
                    session_id=session.session_id,
                    lease_id=response.lease_id,
                    expires_at=expires_at,
                )
            if not self.is_current(session):
                raise _again(session.failure(ConnectionError("the session ended while the lookup ran")))
            result = LookupResult.from_proto(
                response, self.wants, num_keys, session.boot_id, lease, session.device_arena_id
            )
        except Unavailable as error:
            if error.reason is Reason.SESSION_LOST:
                session.end(error)
            self._refuse(future, error)
        except ValueError as error:
            if lease is not None:
                self.release(lease)
            self._refuse(future, Unavailable(Reason.PROTOCOL, str(error)))
        else:
            if future.set_running_or_notify_cancel():
                future.set_result(result)
            elif lease is not None:
                self.release(lease)

    def _refuse(self, future: Future[LookupResult], error: Unavailable) -> None:
        self.fail(error)
        if future.set_running_or_notify_cancel():
            future.set_exception(error)


def begin_call(session: Session, method: Any, request: Any, deadline_s: float) -> Any:
    """Start a call; returns its grpc future.

    Raises:
        Unavailable: the session is over.
    """
    try:
        return method.future(request, timeout=deadline_s)
    except ValueError as error:  # the channel was closed under us
        raise _again(session.failure(error)) from error


def finish_call(session: Session, call: Any) -> Any:
    """The response of a call that is done.

    Raises:
        Unavailable: it failed.
    """
    try:
        return call.result()
    except (grpc.RpcError, grpc.FutureCancelledError) as error:
        raise _again(session.failure(error)) from error


def _again(error: Unavailable) -> Unavailable:
    return Unavailable(error.reason, error.detail)
