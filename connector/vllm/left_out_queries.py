"""Which rows of a step have no queries because `translate` reads none, and their attention should reuse fail after all.

The projection asks before a layer's attention runs, see `query_skip.py`. What it leaves out cannot be computed by vLLM
any more, so it is noted here; if the layer's reuse then fails, the references translate those rows, from maps that are
read once more.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from mapflow.connector.plan import Mode
from mapflow.connector.vllm.batch import gaps
from mapflow.connector.vllm.map_reader import MapReader
from mapflow.connector.vllm.reuse import EntryReuse, StepReuse
from mapflow.kernels.paged import PagedKV


class LeftOutQueries:
    """Of one worker; what is noted ends with the step.

    eligible: layers that were seen to be of a kind that maps can serve; the others' queries are always needed.
    """

    def __init__(self, reader: MapReader) -> None:
        self._reader = reader
        self._left_out: dict[int, list[tuple[EntryReuse, list[tuple[int, int]]]]] = {}
        self.eligible: set[int] = set()

    def begin_step(self) -> None:
        """Forget the last step."""
        self._left_out = {}

    def needed(self, reuse: StepReuse, layer: int, num_rows: int) -> list[tuple[int, int]] | None:
        """Ascending ranges of the batch's `num_rows` rows whose queries are read in this layer; None for all."""
        if layer not in self.eligible:
            return None
        reuse.prepare(layer)
        found = reuse.reused_entries(layer).values()
        translated = [entry for entry, plan in found if plan.mode is Mode.TRANSLATE]
        if not translated:
            return None
        self._left_out[layer] = [(entry, list(entry.ranges)) for entry in translated]
        inside = [rows for one in translated for rows in one.reused_rows()]
        return gaps([(rows.query_begin, rows.query_begin + rows.num_rows) for rows in inside], num_rows)

    def lacks(self, layer: int) -> bool:
        """Whether rows of this layer have no queries in this step."""
        return layer in self._left_out

    def attend(self, layer: int, query: torch.Tensor, kv: PagedKV, scale: float, out: torch.Tensor) -> None:
        """Translate the rows without queries by the references; shapes as in `StepReuse.attend`.

        Raises whatever goes wrong: there is no other way to their attention, and none is better than a wrong one.
        """
        for entry, ranges in self._left_out[layer]:
            order = entry.row.step.reuse
            sender_layer = entry.plan.layers[layer].sender_layer
            assert order is not None and sender_layer is not None
            maps = [one.to(kv.device) for one in self._reader.maps(order, sender_layer)]
            again = replace(entry, maps={sender_layer: maps}, ranges=ranges)
            StepReuse([again]).attend(layer, query, kv, scale, out)
