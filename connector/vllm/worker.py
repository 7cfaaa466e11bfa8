"""The worker's side of the plugin: reads the maps a step needs, measures what a step computes.

One object per worker process, driven by the connector (begin and end of a step) and by the attention backend (each
layer). It never raises into the model: whatever goes wrong is counted, and vLLM computes the layer as if we weren't
there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from mapflow.connector.client import Client
from mapflow.connector.counters import Counters, LimitedLog
from mapflow.connector.plan import Mode, Plan
from mapflow.connector.vllm.batch import BatchRow, RowRange, locate, split_entry
from mapflow.connector.vllm.capture import FinishedMap, StepCapture
from mapflow.connector.vllm.left_out_queries import LeftOutQueries
from mapflow.connector.vllm.map_reader import MapReader
from mapflow.connector.vllm.messages import RequestStep, ReuseReport
from mapflow.connector.vllm.order_maps import OrderMaps
from mapflow.connector.vllm.publisher import Publisher
from mapflow.connector.vllm.reuse import EntryReuse, StepReuse, reads_from
from mapflow.connector.wants import LayerWant
from mapflow.kernels.paged import PagedKV

if TYPE_CHECKING:
    from mapflow.connector.vllm.gpu import GpuReuse

logger = logging.getLogger(__name__)
_T = TypeVar("_T")

_MAPS_AT_ONCE = 128  # to be published


class MapWorker:
    """State of one worker between steps and within one."""

    def __init__(
        self,
        *,
        plans: Sequence[Plan],
        client: Client,
        counters: Counters,
        capture: StepCapture | None,
        publisher: Publisher | None,
        wants: Callable[[], Mapping[int, LayerWant]],
        gpu: GpuReuse | None = None,
    ) -> None:
        """gpu: what reuse on a GPU keeps from step to step; without it the references run, wherever tensors are."""
        self._plans = plans
        self._gpu = gpu
        reader = MapReader(client, plans, *((gpu.arenas, gpu.copies) if gpu is not None else ()))
        self._maps = OrderMaps(plans, reader)
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
        self.queries = LeftOutQueries(reader)

    # --- called by the connector -------------------------------------------------------------------------------------

    def begin_step(self, steps: Sequence[RequestStep], ended: Sequence[str]) -> None:
        """Take the orders of the step that is about to run."""
        self._steps, self._rows = self._maps.usable(steps), None
        self._reuse.end()  # where a step did not come to its end
        self._reuse = StepReuse([])
        self._cache = {}
        self.queries.begin_step()
        if self._capture is not None:
            self._capture.begin_step()
            for request_id in ended:
                self._capture.end(request_id)
            if self._captures:
                self._step_wants = self._wants()
                if self._publisher is not None:
                    self._publisher.pause(self._capture.spares_time)

    def end_step(self) -> dict[str, ReuseReport]:
        """Publish what the step finished; what was reused, by request."""
        self._publish()
        if self._publisher is not None:
            self._publisher.resume(self._capture.end_step() if self._capture and self._captures else None)
        self._reuse.end()
        for entry in self._reuse.entries:
            if entry.report.modes:
                entry.report.reused_rows = sum(end - begin for begin, end in entry.ranges)
        reports = {entry.row.step.request_id: entry.report for entry in self._reuse.entries}
        self._steps, self._rows, self._reuse = (), None, StepReuse([])
        return reports

    # --- called by the attention backend -----------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether this step holds any order at all."""
        return bool(self._steps)

    def layer_begins(self, layer: int, num_rows: int, context: int) -> None:
        """A layer of any step begins; context: tokens of its longest request. Steps that publish are not timed."""
        if layer == 0 and self._gpu is not None:
            self._gpu.step_begins(num_rows, context, is_timed=not self._captures)

    def layer_ends(self, layer: int) -> None:
        """Its attention was launched."""
        if self._gpu is not None:
            self._gpu.layer_ends(layer)

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
        load = self._maps.load if self._gpu is None else self._maps.entry
        entries = [load(entry, row) for entry, row in self._rows.items() if row.step.reuse is not None]
        if self._gpu is None:
            self._reuse = StepReuse(entries)
        elif entries:
            self._reuse = self._gpu.step(entries, query_start[-1], self._maps.runs)
            if not self._captures and not any(one.ranges for one in entries):
                self._steps = ()  # nothing left to do

    def may_reuse(self, layer: int) -> bool:
        """Whether any order of this step is for this layer; known before `place`."""
        return any(plan.layers[layer].mode is not Mode.COMPUTE for plan in self._step_plans())

    def must_prepare(self, layer: int) -> bool:
        """Whether anything is to be done for this step behind a layer that nobody reuses."""
        return self._captures or any(layer >= reads_from(plan) for plan in self._step_plans())

    @property
    def _captures(self) -> bool:
        return any(step.capture for step in self._steps)

    def _step_plans(self) -> Iterator[Plan]:
        return (self._plans[step.reuse.plan] for step in self._steps if step.reuse is not None)

    def rest(self, layer: int) -> tuple[frozenset[int], list[RowRange]]:
        """Which entries this layer reuses, and the rows of the batch that vLLM must compute."""
        self._reuse.prepare(layer)
        return self._rest_of([entry for entry, _ in self._reuse.reused_entries(layer).values()])

    def rest_as_a_rule(self) -> tuple[frozenset[int], list[RowRange]]:
        """As `rest`, of a layer that reuses all it may."""
        return self._rest_of([entry for entry in self._reuse.entries if entry.ranges])

    def _rest_of(self, entries: Sequence[EntryReuse]) -> tuple[frozenset[int], list[RowRange]]:
        reused = {one.entry: one for one in entries}
        outside: list[RowRange] = []
        for entry, (begin, end) in enumerate(zip(self._query_start, self._query_start[1:])):
            if entry in reused:
                row = reused[entry].row
                outside += split_entry(entry, begin, row.row_begin, row.step.row_end, reused[entry].ranges)[1]
            elif end > begin:
                outside.append(RowRange(entry=entry, query_begin=begin, row_begin=0, row_end=end - begin))
        return frozenset(reused), outside

    def rows_with_queries(self, layer: int, num_rows: int) -> list[tuple[int, int]] | None:
        """Ascending ranges of the batch's rows whose queries somebody reads in this layer; None for all of them.

        num_rows: rows of the batch, padding included.
        """
        rows = self._rows
        if rows is None or self._query_start[-1] > num_rows:
            return None
        if layer in self._step_wants and any(row.step.capture for row in rows.values()):
            return None
        needed = self.queries.needed(self._reuse, layer, num_rows)
        if needed is not None:
            self.counters.add(
                "projection", "rows_without_queries", num_rows - sum(end - begin for begin, end in needed)
            )
        return needed

    def cached(self, key: Hashable, make: Callable[[], _T]) -> _T:
        """A value that is made once a step."""
        if key not in self._cache:
            self._cache[key] = make()
        value: _T = self._cache[key]
        return value

    def attend(self, layer: int, query: torch.Tensor, kv: PagedKV, scale: float, out: torch.Tensor) -> None:
        """Write the attention of this layer's reused rows; shapes as in `StepReuse.attend`."""
        self._reuse.attend(layer, query, kv, scale, out)

    def finish(self, layer: int) -> None:
        """A layer is through."""
        self._reuse.finish(layer)

    def skip_layer(self, reason: str, layer: str) -> None:
        """A layer of a kind that maps cannot serve."""
        self.counters.add("layer_not_reused", reason)
        self._log.warning(reason, "mapflow: layer %s is computed in full and not published: %s", layer, reason)

    def drop_reuse(self, reason: str) -> None:
        """Give up reuse for the rest of this step."""
        self.counters.add("layer_not_reused", reason)
        for entry in self._reuse.entries:
            entry.ranges.clear()

    def takes_row_lse(self, layer: int) -> bool:
        """Whether `measure` can use the log-sum-exps of this layer's rows in this step."""
        want = self._step_wants.get(layer)
        return want is not None and self._captures and self._capture is not None and self._capture.takes_row_lse

    def measure(
        self, layer: int, query: torch.Tensor, kv: PagedKV, scale: float, row_lse: torch.Tensor | None = None
    ) -> None:
        """Capture this layer's rows of the requests that are to be published; arguments as in `StepCapture`."""
        want = self._step_wants.get(layer)
        if self._capture is None or want is None or not self._rows:
            return
        rows = [row for row in self._rows.values() if row.step.capture]
        if rows:
            self._finished += self._capture.measure(layer, want, rows, query, kv, scale, row_lse)
            if want.tile_top_p or len(self._finished) >= _MAPS_AT_ONCE:  # they take time, and memory on a GPU
                self._publish()

    def _publish(self) -> None:
        if self._finished and self._publisher is not None:
            self._publisher.submit(self._finished)
        self._finished = []
