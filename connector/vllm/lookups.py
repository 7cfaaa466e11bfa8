"""Look-ups of waiting requests: asked once, awaited with a deadline, and the leases that come of them.

Nothing here blocks an engine that has work: the scheduler comes back in its next step. An idle one would spin, and keep
the threads that bring the answer from running, so it waits a moment. What a run of chunks means for a request's rows is
`request_state`'s; who asks, and when, is `scheduler`'s.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from dataclasses import replace
from itertools import chain

from mapflow.connector.client import Client
from mapflow.connector.counters import Counters, LimitedLog
from mapflow.connector.messages import NO_COPY, Hit, Lease, LookupResult, Want
from mapflow.connector.reasons import Unavailable
from mapflow.connector.vllm.messages import MappedChunk
from mapflow.connector.vllm.request_state import PendingLookup, RequestState
from mapflow.connector.vllm.shards import longest_run

logger = logging.getLogger(__name__)

_IDLE_WAIT_S = 0.002  # in one step
_EARLY_S = 0.1  # an answer to an earlier question is of no use: by now there may be more maps
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
        self._worked_at = -math.inf  # when the last step with work was planned
        self._lingering: deque[tuple[float, Lease]] = deque()
        self._log = LimitedLog(logger)
        self._pending: dict[str, PendingLookup] = {}

    def ask_early(self, state: RequestState, want: Want) -> None:
        """Ask for all of a request's maps before anybody knows which of its rows vLLM has cached. On any thread."""
        state.early = self._send(state, want, state.chunks_to_look_up(0))

    def ready(self, state: RequestState, want: Want, num_computed: int) -> bool:
        """Whether the request's maps are known, or known not to come; asks the daemon where that was not done yet.

        May be called any number of times; another `num_computed`, as after a preemption, asks again.
        """
        if state.looked_up_from != num_computed and state.request_id not in self._pending:
            self._ask(state, want, num_computed)
        pending = self._pending.get(state.request_id)
        if pending is None:
            return True
        future = pending.future
        if self._may_wait and not future.done():
            self._may_wait = False
            wait([future], _IDLE_WAIT_S)
        if not future.done():
            if self._clock() < pending.asked_at + self._deadline_s:
                return False
            self._failed("deadline", f"no answer within {1000 * self._deadline_s:.0f} ms")
            self._abandon(self._pending.pop(state.request_id))
            return True
        del self._pending[state.request_id]
        wanted = state.chunks_to_look_up(state.looked_up_from or 0)
        try:
            if self._use(state, future.result(), pending.chunks, wanted):
                return True
        except Unavailable as error:
            self._failed(error.reason, error.detail)
            return True
        again = self._send(state, want, wanted)
        if again is not None:
            self._pending[state.request_id] = again
        return again is None

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
        for pending in (state.early, self._pending.pop(state.request_id, None)):
            if pending is not None:
                self._abandon(pending)
        state.early = None
        self._end_lease(state)

    def _ask(self, state: RequestState, want: Want, num_computed: int) -> None:
        self.release(state)
        state.looked_up_from = num_computed
        chunks, early = state.chunks_to_look_up(num_computed), state.early
        state.early = None
        if early is not None and (not chunks or self._clock() > early.asked_at + _EARLY_S):
            self._abandon(early)
            early = None
        if early is None:
            pending = self._send(state, want, chunks)
        else:  # the deadline is for those who wait
            self._may_wait |= early.asked_at > self._worked_at
            pending = replace(early, asked_at=self._clock())
        if pending is not None:
            self._pending[state.request_id] = pending

    def _send(self, state: RequestState, want: Want, chunks: range) -> PendingLookup | None:
        if not chunks:
            return None
        future = self._client.lookup(state.keys[chunks.start : chunks.stop], [want], self._lease_s)
        return PendingLookup(future, chunks, self._clock())

    def _use(self, state: RequestState, result: LookupResult, asked: range, wanted: range) -> bool:
        """Make an order of an answer; False where it ends in front of the wanted chunks, which are then asked for."""
        state.lease = result.lease
        num_chunks, hits = longest_run(result.hits)
        mapped = [one for one in _mapped(state, num_chunks, hits, asked.start) if one.index >= wanted.start]
        if not mapped and asked.start < wanted.start:
            self._end_lease(state)
            return False
        self._counters.add("lookup_chunks", "asked", len(wanted))
        self._counters.add("lookup_chunks", "hit", len(mapped))
        if mapped:
            state.order = state.mapped_order(mapped, tuple(hit.producer for hit in hits), result.device_arena_id)
        else:
            self._counters.add("request_not_reused", "sharded_producer" if result.hits and not hits else "miss")
            self._end_lease(state)
        return True

    def _failed(self, reason: str, detail: str) -> None:
        self._counters.add("lookup_failed", reason)
        self._log.warning(reason, "mapflow: look-up failed (%s: %s); requests are computed in full", reason, detail)

    def _abandon(self, pending: PendingLookup) -> None:
        """Forget a look-up; the client releases a lease that it still brings."""
        future = pending.future
        if not future.cancel() and future.exception() is None and (lease := future.result().lease) is not None:
            self._client.release([lease])

    def begin_step(self, *, idle: bool) -> None:
        """A step without work (`idle`) or with some; releases leases whose copies are certainly done."""
        self._may_wait = idle
        if not idle:
            self._worked_at = self._clock()
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
