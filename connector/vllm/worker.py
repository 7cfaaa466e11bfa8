"""The worker's side of the plugin: reads the maps a step needs, measures what a step computes.

One object per worker process, driven by the connector (begin and end of a step) and by the attention backend (each
layer). It never raises into the model: whatever goes wrong is counted, and vLLM computes the layer as if we weren't
there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from mapflow.connector.client import Client
from mapflow.connector.counters import Counters, LimitedLog
from mapflow.connector.plan import Mode, Plan
from mapflow.connector.reasons import Unavailable
from mapflow.connector.vllm.batch import BatchRow, RowRange, locate, split_entry
from mapflow.connector.vllm.capture import Capture, FinishedMap
from mapflow.connector.vllm.map_identity import map_identity
from mapflow.connector.vllm.messages import RequestStep, ReuseOrder, ReuseReport
from mapflow.connector.vllm.publisher import Publisher
from mapflow.connector.vllm.reuse import EntryReuse, StepReuse, covered_ranges
from mapflow.connector.wants import LayerWant, plan_wants
from mapflow.kernels.attention_map import AttentionMap
from mapflow.kernels.blob import BlobError, read_blob
from mapflow.kernels.paged import PagedKV

logger = logging.getLogger(__name__)
_T = TypeVar("_T")


class MapWorker:
    """State of one worker between steps and within one."""

    def __init__(
        self,
        *,
        plans: Sequence[Plan],
        client: Client,
        counters: Counters,
        capture: Capture | None,
        publisher: Publisher | None,
        wants: Callable[[], Mapping[int, LayerWant]],
    ) -> None:
        self._plans = plans
        self._plan_wants = [plan_wants(plan) for plan in plans]
        self._client = client
        self.counters = counters
        self._capture = capture
        self._publisher = publisher
        self._wants = wants
        self._log = LimitedLog(logger)
        self._steps: Sequence[RequestStep] = ()
        self._rows: dict[int, BatchRow] | None = None
        self._query_start: Sequence[int] = ()
        self._reuse = StepReuse([])
        self._step_wants: Mapping[int, LayerWant] = {}
        self._finished: list[FinishedMap] = []
        self._cache: dict[Hashable, Any] = {}

    # --- called by the connector -------------------------------------------------------------------------------------

    def begin_step(self, steps: Sequence[RequestStep], ended: Sequence[str]) -> None:
        """Take the orders of the step that is about to run."""
        self._steps, self._rows = steps, None
        self._reuse = StepReuse([])
        self._cache = {}
        if self._capture is not None:
            for request_id in ended:
                self._capture.end(request_id)
            if any(step.capture for step in steps):
                self._step_wants = self._wants()

    def end_step(self) -> dict[str, ReuseReport]:
        """Publish what the step finished; what was reused, by request."""
        if self._finished and self._publisher is not None:
            self._publisher.submit(self._finished)
        self._finished = []
        reports = {entry.row.step.request_id: entry.report for entry in self._reuse.entries}
        self._steps, self._rows, self._reuse = (), None, StepReuse([])
        return reports

    # --- called by the attention backend -----------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether this step holds any order at all."""
        return bool(self._steps)

    @property
    def is_placed(self) -> bool:
        """Whether this step's orders have been matched with the batch."""
        return self._rows is not None

    def place(
        self,
        *,
        query_start: Sequence[int],
        seq_lens: Sequence[int],
        block_table: torch.Tensor,
        page_size: int,
        pages_per_block: int,
    ) -> None:
        """Match the orders with the batch and read the maps; once a step, before its first attention layer."""
        self._query_start = query_start
        self._rows = locate(
            self._steps,
            query_start=query_start,
            seq_lens=seq_lens,
            block_table=block_table,
            page_size=page_size,
            pages_per_block=pages_per_block,
        )
        unmatched = len(self._steps) - len(self._rows)
        if unmatched:
            self.counters.add("request_not_reused", "row_unmatched", unmatched)
        self._reuse = StepReuse([self._load(e, row) for e, row in self._rows.items() if row.step.reuse is not None])

    def rest(self, layer: int) -> tuple[frozenset[int], list[RowRange]]:
        """Which entries this layer reuses, and the rows of the batch that vLLM must compute."""
        reused = self._reuse.reused_entries(layer)
        outside: list[RowRange] = []
        for entry, (begin, end) in enumerate(zip(self._query_start, self._query_start[1:])):
            if entry in reused:
                row = reused[entry][0].row
                ranges = reused[entry][0].ranges
                outside += split_entry(entry, begin, row.row_begin, row.step.row_end, ranges)[1]
            elif end > begin:
                outside.append(RowRange(entry=entry, query_begin=begin, row_begin=0, row_end=end - begin))
        return frozenset(reused), outside

    def cached(self, key: Hashable, make: Callable[[], _T]) -> _T:
        """A value that is made once a step."""
        if key not in self._cache:
            self._cache[key] = make()
        value: _T = self._cache[key]
        return value

    def attend(self, layer: int, query: torch.Tensor, kv: PagedKV, scale: float, out: torch.Tensor) -> None:
        """Write the attention of this layer's reused rows; shapes as in `StepReuse.attend`."""
        self._reuse.attend(layer, query, kv, scale, out)

    def skip_layer(self, reason: str, layer: str) -> None:
        """A layer of a kind that maps cannot serve."""
        self.counters.add("layer_not_reused", reason)
        self._log.warning(reason, "mapflow: layer %s is computed in full and not published: %s", layer, reason)

    def drop_reuse(self, reason: str) -> None:
        """Give up reuse for the rest of this step."""
        self.counters.add("layer_not_reused", reason)
        for entry in self._reuse.entries:
            entry.ranges.clear()

    def measure(self, layer: int, query: torch.Tensor, kv: PagedKV, scale: float) -> None:
        """Capture this layer's rows of the requests that are to be published."""
        want = self._step_wants.get(layer)
        if self._capture is None or want is None or not self._rows:
            return
        for row in self._rows.values():
            if row.step.capture:
                self._finished += self._capture.add(layer, want, row, query, kv, scale)

    # --- reading maps ------------------------------------------------------------------------------------------------

    def _load(self, entry: int, row: BatchRow) -> EntryReuse:
        order = row.step.reuse
        assert order is not None
        plan = self._plans[order.plan]
        loaded = EntryReuse(entry=entry, row=row, plan=plan, maps={}, ranges=[(order.row_begin, order.row_end)])
        if order.chunks:
            loaded.maps = self._read_layers(order, plan, loaded.report)
            loaded.ranges = covered_ranges(loaded.maps, order.row_begin, order.row_end)
        if any(layer.mode is not Mode.COMPUTE and loaded.usable(layer) for layer in plan.layers):
            loaded.report.reused_rows = sum(end - begin for begin, end in loaded.ranges)
        return loaded

    def _read_layers(self, order: ReuseOrder, plan: Plan, report: ReuseReport) -> dict[int, list[AttentionMap]]:
        maps: dict[int, list[AttentionMap]] = {}
        for position, layer in enumerate(plan.map_layers):
            try:
                maps[layer] = self._read_layer(order, plan, position, layer)
            except (Unavailable, BlobError, _UnusableMap) as error:
                reason = str(error.reason)
                report.reasons[reason] += 1
                self._log.warning(reason, "mapflow: maps of sender layer %d not reused: %s", layer, error)
        return maps

    def _read_layer(self, order: ReuseOrder, plan: Plan, position: int, layer: int) -> list[AttentionMap]:
        want = self._plan_wants[order.plan][layer]
        if order.lease is None:
            raise _UnusableMap("no_lease", "the order names maps without a lease")
        buffers = self._client.read(order.lease, [chunk.extents[position] for chunk in order.chunks])
        maps = []
        for chunk, buffer in zip(order.chunks, buffers):
            found = read_blob(buffer, identity=map_identity(chunk.key, order.producer, layer))
            expected = (plan.block, plan.sender.num_heads, plan.chunk_tokens // plan.block, chunk.index)
            got = (found.block, found.num_heads, found.num_row_blocks, found.chunk_index)
            if got != expected:
                raise _UnusableMap("shape", f"(block, heads, block rows, chunk) is {got}, the plan expects {expected}")
            if found.approximate:
                raise _UnusableMap("approximate", "its rows were computed with reuse themselves")
            if want.tile_top_p and found.tiles is None:
                raise _UnusableMap("no_tiles", "published before this plan's tiles were asked for")
            heads = list(want.heads) if want.heads is not None else slice(None)
            if not bool(found.mass[heads][:, found.measured].any(dim=-1).all()):
                raise _UnusableMap("no_heads", "published before this plan's heads were asked for")
            maps.append(found)
        self._client.check_lease(order.lease)  # the copies were made while the lease held
        return maps


class _UnusableMap(ValueError):
    """A sound map that this plan cannot use."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
