"""The maps that one plan's requests need in a step, sender layer by sender layer, by way of the staging buffer.

Sender layers are taken in the order in which the receiver's layers first read them, a few ahead. What cannot be read,
does not cover the rows or finds no room is left out of its layer, and the request's report says why.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from mapflow.connector.plan import Plan
from mapflow.connector.vllm.map_reader import MapRun
from mapflow.connector.vllm.messages import ReuseOrder
from mapflow.connector.vllm.reuse import EntryReuse
from mapflow.connector.vllm.staging import Region, StagingBuffer
from mapflow.connector.vllm.transfer_model import Transfer
from mapflow.kernels.blob_layout import align
from mapflow.kernels.block_rows import ChunkSpan
from mapflow.kernels.map_table import MapTable
from mapflow.kernels.upload import pinned

LAYERS_AHEAD = 2

ReadRun = Callable[[EntryReuse, ReuseOrder, int], MapRun | None]
"""Maps of an entry in a sender layer, or None where they cannot be used (counted by whoever reads)."""
SpansOf = Callable[[Sequence[EntryReuse]], tuple[ChunkSpan, ...]]
"""Which chunks each segment of these entries has, when their maps lie one entry behind the other."""


@dataclass(frozen=True, slots=True, eq=False)
class StagedLayer:
    """One sender layer: the maps of some entries in a region of the staging buffer."""

    region: Region
    table: MapTable
    runs: Mapping[int, MapRun]  # by entry


@dataclass(frozen=True, slots=True, eq=False)
class _Read:
    """The maps of one sender layer, by entry, and what `layout` says of them."""

    runs: Mapping[int, MapRun]
    parts: Sequence[tuple[int, torch.Tensor]]
    table_shape: tuple[int, ...]
    num_bytes: int


class StagedMaps:
    """Of the entries of one plan, in one step."""

    def __init__(
        self, plan: Plan, entries: Sequence[EntryReuse], staging: StagingBuffer, read: ReadRun, spans_of: SpansOf
    ) -> None:
        self._plan, self._entries, self._staging = plan, entries, staging
        self._read, self._spans_of = read, spans_of
        self._first_use: dict[int, int] = {}  # sender layer -> receiver layer
        self._last_use: dict[int, int] = {}
        for layer, of_layer in enumerate(plan.layers):
            if of_layer.sender_layer is not None:
                self._first_use.setdefault(of_layer.sender_layer, layer)
                self._last_use[of_layer.sender_layer] = layer
        self._pending = list(self._first_use)
        self._staged: dict[int, StagedLayer] = {}
        self._waiting: _Read | None = None  # of the first pending layer, read before there was room

    def transfers(self) -> list[Transfer]:
        """What is still to be copied, in that order."""
        sizes = dict.fromkeys(self._pending, 0)
        for one in self._entries:
            order = one.row.step.reuse
            for chunk in order.chunks if order is not None else ():
                for sender_layer, extent in zip(self._plan.map_layers, chunk.extents):
                    sizes[sender_layer] += extent.num_bytes
        return [Transfer(one, self._first_use[one], sizes[one]) for one in self._pending]

    def give_up(self, sender_layers: set[int]) -> None:
        """Leave layers to vLLM whose maps would come too late."""
        self._pending = [one for one in self._pending if one not in sender_layers]
        for one in self._entries if sender_layers else ():
            one.report.reasons["late"] += len(sender_layers)

    def prepare(self, layer: int) -> None:
        """Start the copies that a receiver layer needs, and one ahead if there is room, so that no layer waits long."""
        needed = self._plan.layers[layer].sender_layer
        ahead = 1
        while self._pending:
            must = needed in self._pending
            if not must and (not ahead or len(self._staged) > LAYERS_AHEAD):
                return
            if not self._stage(self._pending[0], must):
                return
            del self._pending[0]
            ahead -= not must

    def of_layer(self, layer: int) -> StagedLayer | None:
        """What a receiver layer reads, or None where it reads nothing or nothing could be had."""
        sender_layer = self._plan.layers[layer].sender_layer
        return None if sender_layer is None else self._staged.get(sender_layer)

    def finish(self, layer: int) -> None:
        """What only receiver layers up to this one read may be overwritten."""
        for sender_layer in [one for one in self._staged if self._last_use[one] <= layer]:
            self._staging.consume(self._staged.pop(sender_layer).region)

    def _stage(self, sender_layer: int, must: bool) -> bool:
        """False: there is no room yet. What `must` come now and finds no room is given up."""
        found = self._waiting or self._layer(sender_layer)
        self._waiting = None
        if found is None:
            return True
        region = self._staging.load(found.parts, found.num_bytes)
        if region is not None:
            self._staged[sender_layer] = self._staged_layer(region, found)
        elif not must and found.num_bytes <= self._staging.num_bytes:
            self._waiting = found
            return False
        else:
            for one in self._entries:
                one.report.reasons["staging_full"] += 1
        return True

    def _layer(self, sender_layer: int) -> _Read | None:
        runs = self._runs(sender_layer)
        if not runs:
            return None
        parts, table_shape, num_bytes = layout(list(runs.values()), self._staging.device)
        return _Read(runs, parts, table_shape, num_bytes)

    def _runs(self, sender_layer: int) -> dict[int, MapRun]:
        """Entry -> its maps; one launch reads one kind of tiles, so those that differ from the first's are left out."""
        runs: dict[int, MapRun] = {}
        for one in self._entries:
            order = one.row.step.reuse
            assert order is not None
            found = self._read(one, order, sender_layer) if order.chunks and one.ranges else None
            if found is None:
                continue
            if not covers(found, one.ranges):
                one.report.reasons["rows_missing"] += 1
            elif runs and next(iter(runs.values())).run.tile_dtype != found.run.tile_dtype:
                one.report.reasons["mixed_tiles"] += 1
            else:
                runs[one.entry] = found
        return runs

    def _staged_layer(self, region: Region, found: _Read) -> StagedLayer:
        data, runs = self._staging.data(region), found.runs
        first = next(iter(runs.values())).run
        table = MapTable(
            arena=data,
            sections=data[: 8 * math.prod(found.table_shape)].view(torch.int64).view(found.table_shape),
            spans=self._spans_of([one for one in self._entries if one.entry in runs]),
            block=first.block,
            chunk_blocks=first.chunk_blocks,
            tile_dtype=first.tile_dtype,
        )
        return StagedLayer(region, table, runs)


def covers(found: MapRun, ranges: Sequence[tuple[int, int]]) -> bool:
    """Whether every block row of the token ranges was measured."""
    run = found.run
    first = run.first_chunk * run.chunk_blocks
    rows = (slice(begin // run.block - first, -(-end // run.block) - first) for begin, end in ranges)
    return all(bool(run.measured[one].all()) for one in rows)


def layout(runs: Sequence[MapRun], device: torch.device) -> tuple[list[tuple[int, torch.Tensor]], tuple[int, ...], int]:
    """What to copy where, the shape of the table of sections, which comes first, and the bytes in all.

    Blobs that lie behind each other at their source are one part.
    """
    relative = np.concatenate([one.run.sections for one in runs])
    sizes = np.concatenate([one.run.num_bytes for one in runs])
    starts = align(relative.nbytes) + np.concatenate([[0], sizes.cumsum()])
    table = torch.from_numpy(relative + starts[:-1, None, None])
    parts = [(0, pinned(table, device).view(-1).view(torch.uint8))]
    blobs = [blob for one in runs for blob in one.blobs]
    for start, size, blob in zip(starts.tolist(), sizes.tolist(), blobs):
        at, before = parts[-1]
        if len(parts) > 1 and _follows(before, blob):
            parts[-1] = (at, before.as_strided((before.shape[0] + size,), (1,)))
        else:
            parts.append((start, blob[:size]))
    return parts, tuple(table.shape), int(starts[-1])


def _follows(before: torch.Tensor, blob: torch.Tensor) -> bool:
    same = before.untyped_storage().data_ptr() == blob.untyped_storage().data_ptr()
    return same and before.data_ptr() + before.shape[0] == blob.data_ptr()
