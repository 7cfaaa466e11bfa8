"""What the scheduler tells the workers for one step, and what they report back. Plain values, pickled by vLLM."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from mapflow.connector.messages import NO_COPY, Extent, Lease


@dataclass(frozen=True, slots=True, kw_only=True)
class MappedChunk:
    """One chunk whose maps are leased: `extents` rank by rank of the sender, in each in the order of `map_layers`.

    device_offsets: alike, of the copies in a device arena, `NO_COPY` where there is none; empty without any.
    """

    index: int
    key: bytes
    extents: tuple[Extent, ...]
    device_offsets: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReuseOrder:
    """Reuse maps for prompt rows [row_begin, row_end) of a request, under plan number `plan` of the engine.

    producers: of the maps, rank by rank of the sender.
    counted: the request asked for a report, so that kept blocks are counted even where that means waiting for a GPU.
    device_arena_id: what the chunks' device offsets refer to; 0 where they are not to be used.
    """

    plan: int
    row_begin: int
    row_end: int
    producers: tuple[str, ...] = ()
    lease: Lease | None = None
    chunks: tuple[MappedChunk, ...] = ()
    counted: bool = False
    device_arena_id: int = 0

    def places(self, position: int, num_layers: int) -> list[int]:
        """Where a chunk's extents of one layer are, rank by rank; `position` among the plan's `num_layers` ones."""
        return [rank * num_layers + position for rank in range(len(self.producers))]

    def copies(self, place: int) -> list[int] | None:
        """Device offsets of all chunks at a place; None unless all of them have a copy."""
        if not self.device_arena_id or not all(chunk.device_offsets for chunk in self.chunks):
            return None
        offsets = [chunk.device_offsets[place] for chunk in self.chunks]
        return None if NO_COPY in offsets else offsets


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
class NewRequest:
    """A request as it arrives, as compat.py reads it.

    Attributes:
        tokens: of its prompt; None for prompts of embeddings, images or LoRA adapters, which are left alone.
        params: its KV transfer parameters.
        users_salt: the cache salt that the user gave.
    """

    request_id: str
    tokens: Sequence[int] | None
    params: object = None
    users_salt: str | None = None


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
        in_place: number of layers whose maps were read in place on the GPU in the last step with reuse.
    """

    reused_rows: int = 0
    kept_blocks: int = 0
    causal_blocks: int = 0
    modes: dict[str, int] = field(default_factory=dict)
    reasons: Counter[str] = field(default_factory=Counter)
    in_place: int = 0

    def merge(self, other: ReuseReport) -> None:
        """Add a later step's report."""
        self.reused_rows += other.reused_rows
        self.kept_blocks += other.kept_blocks
        self.causal_blocks += other.causal_blocks
        if other.modes:
            self.modes, self.in_place = other.modes, other.in_place
        self.reasons.update(other.reasons)

    def as_dict(self) -> dict[str, object]:
        """For a response's `kv_transfer_params`."""
        density = self.kept_blocks / self.causal_blocks if self.causal_blocks else None
        reasons = dict(self.reasons)
        return {
            "reused_tokens": self.reused_rows,
            "density": density,
            "layers": self.modes,
            "layers_in_place": self.in_place,
            "reasons": reasons,
        }
