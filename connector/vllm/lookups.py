"""Look-ups of waiting requests: asked once, awaited with a deadline, and the leases that come of them.

Nothing here blocks an engine that has work: the scheduler comes back in its next step. An idle one would spin, and keep
the threads that bring the answer from running, so it waits a moment. What a run of chunks means for a request's rows is
`request_state`'s; who asks, and when, is `scheduler`'s.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from itertools import chain

from mapflow.connector.client import Client
from mapflow.connector.counters import Counters, LimitedLog
from mapflow.connector.messages import NO_COPY, Hit, Lease, LookupResult, Want
from mapflow.connector.reasons import Unavailable
from mapflow.connector.vllm.messages import MappedChunk
from mapflow.connector.vllm.request_state import RequestState
from mapflow.connector.vllm.shards import longest_run

logger = logging.getLogger(__name__)

_IDLE_WAIT_S = 0.001  # in one step
_LEASE_MARGIN = 0.3  # of its life a lease is not used any more, for the sake of a step that runs late


class Lookups:
    """The look-ups under way, at most one a request."""

    def __init__(
        self,
        client: Client,
        counters: Counters,
        *,
        deadline_s: float,
        lease_s: float,
        clock: Callable[[], float],
        linger_s: float = 0.0,
    ) -> None:
        """linger_s: how long a lease is held beyond its use, because a GPU may still be copying."""
        self._client = client
        self._counters = counters
        self._deadline_s = deadline_s
        self._lease_s = lease_s
        self._clock = clock
        self._linger_s = linger_s
        self._may_wait = False
        self._lingering: deque[tuple[float, Lease]] = deque()
        self._log = LimitedLog(logger)
        self._pending: dict[str, tuple[Future[LookupResult], range, float]] = {}

    def ready(self, state: RequestState, want: Want, num_computed: int) -> bool:
        """Whether the request's maps are known, or known not to come; asks the daemon where that was not done yet.

        May be called any number of times; another `num_computed`, as after a preemption, asks again.
        """
        if state.looked_up_from != num_computed and state.request_id not in self._pending:
            self._ask(state, want, num_computed)
        pending = self._pending.get(state.request_id)
        if pending is None:
            return True
        future, chunks, deadline = pending
        if self._may_wait and not future.done():
            self._may_wait = False
            wait([future], _IDLE_WAIT_S)
        if not future.done():
            if self._clock() < deadline:
                return False
            self._failed("deadline", f"no answer within {1000 * self._deadline_s:.0f} ms")
            self._abandon(state.request_id)
            return True
        del self._pending[state.request_id]
        try:
            self._use(state, future.result(), chunks)
        except Unavailable as error:
            self._failed(error.reason, error.detail)
        return True

    def check_lease(self, state: RequestState) -> None:
        """Forget an order whose lease is about to end."""
        if state.lease is not None and self._clock() > state.lease.expires_at - _LEASE_MARGIN * self._lease_s:
            self._counters.add("request_not_reused", "lease_expired")
            self.release(state)

    def release(self, state: RequestState) -> None:
        """Give up a request's order and lease; it can be looked up anew."""
        self._end_lease(state)
        state.order, state.looked_up_from = None, None

    def forget(self, state: RequestState) -> None:
        """A request ended, maybe while its look-up is under way."""
        if state.request_id in self._pending:
            self._abandon(state.request_id)
        self._end_lease(state)

    def _ask(self, state: RequestState, want: Want, num_computed: int) -> None:
        self.release(state)
        state.looked_up_from = num_computed
        chunks = state.chunks_to_look_up(num_computed)
        if chunks:
            future = self._client.lookup(state.keys[chunks.start : chunks.stop], [want], self._lease_s)
            self._pending[state.request_id] = (future, chunks, self._clock() + self._deadline_s)

    def _use(self, state: RequestState, result: LookupResult, chunks: range) -> None:
        state.lease = result.lease
        num_chunks, hits = longest_run(result.hits)
        self._counters.add("lookup_chunks", "asked", len(chunks))
        self._counters.add("lookup_chunks", "hit", num_chunks)
        if not hits:
            self._counters.add("request_not_reused", "sharded_producer" if result.hits else "miss")
            self._end_lease(state)
            return
        mapped = _mapped(state, num_chunks, hits, chunks.start)
        state.order = state.mapped_order(mapped, tuple(hit.producer for hit in hits), result.device_arena_id)

    def _failed(self, reason: str, detail: str) -> None:
        self._counters.add("lookup_failed", reason)
        self._log.warning(reason, "mapflow: look-up failed (%s: %s); requests are computed in full", reason, detail)

    def _abandon(self, request_id: str) -> None:
        """Forget a look-up; the client releases a lease that it still brings."""
        future, _, _ = self._pending.pop(request_id)
        if not future.cancel() and future.exception() is None and (lease := future.result().lease) is not None:
            self._client.release([lease])

    def begin_step(self, *, idle: bool) -> None:
        """A step without work (`idle`) or with some; releases leases whose copies are certainly done."""
        self._may_wait = idle
        over = []
        while self._lingering and self._lingering[0][0] <= self._clock():
            over.append(self._lingering.popleft()[1])
        if over:
            self._client.release(over)

    def _end_lease(self, state: RequestState) -> None:
        if state.lease is None:
            return
        if self._linger_s:
            self._lingering.append((self._clock() + self._linger_s, state.lease))
        else:
            self._client.release([state.lease])
        state.lease = None


def _mapped(state: RequestState, num_chunks: int, hits: Sequence[Hit], first: int) -> list[MappedChunk]:
    """The chunks of a run, of which every rank of the sender has maps."""
    has_copies = any(hit.device_offsets for hit in hits)
    return [
        MappedChunk(
            index=first + number,
            key=state.keys[first + number],
            extents=tuple(chain.from_iterable(hit.extents[number] for hit in hits)),
            device_offsets=tuple(chain.from_iterable(_copies(hit, number) for hit in hits)) if has_copies else (),
        )
        for number in range(num_chunks)
    ]


def _copies(hit: Hit, number: int) -> tuple[int, ...]:
    return hit.device_offsets[number] if hit.device_offsets else (NO_COPY,) * len(hit.extents[number])
