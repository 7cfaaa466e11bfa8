"""What the core refuses, and why; each message is one line that names the value and the way out.

Knows nothing of gRPC: `cache_service/status.py` turns these into status codes. A miss, or an arena that is full, is a
result and never one of these.
"""

from __future__ import annotations


class CacheError(Exception):
    """A request that the cache refuses."""


class InvalidRequest(CacheError):
    """A malformed request: a value that no state of the cache could accept."""


class NotFound(CacheError):
    """A session, lease or reservation that is not there (any more)."""


class PreconditionFailed(CacheError):
    """A session that has ended or belongs to another boot, or a format that the daemon does not speak."""


class Draining(CacheError):
    """The daemon shuts down and takes no new work."""
