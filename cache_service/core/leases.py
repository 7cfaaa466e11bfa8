"""Leases: while one is in force, the chunks under it are not evicted and its extents may be read in place.

So may the copies in a device arena that it names. A lease ends when its session releases it, when its time is up, and
when its session ends. In the last case its chunks and copies stay for a while: nobody can read under it any more, but
what a GPU began to read before may not be done.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mapflow.cache_service.core.device_tier import HeldCopies
from mapflow.cache_service.core.errors import NotFound
from mapflow.cache_service.core.holdings import Holdings
from mapflow.cache_service.core.pool import Pool
from mapflow.cache_service.core.values import Extent


@dataclass(frozen=True, slots=True)
class _Lease:
    chunks: list[bytes]  # what was pinned
    extents: tuple[tuple[Extent, ...], ...]  # of each hit
    expires_at: float
    copies: HeldCopies | None


class Leases:
    """All leases in force on the chunks of one pool."""

    def __init__(self, pool: Pool, boot_tag: int, grace_s: float = 0.0) -> None:
        """grace_s: how long what leases hold stays when their session ends, until they would have expired at most."""
        self._pool = pool
        self._leases: Holdings[_Lease] = Holdings(boot_tag)
        self._grace_s = grace_s
        self._fading: list[tuple[float, int, _Lease]] = []  # heap of (until, id, lease)

    def __len__(self) -> int:
        return len(self._leases)

    def grant(
        self,
        session_id: int,
        chunks: Sequence[bytes],
        extents: tuple[tuple[Extent, ...], ...],
        expires_at: float,
        copies: HeldCopies | None = None,
    ) -> int:
        """Pin a prefix for a session, and let go of `copies` with it; returns the id of the lease.

        extents: of each hit, that may be read under the lease.
        """
        lease = _Lease(self._pool.pin(chunks), extents, expires_at, copies)
        return self._leases.add(session_id, lease, expires_at)

    def check(self, session_id: int, lease_id: int, extents: Iterable[Extent]) -> None:
        """Make sure that extents may be read.

        Raises:
            NotFound: the session holds no such lease any more, or the lease does not cover one of the extents.
        """
        lease = self._leases.get(session_id, lease_id)
        if lease is None:
            raise NotFound(f"lease {lease_id} is not in force in session {session_id}; look up again")
        if missing := set(extents).difference(*lease.extents):
            extent = min(missing, key=lambda extent: extent.offset)
            raise NotFound(f"lease {lease_id} does not cover {extent.num_bytes} bytes at {extent.offset}")

    def release(self, session_id: int, lease_ids: Sequence[int]) -> None:
        """End leases; one that has ended already is no error.

        Raises:
            NotFound: an id that was never given to this session; then none is released.
        """
        held = []
        for lease_id in dict.fromkeys(lease_ids):
            if self._leases.get(session_id, lease_id) is not None:
                held.append(lease_id)
            elif not self._leases.has_ended(lease_id):
                raise NotFound(f"lease {lease_id} is not one of session {session_id}")
        self._end(held)

    def end_session(self, session_id: int, now: float) -> None:
        """End every lease of a session; chunks and copies stay for the grace."""
        for lease_id in self._leases.of_session(session_id):
            lease = self._leases.remove(lease_id)
            heapq.heappush(self._fading, (min(lease.expires_at, now + self._grace_s), lease_id, lease))
        self._let_go(now)

    def expire(self, now: float) -> None:
        """End every lease whose time is up, and let go of what has had its grace."""
        self._end(self._leases.due(now))
        self._let_go(now)

    def _let_go(self, now: float) -> None:
        while self._fading and self._fading[0][0] <= now:
            self._unpin(heapq.heappop(self._fading)[2])

    def _end(self, lease_ids: Iterable[int]) -> None:
        for lease_id in lease_ids:
            self._unpin(self._leases.remove(lease_id))

    def _unpin(self, lease: _Lease) -> None:
        self._pool.unpin(lease.chunks)
        if lease.copies is not None:
            lease.copies.let_go()
