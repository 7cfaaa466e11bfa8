"""Why the cache could not help: one list of reasons for counters, log lines and callers.

Everything that goes wrong between an engine and the daemon ends in one `Unavailable`. The engine then runs as if there
were no cache. This room never retries, counts or logs.
"""

from __future__ import annotations

from enum import StrEnum

import grpc


class Reason(StrEnum):
    """What went wrong, as metrics name it."""

    UNREACHABLE = "unreachable"
    """No session with a daemon now."""
    DEADLINE = "deadline"
    """The daemon did not answer in time."""
    DRAINING = "draining"
    """The daemon is shutting down and takes no new work."""
    RESTARTED = "restarted"
    """The lease, reservation or extent belongs to an earlier start of the daemon."""
    SESSION_LOST = "session_lost"
    """The daemon ended the session that the lease or reservation belonged to."""
    LEASE_EXPIRED = "lease_expired"
    """The lease ran out before its bytes were read."""
    RESERVATION_EXPIRED = "reservation_expired"
    """The room was taken back before it was written and committed."""
    FULL = "full"
    """The arena has no room even after eviction."""
    NO_SHARED_MEMORY = "no_shared_memory"
    """The arena cannot be mapped by this process."""
    VERSION_SKEW = "version_skew"
    """The daemon does not speak our protocol or blob format."""
    PROTOCOL = "protocol"
    """One side sent something that the other could not accept."""
    INTERNAL = "internal"
    """The daemon failed; its log has the traceback."""
    CLOSED = "closed"
    """This client was closed."""


class Unavailable(Exception):
    """The cache cannot help with this request, and why.

    Attributes:
        reason: for counters.
        detail: one line for the log.
    """

    def __init__(self, reason: Reason, detail: str) -> None:
        """Keep both; the text of the exception is `<reason>: <detail>`."""
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}"


class Refused(Unavailable):
    """The daemon answered, and refused."""


_BY_STATUS = {
    grpc.StatusCode.DEADLINE_EXCEEDED: Reason.DEADLINE,
    grpc.StatusCode.UNAVAILABLE: Reason.UNREACHABLE,
    grpc.StatusCode.NOT_FOUND: Reason.SESSION_LOST,
    grpc.StatusCode.FAILED_PRECONDITION: Reason.SESSION_LOST,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Reason.FULL,
    grpc.StatusCode.UNIMPLEMENTED: Reason.VERSION_SKEW,
    grpc.StatusCode.INVALID_ARGUMENT: Reason.PROTOCOL,
    grpc.StatusCode.UNAUTHENTICATED: Reason.PROTOCOL,
    grpc.StatusCode.PERMISSION_DENIED: Reason.PROTOCOL,
    grpc.StatusCode.INTERNAL: Reason.INTERNAL,
    grpc.StatusCode.UNKNOWN: Reason.INTERNAL,
    grpc.StatusCode.CANCELLED: Reason.UNREACHABLE,
}


def from_rpc_error(error: grpc.RpcError) -> Unavailable:
    """Translate the status of a failed call."""
    return from_status(error.code(), error.details() or "no details")


def from_status(code: grpc.StatusCode, detail: str) -> Unavailable:
    """Translate a status; the only place that does."""
    reason = _BY_STATUS.get(code, Reason.INTERNAL)
    if code is grpc.StatusCode.UNAVAILABLE and "shutting down" in detail:  # the daemon's words, not gRPC's
        reason = Reason.DRAINING
    return Unavailable(reason, detail)
