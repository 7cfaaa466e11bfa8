"""The maps that one plan's requests need in a step, some sender layers after the other, by way of the staging buffer.

Sender layers are taken in the order in which the receiver's layers first read them, a few ahead. Small ones are taken
more and more at once: on the host a copy costs the same however little it moves, but the first of them are read while
the GPU has little else to do. What cannot be read, does not cover the rows or finds no room is left out of its layer,
and the request's report says why.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from mapflow.connector.plan import Mode, Plan
from mapflow.connector.vllm.map_layout import MapLayout, layout
from mapflow.connector.vllm.map_reader import MapRun
from mapflow.connector.vllm.messages import ReuseOrder
from mapflow.connector.vllm.reuse import EntryReuse
from mapflow.connector.vllm.staging import Region, StagingBuffer
from mapflow.connector.vllm.transfer_model import Transfer
from mapflow.kernels.block_rows import ChunkSpan
from mapflow.kernels.map_table import MapTable

LAYERS_AHEAD = 2
TOGETHER_BYTES = 32 << 20  # layers that are copied at once have no more than this, unless a single one has

ReadRuns = Callable[[EntryReuse, ReuseOrder, Sequence[int]], Sequence[MapRun | None]]
"""Maps of an entry in some sender layers, None for those that cannot be used (counted by whoever reads)."""
SpansOf = Callable[[Sequence[EntryReuse]], tuple[ChunkSpan, ...]]
"""Which chunks each segment of these entries has, when their maps lie one entry behind the other."""


@dataclass(slots=True, eq=False)
class _Group:
    """Sender layers whose maps share a region of the staging buffer, until the last of them was read."""

    region: Region
    layers: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True, eq=False)
class StagedLayer:
    """One sender layer: the maps of some entries in a region of the staging buffer, or where the daemon has them."""

    group: _Group
    table: MapTable
    runs: Mapping[int, MapRun]  # by entry
    in_place: bool

    @property
    def region(self) -> Region:
        """Where they are."""
        return self.group.region


@dataclass(frozen=True, slots=True, eq=False)
class _Read:
    """The maps of some sender layers, by layer and entry, and where they will go."""

    runs: Mapping[int, Mapping[int, MapRun]]
    layout: MapLayout


class StagedMaps:
    """Of the entries of one plan, in one step."""

    def __init__(
        self, plan: Plan, entries: Sequence[EntryReuse], staging: StagingBuffer, read: ReadRuns, spans_of: SpansOf
    ) -> None:
        self._plan, self._entries, self._staging = plan, entries, staging
        self._read, self._spans_of = read, spans_of
        self._first_use: dict[int, int] = {}  # sender layer -> receiver layer
        self._last_use: dict[int, int] = {}
        for layer, of_layer in enumerate(plan.layers):
            if of_layer.sender_layer is not None:
                self._first_use.setdefault(of_layer.sender_layer, layer)
                self._last_use[of_layer.sender_layer] = layer
        self._tiled = {one.sender_layer for one in plan.layers if one.mode is Mode.TRANSLATE}
        self._num_bytes = dict.fromkeys(self._first_use, 0)
        for one in entries:
            order = one.row.step.reuse
            if order is None:
                continue
            for position, sender_layer in enumerate(plan.map_layers):
                places = order.places(position, len(plan.map_layers))
                if any(order.copies(place) is None for place in places):
                    extents = (chunk.extents[place] for place in places for chunk in order.chunks)
                    self._num_bytes[sender_layer] += sum(extent.num_bytes for extent in extents)
        self._pending = list(self._first_use)
        self._staged: dict[int, StagedLayer] = {}
        self._waiting: _Read | None = None  # of the first pending layers, read before there was room
        self._most_together = 1

    def transfers(self) -> list[Transfer]:
        """What is still to be copied, in that order."""
        return [Transfer(one, self._first_use[one], self._num_bytes[one]) for one in self._pending]

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
            together = self._together()
            if not self._stage(together, must):
                return
            del self._pending[: len(together)]
            self._most_together *= 2
            ahead -= not must

    def of_layer(self, layer: int) -> StagedLayer | None:
        """What a receiver layer reads, or None where it reads nothing or nothing could be had."""
        sender_layer = self._plan.layers[layer].sender_layer
        return None if sender_layer is None else self._staged.get(sender_layer)

    def finish(self, layer: int) -> None:
        """What only receiver layers up to this one read may be overwritten."""
        for sender_layer in [one for one in self._staged if self._last_use[one] <= layer]:
            group = self._staged.pop(sender_layer).group
            group.layers.discard(sender_layer)
            if not group.layers:
                self._staging.consume(group.region)

    def _together(self) -> list[int]:
        """The first pending sender layers, as many as are copied at once."""
        room = min(TOGETHER_BYTES, self._staging.num_bytes // 4)
        found = self._pending[:1]
        room -= self._num_bytes[found[0]]
        for one in self._pending[1 : self._most_together]:
            room -= self._num_bytes[one]
            if room < 0 or (one in self._tiled) != (found[0] in self._tiled):
                break
            found.append(one)
        return found

    def _stage(self, sender_layers: Sequence[int], must: bool) -> bool:
        """False: there is no room yet. What `must` come now and finds no room is given up."""
        found = self._waiting or self._read_layers(sender_layers)
        self._waiting = None
        if found is None:
            return True
        region = self._staging.load(found.layout.parts, found.layout.num_bytes)
        if region is not None:
            self._add(region, found)
        elif not must and found.layout.num_bytes <= self._staging.num_bytes:
            self._waiting = found
            return False
        else:
            for one in self._entries:
                one.report.reasons["staging_full"] += len(sender_layers)
        return True

    def _read_layers(self, sender_layers: Sequence[int]) -> _Read | None:
        """One launch reads one kind of tiles, so entries that differ from the first's are left out of their layer."""
        by_layer: dict[int, dict[int, MapRun]] = {layer: {} for layer in sender_layers}
        for one in self._entries:
            order = one.row.step.reuse
            if order is None or not order.chunks or not one.ranges:
                continue
            for layer, found in zip(sender_layers, self._read(one, order, sender_layers)):
                runs = by_layer[layer]
                if found is None:
                    continue
                if not covers(found, one.ranges):
                    one.report.reasons["rows_missing"] += 1
                elif runs and next(iter(runs.values())).first.tile_dtype != found.first.tile_dtype:
                    one.report.reasons["mixed_tiles"] += 1
                else:
                    runs[one.entry] = found
        by_layer = {layer: runs for layer, runs in by_layer.items() if runs}
        if not by_layer:
            return None
        layers = [list(runs.values()) for runs in by_layer.values()]
        return _Read(by_layer, layout(layers, list(map(_in_place, layers)), self._staging.device))

    def _add(self, region: Region, found: _Read) -> None:
        data, group = self._staging.data(region), _Group(region, set(found.runs))
        for (layer, runs), (begin, shape) in zip(found.runs.items(), found.layout.tables):
            sample, in_place = next(iter(runs.values())), _in_place(runs.values())
            table = MapTable(
                arena=sample.copies if in_place and sample.copies is not None else data,
                sections=data[begin : begin + 8 * math.prod(shape)].view(torch.int64).view(shape),
                spans=self._spans_of([one for one in self._entries if one.entry in runs]),
                block=sample.first.block,
                chunk_blocks=sample.first.chunk_blocks,
                tile_dtype=sample.first.tile_dtype,
            )
            self._staged[layer] = StagedLayer(group, table, runs, in_place)


def _in_place(runs: Collection[MapRun]) -> bool:
    """Whether one launch can read all of them where they are; else all of them are copied."""
    return all(one.copies is not None for one in runs)


def covers(found: MapRun, ranges: Sequence[tuple[int, int]]) -> bool:
    """Whether every block row of the token ranges was measured."""
    run = found.first
    first = run.first_chunk * run.chunk_blocks
    rows = (slice(begin // run.block - first, -(-end // run.block) - first) for begin, end in ranges)
    return all(bool(found.measured[one].all()) for one in rows)
