"""One lookup, from request to future: no thread waits for it, and every way it can end resolves the future.

The lease of an answer that nobody wants any more is given back at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from mapflow.connector.call_stream import PendingCall
from mapflow.connector.messages import Lease, LookupResult, Want
from mapflow.connector.reasons import Reason, Unavailable
from mapflow.connector.session import Session
from mapflow.v1 import cache_pb2


@dataclass(slots=True, kw_only=True)
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
        request = cache_pb2.CallRequest()
        lookup = request.lookup  # filled in place, which takes half as long
        lookup.session_id = session.session_id
        lookup.keys = b"".join(keys)
        lookup.key_bytes = self.key_bytes
        lookup.lease_s = lease_s
        lookup.device_arena_id = session.device_arena_id
        for want in self.wants:
            lookup.wants.add(kind=want.kind.value, model=want.model, layers=want.layers)
        now = time.monotonic()

        def answered(answer: cache_pb2.CallResponse, is_late: bool) -> None:
            lease = self._lease(session, answer.lookup, now + lease_s)
            if is_late or not self._resolve(session, answer.lookup, len(keys), lease, future):
                self._give_back(lease)

        def failed(error: Unavailable) -> None:
            if error.reason is Reason.SESSION_LOST:
                session.end(error)
            self._refuse(future, error)

        call = PendingCall(deadline=now + self.deadline_s, answered=answered, failed=failed)
        session.calls.send(request, call)

    def _resolve(
        self,
        session: Session,
        response: cache_pb2.LookupResponse,
        num_keys: int,
        lease: Lease | None,
        future: Future[LookupResult],
    ) -> bool:
        """Whether somebody has the answer, and the lease with it."""
        if not self.is_current(session):
            self._refuse(future, session.failure(ConnectionError("the session ended while the lookup ran")))
            return False
        try:
            result = LookupResult.from_proto(
                response, self.wants, num_keys, session.boot_id, lease, session.device_arena_id
            )
        except ValueError as error:
            self._refuse(future, Unavailable(Reason.PROTOCOL, str(error)))
            return False
        if not future.set_running_or_notify_cancel():
            return False
        future.set_result(result)
        return True

    def _lease(self, session: Session, response: cache_pb2.LookupResponse, expires_at: float) -> Lease | None:
        if not response.lease_id:
            return None
        return Lease(
            boot_id=session.boot_id,
            session_id=session.session_id,
            lease_id=response.lease_id,
            expires_at=expires_at,
        )

    def _give_back(self, lease: Lease | None) -> None:
        if lease is not None:
            self.release(lease)

    def _refuse(self, future: Future[LookupResult], error: Unavailable) -> None:
        self.fail(error)
        if future.set_running_or_notify_cancel():
            future.set_exception(Unavailable(error.reason, error.detail))  # a traceback belongs to one raise
