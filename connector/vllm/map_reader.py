"""Reading the maps that an order names: whole and verified on the host, or as they lie, for a GPU to copy.

Either way a map is used only if it is the one asked for, of the shape that the plan expects, with the tiles and heads
that the plan needs, and read under a lease that holds.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from mapflow.connector.client import Client
from mapflow.connector.messages import Extent, Lease
from mapflow.connector.plan import Plan
from mapflow.connector.reasons import Reason, Unavailable
from mapflow.connector.vllm.device_arenas import DeviceArenas
from mapflow.connector.vllm.map_identity import map_identity
from mapflow.connector.vllm.messages import ReuseOrder
from mapflow.connector.vllm.pinned import PinnedArenas
from mapflow.connector.wants import LayerWant, plan_wants
from mapflow.kernels.attention_map import AttentionMap
from mapflow.kernels.blob import read_blob
from mapflow.kernels.blob_run import BlobRun, read_runs
from mapflow.kernels.map_join import join_heads

_IN_PLACE_AREA = 1 << 30  # rows times columns: a step that certainly ends before a lease that was given back does
COPY_WITHIN_S = 5.0  # a lease that ends sooner is not used for copies that nobody waits for


class UnusableMap(ValueError):
    """A sound map that this plan cannot use; `reason` says why."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MapRun:
    """A request's maps of one sender layer as they lie.

    Attributes:
        ranks: what their prologues say, rank by rank of the sender; they differ in nothing but heads.
        source: u8 [bytes] that they lie in, on the host.
        measured: bool [block rows], those that every rank measured whole.
        copies: u8 [bytes] on the GPU that hold a copy of each of them, if there are any.
        copy_offsets: i64 [ranks, chunks]: where those begin.
    """

    ranks: Sequence[BlobRun]
    source: torch.Tensor
    measured: npt.NDArray[np.bool_]
    copies: torch.Tensor | None = None
    copy_offsets: npt.NDArray[np.int64] | None = None

    @property
    def first(self) -> BlobRun:
        """Of the first rank, for what is the same in all."""
        return self.ranks[0]


class MapReader:
    """Of one worker. Every method raises Unavailable, BlobError or UnusableMap, each with a `reason`."""

    def __init__(
        self,
        client: Client,
        plans: Sequence[Plan],
        arenas: PinnedArenas | None = None,
        copies: DeviceArenas | None = None,
    ) -> None:
        """arenas, copies: for `runs`."""
        self._client = client
        self._plans = plans
        self._wants = [plan_wants(plan) for plan in plans]
        self._arenas, self._copies = arenas, copies

    def maps(self, order: ReuseOrder, layer: int) -> list[AttentionMap]:
        """Verified copies of the maps of a sender layer, one a chunk."""
        plan, want = self._plans[order.plan], self._wants[order.plan][layer]
        lease, extents = _sources(order, plan, [layer])
        buffers = self._client.read(lease, extents)
        maps = []
        for number, chunk in enumerate(order.chunks):
            of_ranks = buffers[number :: len(order.chunks)]
            found = _joined(
                [
                    read_blob(buffer, identity=map_identity(chunk.key, producer, layer))
                    for producer, buffer in zip(order.producers, of_ranks)
                ]
            )
            _check_shape(plan, found.block, found.num_heads, found.num_row_blocks, found.chunk_index, chunk.index)
            _check_kind(want, approximate=found.approximate, has_tiles=found.tiles is not None)
            heads = list(want.heads) if want.heads is not None else slice(None)
            if not bool(found.mass[heads][:, found.measured].any(dim=-1).all()):
                raise _no_heads()
            maps.append(found)
        self._client.check_lease(lease)  # the copies were made while the lease held
        return maps

    def runs(self, order: ReuseOrder, layers: Sequence[int]) -> list[MapRun]:
        """The maps of some sender layers that are alike, for a GPU to copy while the lease lasts."""
        plan = self._plans[order.plan]
        lease, extents = _sources(order, plan, layers)
        left_s = lease.expires_at - time.monotonic()
        if left_s < COPY_WITHIN_S:
            raise Unavailable(
                Reason.LEASE_EXPIRED, f"the lease has {left_s:.1f} s left, copies may take {COPY_WITHIN_S}"
            )
        source, offsets = self._bytes(lease, extents)
        num_ranks = len(order.producers)
        shape = (len(layers) * num_ranks, len(order.chunks))
        owners = [(layer, producer) for layer in layers for producer in order.producers]
        names = [map_identity(chunk.key, producer, layer) for layer, producer in owners for chunk in order.chunks]
        runs = read_runs(
            source.numpy(),
            offsets.reshape(shape),
            np.array([extent.num_bytes for extent in extents], dtype=np.int64).reshape(shape),
            np.array(names, dtype=np.uint64).reshape(shape),
        )
        found = []
        for number, layer in enumerate(layers):
            ranks = runs[number * num_ranks : (number + 1) * num_ranks]
            measured = np.logical_and.reduce([one.measured for one in ranks])
            one = MapRun(ranks=ranks, source=source, measured=measured)
            self._check(one, order, layer)
            found.append(self._with_copies(one, order, plan.map_layers.index(layer), len(plan.map_layers)))
        return found

    def _check(self, found: MapRun, order: ReuseOrder, layer: int) -> None:
        plan, want, first = self._plans[order.plan], self._wants[order.plan][layer], found.first
        num_heads = first.num_heads * len(found.ranks)
        _check_shape(plan, first.block, num_heads, first.chunk_blocks, first.first_chunk, order.chunks[0].index)
        _check_kind(want, approximate=first.approximate, has_tiles=first.tile_dtype is not None)
        heads = range(num_heads) if want.heads is None else want.heads
        for begin, run in zip(range(0, num_heads, first.num_heads), found.ranks):
            own = [head - begin for head in heads if begin <= head < begin + run.num_heads]
            if not run.has_heads(found.source.numpy(), own):
                raise _no_heads()

    def device_arena(self, order: ReuseOrder) -> torch.Tensor | None:
        """u8 [bytes] of the arena that the order's device offsets refer to, if it may be read in place."""
        if self._copies is None or order.lease is None or not order.device_arena_id:
            return None
        if (order.row_end - order.row_begin) * order.row_end > _IN_PLACE_AREA:
            return None
        return self._copies.tensor(order.lease.boot_id, order.device_arena_id)

    def _with_copies(self, found: MapRun, order: ReuseOrder, position: int, num_layers: int) -> MapRun:
        offsets = [order.copies(place) for place in order.places(position, num_layers)]
        arena = self.device_arena(order)
        if arena is None or any(one is None for one in offsets):
            return found
        at = np.array(offsets, dtype=np.int64)
        ends = at + np.array([one.num_bytes for one in found.ranks])
        if (at < 0).any() or (ends > len(arena)).any():
            raise Unavailable(Reason.PROTOCOL, f"a copy lies outside the device arena of {len(arena)} bytes")
        return replace(found, copies=arena, copy_offsets=at)

    def _bytes(self, lease: Lease, extents: Sequence[Extent]) -> tuple[torch.Tensor, npt.NDArray[np.int64]]:
        """u8 [bytes] and where each extent begins in them: in place where the arena is mapped, else fetched."""
        assert self._arenas is not None
        arena = self._client.arena_of(lease, extents)
        if arena is not None:
            offsets = np.array([extent.offset for extent in extents], dtype=np.int64)
            return self._arenas.tensor(lease.boot_id, arena), offsets
        views = self._client.read(lease, extents)
        ends = np.cumsum([len(view) for view in views], dtype=np.int64)
        return torch.frombuffer(bytearray(b"".join(views)), dtype=torch.uint8), np.concatenate([[0], ends[:-1]])


def _sources(order: ReuseOrder, plan: Plan, layers: Sequence[int]) -> tuple[Lease, list[Extent]]:
    """The lease, and the extents of the order's chunks: layer by layer, in each rank by rank of the sender."""
    if order.lease is None:
        raise UnusableMap("no_lease", "the order names maps without a lease")
    order_of = plan.map_layers
    places = [place for layer in layers for place in order.places(order_of.index(layer), len(order_of))]
    return order.lease, [chunk.extents[place] for place in places for chunk in order.chunks]


def _joined(parts: Sequence[AttentionMap]) -> AttentionMap:
    try:
        return join_heads(parts)
    except ValueError as error:
        raise UnusableMap("shape", f"ranks of the sender differ: {error}") from error


def _check_shape(plan: Plan, block: int, heads: int, rows: int, chunk: int, wanted_chunk: int) -> None:
    expected = (plan.block, plan.sender.num_heads, plan.chunk_tokens // plan.block, wanted_chunk)
    got = (block, heads, rows, chunk)
    if got != expected:
        raise UnusableMap("shape", f"(block, heads, block rows, chunk) is {got}, the plan expects {expected}")


def _check_kind(want: LayerWant, *, approximate: bool, has_tiles: bool) -> None:
    if approximate:
        raise UnusableMap("approximate", "its rows were computed with reuse themselves")
    if want.tile_top_p and not has_tiles:
        raise UnusableMap("no_tiles", "published before this plan's tiles were asked for")


def _no_heads() -> UnusableMap:
    return UnusableMap("no_heads", "published before this plan's heads were asked for")
