"""What the scheduler tells the workers for one step, and what they report back. Plain values, pickled by vLLM."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from mapflow.connector.messages import Extent, Lease


@dataclass(frozen=True, slots=True, kw_only=True)
class MappedChunk:
    """One chunk whose maps are leased: `extents` in the order of the plan's `map_layers`."""

    index: int
    key: bytes
    extents: tuple[Extent, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReuseOrder:
    """Reuse maps for prompt rows [row_begin, row_end) of a request, under plan number `plan` of the engine.

    counted: the request asked for a report, so that kept blocks are counted even where that means waiting for a GPU.
    """

    plan: int
    row_begin: int
    row_end: int
    producer: str = ""
    lease: Lease | None = None
    chunks: tuple[MappedChunk, ...] = ()
    counted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedChunk:
    """One chunk to publish when its last row is measured; without a key: the prompt's unfinished last one."""

    index: int
    key: bytes
    parent_key: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestStep:
    """One request in one step: rows [row_begin, row_end), of which those below `num_prompt` belong to the prompt.

    `last_page` is the KV page that the step's last row is written to. No other request of the step writes there, so
    it identifies the request's place in the batch, whatever order the model runner chose. `resume` and `keep` name
    unfinished captures of an earlier turn to go on from, and of this one to keep for the next; empty for none.
    """

    request_id: str
    row_begin: int
    row_end: int
    num_prompt: int
    last_page: int
    reuse: ReuseOrder | None = None
    capture: tuple[CapturedChunk, ...] = ()
    resume: bytes = b""
    keep: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledRows:
    """One request in one step, as compat.py reads it from vLLM's scheduler output.

    `pages` replaces what is known of the request's KV pages when `restarted`, else is appended to it.
    """

    request_id: str
    num_computed: int
    num_scheduled: int
    pages: Sequence[int]
    restarted: bool


@dataclass(slots=True)
class ReuseReport:
    """What a worker did for one request, added up over steps.

    Attributes:
        reused_rows: prompt rows that went through reuse in at least one layer.
        kept_blocks: blocks attended by reused rows, over layers and heads.
        causal_blocks: blocks that full attention would have attended there.
        modes: mode -> number of layers that ran in it in the last step with reuse.
        reasons: why rows or layers were not reused -> how often.
    """

    reused_rows: int = 0
    kept_blocks: int = 0
    causal_blocks: int = 0
    modes: dict[str, int] = field(default_factory=dict)
    reasons: Counter[str] = field(default_factory=Counter)

    def merge(self, other: ReuseReport) -> None:
        """Add a later step's report."""
        self.reused_rows += other.reused_rows
        self.kept_blocks += other.kept_blocks
        self.causal_blocks += other.causal_blocks
        self.modes = other.modes or self.modes
        self.reasons.update(other.reasons)

    def as_dict(self) -> dict[str, object]:
        """For a response's `kv_transfer_params`."""
        density = self.kept_blocks / self.causal_blocks if self.causal_blocks else None
        reasons = dict(self.reasons)
        return {"reused_tokens": self.reused_rows, "density": density, "layers": self.modes, "reasons": reasons}
