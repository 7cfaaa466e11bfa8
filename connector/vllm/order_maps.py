"""What a worker makes of orders: which maps of theirs can be read here, read, and why not where they cannot.

Nothing here raises for a map that is not to be had: its layer is computed, and the request's report says why.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

from mapflow.connector.counters import LimitedLog
from mapflow.connector.plan import Plan
from mapflow.connector.reasons import Unavailable
from mapflow.connector.vllm.batch import BatchRow
from mapflow.connector.vllm.map_reader import MapReader, MapRun, UnusableMap
from mapflow.connector.vllm.messages import RequestStep, ReuseOrder, ReuseReport
from mapflow.connector.vllm.reuse import EntryReuse, covered_ranges
from mapflow.kernels.attention_map import AttentionMap
from mapflow.kernels.blob import BlobError

logger = logging.getLogger(__name__)
_T = TypeVar("_T")


class OrderMaps:
    """Of one worker."""

    def __init__(self, plans: Sequence[Plan], reader: MapReader) -> None:
        self._plans = plans
        self._reader = reader
        self._log = LimitedLog(logger)

    def usable(self, steps: Sequence[RequestStep]) -> list[RequestStep]:
        """A step's orders, without copies on another GPU than this worker's: a scheduler may have mistaken one."""
        return [self._without_foreign_copies(step) for step in steps]

    def entry(self, entry: int, row: BatchRow) -> EntryReuse:
        """An order at its place in the batch; its maps are read later, by `runs`."""
        order = row.step.reuse
        assert order is not None
        ranges = [(order.row_begin, order.row_end)]
        return EntryReuse(entry=entry, row=row, plan=self._plans[order.plan], maps={}, ranges=ranges)

    def load(self, entry: int, row: BatchRow) -> EntryReuse:
        """The same with verified copies of all its maps, and of its rows those that every map covers."""
        loaded, order = self.entry(entry, row), row.step.reuse
        if order is not None and order.chunks:
            loaded.maps = self._layers(order, loaded.plan, loaded.report)
            loaded.ranges = covered_ranges(loaded.maps, order.row_begin, order.row_end)
        return loaded

    def runs(self, entry: EntryReuse, order: ReuseOrder, layers: Sequence[int]) -> Sequence[MapRun | None]:
        """Some layers' maps as they lie, all at once; where that fails one by one, so that each has its own reason."""
        if len(layers) > 1:
            with suppress(Unavailable, BlobError, UnusableMap):
                return self._reader.runs(order, layers)

        def run(order: ReuseOrder, layer: int) -> MapRun:
            return self._reader.runs(order, [layer])[0]

        return [self._read(run, order, layer, entry.report) for layer in layers]

    def _layers(self, order: ReuseOrder, plan: Plan, report: ReuseReport) -> dict[int, list[AttentionMap]]:
        found = {layer: self._read(self._reader.maps, order, layer, report) for layer in plan.map_layers}
        return {layer: maps for layer, maps in found.items() if maps is not None}

    def _read(
        self, read: Callable[[ReuseOrder, int], _T], order: ReuseOrder, layer: int, report: ReuseReport
    ) -> _T | None:
        try:
            return read(order, layer)
        except (Unavailable, BlobError, UnusableMap) as error:
            reason = str(error.reason)
            report.reasons[reason] += 1
            self._log.warning(reason, "mapflow: maps of sender layer %d not reused: %s", layer, error)
            return None

    def _without_foreign_copies(self, step: RequestStep) -> RequestStep:
        order = step.reuse
        if order is None or not order.device_arena_id or self._reader.device_arena(order) is not None:
            return step
        return replace(step, reuse=replace(order, device_arena_id=0))
