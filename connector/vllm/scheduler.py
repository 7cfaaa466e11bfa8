"""The scheduler's side of the plugin: look-ups when requests arrive, and orders for the workers.

Runs inside vLLM's scheduler and never keeps it from work: the daemon is asked through futures, with a deadline after
which the request is computed in full. It never touches tensors, and reads a request only through the few attributes
named here.
"""

from __future__ import annotations

import json
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace

from mapflow.connector.client import Client
from mapflow.connector.counters import Counters
from mapflow.connector.messages import LookupResult, Want
from mapflow.connector.namespace import Namespace
from mapflow.connector.plan import Plan
from mapflow.connector.vllm.capture_states import UNFINISHED_CAPTURES
from mapflow.connector.vllm.config import ConnectorConfig
from mapflow.connector.vllm.lookups import Lookups
from mapflow.connector.vllm.messages import CapturedChunk, NewRequest, RequestStep, ReuseReport, ScheduledRows
from mapflow.connector.vllm.request_state import Fate, RequestParams, RequestState, choose_plan
from mapflow.connector.vllm.shards import longest_run
from mapflow.connector.vllm.turns import UnfinishedChunks

logger = logging.getLogger(__name__)

_EXACT_KEYS = 1 << 16


class MapScheduler:
    """Decides, request by request and step by step, what is reused and what is published."""

    def __init__(
        self,
        *,
        config: ConnectorConfig,
        namespace: Namespace,
        plans: Sequence[Plan],
        client: Client,
        counters: Counters,
        page_size: int,
        publishes: bool,
        published_layers: Callable[[], tuple[str, tuple[int, ...]]],
        sender_id: Callable[[Plan], str],
        clock: Callable[[], float],
        linger_s: float = 0.0,
    ) -> None:
        """linger_s: see `Lookups`."""
        self._namespace = namespace
        self._plans = plans
        self._digests = [plan.digest for plan in plans]
        self._client = client
        self._counters = counters
        self._page_size = page_size
        self._reuses = bool(plans)
        self._publishes = publishes
        self._published_layers = published_layers
        self._sender_id = sender_id
        self._requests: dict[str, RequestState] = {}
        self._lookups = Lookups(
            client,
            counters,
            deadline_s=config.lookup_deadline_s,
            lease_s=config.lease_s,
            clock=clock,
            linger_s=linger_s,
        )
        self._probes: dict[str, Future[LookupResult]] = {}
        self._exact: OrderedDict[bytes, None] = OrderedDict()
        self._unfinished = UnfinishedChunks(UNFINISHED_CAPTURES)

    # --- arrival -----------------------------------------------------------------------------------------------------

    def arrive(self, new: NewRequest) -> RequestState:
        """What will be done for a request; it counts from `add` on. May be called on any thread.

        An engine without requests asks for this one's maps at once: nothing else is to be done while they are found.
        """
        params, complaint = RequestParams.parse(new.params)
        if complaint:
            logger.warning("mapflow: request %s: %s; it gets exact results", new.request_id, complaint)
        plan_index, fate = choose_plan(params, self._plans)
        if fate is Fate.UNKNOWN_PLAN:
            known = ", ".join(plan.name for plan in self._plans)
            logger.warning("mapflow: request %s: no plan %r; loaded are %s", new.request_id, params.plan, known)
        tokens = new.tokens
        if tokens is None:
            plan_index, fate, tokens = None, Fate.UNSUPPORTED_INPUT, ()
        elif len(tokens) <= self._namespace.chunk_tokens:
            fate = Fate.TOO_SHORT if fate is Fate.REUSE else fate
        salt = new.users_salt
        if plan_index is not None:
            salt = f"{salt or ''}|mapflow:{self._digests[plan_index]}"
        wants_keys = self._publishes or fate is Fate.REUSE
        state = RequestState(
            request_id=new.request_id,
            num_prompt=len(tokens),
            keys=self._salted(new.users_salt).chunk_keys(tokens) if wants_keys else (),
            chunk_tokens=self._namespace.chunk_tokens,
            block=self._namespace.block,
            fate=fate,
            plan_index=plan_index,
            salt=salt,
            wants_report=params.report,
        )
        want = self._want(state)
        if want is not None and not self._requests:
            self._lookups.ask_early(state, want)
        return state

    def add(self, new: NewRequest, state: RequestState) -> None:
        """Take in a request, with what `arrive` said of it."""
        self._requests[state.request_id] = state
        if self._reuses and state.fate is not Fate.REUSE:
            self._counters.add("request_not_reused", state.fate)
        if self._publishes and new.tokens is not None:
            namespace = self._salted(new.users_salt)
            state.resume = self._unfinished.find(namespace, state.keys, new.tokens)
            state.keep = self._unfinished.name(namespace, state.keys, new.tokens)
            self._probe(state)

    def _salted(self, cache_salt: str | None) -> Namespace:
        if not cache_salt:
            return self._namespace
        return replace(self._namespace, tenant=json.dumps([self._namespace.tenant, cache_salt]))

    def _probe(self, state: RequestState) -> None:
        """Ask which chunks are published already, so that they are not captured again."""
        state.captured_from = 0
        model, layers = self._published_layers()
        if layers and state.keys:
            self._probes[state.request_id] = self._client.lookup(state.keys, [Want(model=model, layers=layers)], 0.0)

    # --- look-up -----------------------------------------------------------------------------------------------------

    def ready(self, request_id: str, num_computed: int) -> bool:
        """Whether a waiting request may be scheduled now; False asks the scheduler to come back in its next step.

        Called any number of times for one request, and again after a preemption.
        """
        state = self._requests.get(request_id)
        if state is None or state.fate is not Fate.REUSE:
            return True
        want = self._want(state)
        if want is None:
            state.order = state.static_order()
            return True
        return self._lookups.ready(state, want, num_computed)

    def _want(self, state: RequestState) -> Want | None:
        """The maps that a request's plan reads; None for a plan that reads none."""
        if state.fate is not Fate.REUSE or state.plan_index is None:
            return None
        plan = self._plans[state.plan_index]
        return Want(model=self._sender_id(plan), layers=plan.map_layers) if plan.map_layers else None

    # --- steps -------------------------------------------------------------------------------------------------------

    def plan_step(self, rows: Sequence[ScheduledRows]) -> tuple[RequestStep, ...]:
        """Orders for the workers: one `RequestStep` for each scheduled request with prompt rows in this step."""
        self._lookups.begin_step(idle=not rows)
        return tuple(step for row in rows if (step := self._plan_request(row)) is not None)

    def _plan_request(self, rows: ScheduledRows) -> RequestStep | None:
        state = self._requests.get(rows.request_id)
        if state is None:
            return None
        if rows.restarted:
            state.pages.clear()
            self._set_capture(state, rows.num_computed)
        state.pages.extend(rows.pages)
        begin, end = rows.num_computed, rows.num_computed + rows.num_scheduled
        if begin >= state.num_prompt:
            if state.lease is not None and begin >= state.num_prompt + 2:
                self._lookups.release(state)  # two steps on, the last step with maps has certainly run
            return None
        self._lookups.check_lease(state)
        last = (end - 1) // self._page_size
        if last >= len(state.pages):
            self._counters.add("request_not_reused", "unknown_pages")
            return None
        prompt_end = min(end, state.num_prompt)
        step = RequestStep(
            request_id=state.request_id,
            row_begin=begin,
            row_end=end,
            num_prompt=state.num_prompt,
            last_page=state.pages[last],
            reuse=state.order_for_rows(begin, prompt_end),
            capture=state.chunks_to_capture(begin, prompt_end),
            resume=state.resume,
            keep=state.keep if end >= state.num_prompt else b"",
        )
        self._remember_exact(step.capture)
        return step if step.reuse or step.capture else None

    def _set_capture(self, state: RequestState, num_computed: int) -> None:
        """Once per (re)start: what is published already, and up to where this request's rows are exact."""
        probe = self._probes.pop(state.request_id, None)
        if probe is not None and probe.done() and probe.exception() is None:
            state.captured_from, _ = longest_run(probe.result().hits)
        if not (self._reuses and self._publishes) or state.plan_index is None:
            return  # this request's KV is exact: it lives among exact KV only
        cached = -(-num_computed // state.chunk_tokens)
        prefix_is_exact = cached <= len(state.keys) and all(key in self._exact for key in state.keys[:cached])
        begin = state.order.row_begin if state.order is not None else None
        state.capture_limit = begin if prefix_is_exact else 0

    def _remember_exact(self, captured: Iterable[CapturedChunk]) -> None:
        if self._reuses and self._publishes:
            for chunk in captured:
                if chunk.key:
                    self._exact[chunk.key] = None
            while len(self._exact) > _EXACT_KEYS:
                self._exact.popitem(last=False)

    # --- end ---------------------------------------------------------------------------------------------------------

    def take_reports(self, reports: dict[str, ReuseReport]) -> None:
        """Add what the workers reported for requests of the last step."""
        for request_id, report in reports.items():
            self._counters.add("rows", "reused", report.reused_rows)
            for reason, count in report.reasons.items():
                self._counters.add("layer_not_reused", reason, count)
            if request_id in self._requests:
                self._requests[request_id].report.merge(report)

    def finish(self, request_id: str) -> dict[str, object] | None:
        """Forget a request, release what it holds; its report if it asked for one."""
        state = self._requests.pop(request_id, None)
        if state is None:
            return None
        self._lookups.forget(state)
        self._probes.pop(request_id, None)
        if not state.wants_report:
            return None
        plan = None if state.plan_index is None else self._plans[state.plan_index].name
        return {"mapflow": {"fate": state.fate.value, "plan": plan, **state.report.as_dict()}}
