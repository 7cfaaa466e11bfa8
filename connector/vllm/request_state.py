"""The scheduler's memory of one request, and the arithmetic of which rows may be reused or published.

No vLLM, no sockets and no clock: everything here is decided from values.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from enum import StrEnum

from mapflow.connector.messages import Lease, LookupResult
from mapflow.connector.plan import Plan
from mapflow.connector.vllm.messages import CapturedChunk, MappedChunk, ReuseOrder, ReuseReport


class Fate(StrEnum):
    """Why a request is served without maps, or that it is not."""

    REUSE = "reuse"
    OPTED_OUT = "opted_out"
    UNKNOWN_PLAN = "unknown_plan"
    NO_PLAN = "no_plan"
    TOO_SHORT = "too_short"
    UNSUPPORTED_INPUT = "unsupported_input"


@dataclass(frozen=True, slots=True)
class PendingLookup:
    """A look-up of chunks `chunks` that was sent at `asked_at`, on the scheduler's clock."""

    future: Future[LookupResult]
    chunks: range
    asked_at: float


@dataclass(slots=True, kw_only=True)
class RequestState:
    """One request between its arrival and its end.

    Attributes:
        keys: keys of the prompt's complete chunks.
        plan_index: number of its plan in the engine's list, or None where nothing is reused.
        salt: of its KV in vLLM's prefix cache; a plan's keeps it apart from exact KV.
        captured_from: first chunk to capture (chunks before it are published already); None captures nothing.
        resume, keep: names of the unfinished captures to go on from, and to leave for the next turn.
        capture_limit: first row that is not exact, and from which on nothing is published.
        pages: KV pages of the first cache group, in order, as the scheduler last told.
        early: a look-up of all chunks, begun when the request arrived.
        looked_up_from: first row that the current look-up serves, or None before there is one.
        lease: lease over the order's maps, to be released.
    """

    request_id: str
    num_prompt: int
    keys: Sequence[bytes]
    chunk_tokens: int
    block: int
    fate: Fate
    plan_index: int | None = None
    salt: str | None = None
    captured_from: int | None = None
    pages: list[int] = field(default_factory=list)
    early: PendingLookup | None = None
    looked_up_from: int | None = None
    order: ReuseOrder | None = None
    lease: Lease | None = None
    capture_limit: int | None = None
    report: ReuseReport = field(default_factory=ReuseReport)
    wants_report: bool = False
    resume: bytes = b""
    keep: bytes = b""

    @property
    def reuse_limit(self) -> int:
        """Rows from here on are always computed: the block of the last prompt token, and what follows."""
        return (self.num_prompt - 1) // self.block * self.block

    def chunks_to_look_up(self, num_computed: int) -> range:
        """Chunks that hold rows still to be computed and that may be reused; empty where it isn't worth a call."""
        first, last = num_computed // self.chunk_tokens, min(len(self.keys), -(-self.reuse_limit // self.chunk_tokens))
        return range(first, last) if num_computed < self.reuse_limit else range(0)

    def static_order(self) -> ReuseOrder | None:
        """The order of a plan that reads no maps: all rows but the last block."""
        if self.plan_index is None or self.reuse_limit <= 0:
            return None
        return ReuseOrder(plan=self.plan_index, row_begin=0, row_end=self.reuse_limit, counted=self.wants_report)

    def mapped_order(
        self, chunks: Sequence[MappedChunk], producers: tuple[str, ...], device_arena_id: int = 0
    ) -> ReuseOrder | None:
        """The order over a run of leased chunks."""
        if self.plan_index is None or not chunks:
            return None
        begin = chunks[0].index * self.chunk_tokens
        end = min((chunks[-1].index + 1) * self.chunk_tokens, self.reuse_limit)
        if end <= begin:
            return None
        return ReuseOrder(
            plan=self.plan_index,
            row_begin=begin,
            row_end=end,
            producers=producers,
            lease=self.lease,
            chunks=tuple(chunks),
            counted=self.wants_report,
            device_arena_id=device_arena_id,
        )

    def order_for_rows(self, row_begin: int, row_end: int) -> ReuseOrder | None:
        """The part of the order that a step over rows [row_begin, row_end) needs."""
        order = self.order
        if order is None or row_end <= order.row_begin or row_begin >= order.row_end:
            return None
        chunks = tuple(
            chunk
            for chunk in order.chunks
            if chunk.index * self.chunk_tokens < row_end and (chunk.index + 1) * self.chunk_tokens > row_begin
        )
        begin, end = max(order.row_begin, row_begin), min(order.row_end, row_end)
        return replace(order, row_begin=begin, row_end=end, chunks=chunks)

    def chunks_to_capture(self, row_begin: int, row_end: int) -> tuple[CapturedChunk, ...]:
        """Chunks that a step over rows [row_begin, row_end) adds rows to, the prompt's unfinished last one included."""
        if self.captured_from is None:
            return ()
        first = max(self.captured_from, row_begin // self.chunk_tokens)
        last = -(-row_end // self.chunk_tokens)
        if self.capture_limit is not None:
            last = min(last, self.capture_limit // self.chunk_tokens)
        return tuple(
            CapturedChunk(
                index=index,
                key=self.keys[index] if index < len(self.keys) else b"",
                parent_key=self.keys[index - 1] if index else b"",
            )
            for index in range(first, last)
        )


@dataclass(frozen=True, slots=True)
class RequestParams:
    """What a request may say under `kv_transfer_params: {"mapflow": {...}}`.

    Attributes:
        reuse: False asks for exact results: no maps, and no KV that was computed with maps.
        plan: name of a plan; None for the engine's first.
        report: True returns what was reused in the response's `kv_transfer_params`.
    """

    reuse: bool = True
    plan: str | None = None
    report: bool = False

    @classmethod
    def parse(cls, params: object) -> tuple[RequestParams, str | None]:
        """Read a request's parameters; on anything unexpected the safest reading, exact results, and a complaint."""
        own = params.get("mapflow") if isinstance(params, dict) else None
        if own is None:
            return cls(), None
        if not isinstance(own, dict):
            return cls(reuse=False), f'kv_transfer_params["mapflow"] must be an object, got {own!r}'
        kinds = {"reuse": bool, "plan": str, "report": bool}
        for key, value in own.items():
            if key not in kinds or not isinstance(value, kinds[key]):
                return cls(
                    reuse=False
                ), f'kv_transfer_params["mapflow"]: {key}={value!r} is not known or of another type'
        return cls(reuse=own.get("reuse", True), plan=own.get("plan"), report=own.get("report", False)), None


def choose_plan(params: RequestParams, plans: Sequence[Plan]) -> tuple[int | None, Fate]:
    """Number of the plan that a request runs under, or why there is none."""
    if not params.reuse:
        return None, Fate.OPTED_OUT
    if not plans:
        return None, Fate.NO_PLAN
    if params.plan is None:
        return 0, Fate.REUSE
    index = next((number for number, plan in enumerate(plans) if plan.name == params.plan), None)
    return index, Fate.REUSE if index is not None else Fate.UNKNOWN_PLAN
