"""A step of the plugin through the kernels: the same rows and values as with the references, in little room."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from mapflow.connector.messages import Extent
from mapflow.connector.plan import LayerPlan, Mode, ModelSpec, Plan
from mapflow.connector.vllm.batch import BatchRow
from mapflow.connector.vllm.gpu import GpuReuse
from mapflow.connector.vllm.kernel_reuse import DevicePlans, KernelReuse
from mapflow.connector.vllm.map_reader import MapRun
from mapflow.connector.vllm.messages import MappedChunk, RequestStep, ReuseOrder
from mapflow.connector.vllm.reuse import EntryReuse, StepReuse
from mapflow.connector.vllm.staging import StagingBuffer
from mapflow.connector.vllm.step_timer import StepSize
from mapflow.connector.vllm.transfer_model import TransferModel
from mapflow.kernels.attention_map import AttentionMap, TileSet
from mapflow.kernels.blob_run import read_runs
from mapflow.kernels.blob_writer import blob_num_bytes, write_blob
from mapflow.kernels.map_join import join_heads

SENDER_HEADS, CHUNK, BLOCK = 3, 128, 64
GUIDE, TRANSLATE = Mode.GUIDE, Mode.TRANSLATE
LAYERS = (
    LayerPlan(mode=Mode.COMPUTE),
    LayerPlan(mode=Mode.STATIC, sink_blocks=1, local_blocks=1),
    LayerPlan(mode=GUIDE, sender_layer=5, top_p=0.6, sink_blocks=0, local_blocks=1),
    LayerPlan(mode=TRANSLATE, sender_layer=1, top_p=0.6),
    LayerPlan(mode=GUIDE, sender_layer=2, top_p=0.8),
    LayerPlan(mode=GUIDE, sender_layer=5, top_p=0.3),
    LayerPlan(mode=TRANSLATE, sender_layer=3, top_p=0.6),
    LayerPlan(mode=GUIDE, sender_layer=4, top_p=0.7),
)


def _plan(heads: int) -> Plan:
    spec: dict[str, Any] = {"revision": "r", "num_kv_heads": 1, "head_dim": 64}
    generator = torch.Generator().manual_seed(1)
    guides = [number for number, layer in enumerate(LAYERS) if layer.mode is GUIDE]
    translates = [number for number, layer in enumerate(LAYERS) if layer.mode is TRANSLATE]
    index = torch.arange(heads * 2).view(heads, 2) % SENDER_HEADS
    return Plan(
        name="p",
        tokenizer_fingerprint="0" * 32,
        chunk_tokens=CHUNK,
        block=BLOCK,
        sender=ModelSpec(name="s", num_layers=6, num_heads=SENDER_HEADS, **spec),
        receiver=ModelSpec(name="r", num_layers=len(LAYERS), num_heads=heads, **spec),
        layers=LAYERS,
        head_map={layer: torch.rand(heads, SENDER_HEADS, generator=generator) for layer in guides},
        head_index=dict.fromkeys(translates, index.int()),
        head_weight={layer: torch.rand(heads, 2, generator=generator) for layer in translates},
    )


class _Step:
    """Two prompts in one step: the first from its second chunk on, of which the end is not reused."""

    def __init__(self, make_batch: Callable[..., Any], make_maps: Callable[..., Any]) -> None:
        self.batch = make_batch((CHUNK, 3 * CHUNK - 20), (0, CHUNK + 30), group=2, kv_heads=1, sharpness=3.0)
        self.plan = _plan(self.batch.query.shape[1])
        self.maps: dict[int, list[list[AttentionMap]]] = {}
        for layer in self.plan.map_layers:
            self.maps[layer] = [
                make_maps(first_chunk=first, end_chunk=end, heads=SENDER_HEADS, seed=10 * layer + first)
                for first, end in ((1, 3), (0, 2))
            ]
        self.reads: list[tuple[int, int]] = []
        self.in_ranks = False
        self.device_arena: torch.Tensor | None = None  # with copies of layers that are even

    def entries(self, tables: Sequence[torch.Tensor], *, with_maps: bool) -> list[EntryReuse]:
        found = []
        for entry, (segment, table) in enumerate(zip(self.batch.segments, tables)):
            end = segment.row_end - 7
            first = segment.row_begin // CHUNK
            extents = tuple(Extent(0, 0, 1000 * layer) for layer in self.plan.map_layers)
            chunks = tuple(MappedChunk(index=first + i, key=b"k", extents=extents) for i in range(2))
            order = ReuseOrder(
                plan=0, row_begin=segment.row_begin, row_end=end, chunks=chunks, producers=("s",), counted=entry == 0
            )
            row = BatchRow(
                step=RequestStep(
                    request_id=str(entry),
                    row_begin=segment.row_begin,
                    row_end=segment.row_end,
                    num_prompt=segment.row_end,
                    last_page=0,
                    reuse=order,
                ),
                query_begin=segment.out_begin,
                row_begin=segment.row_begin,
                row_end=segment.row_end,
                block_table=table,
            )
            maps = {layer: of_entries[entry] for layer, of_entries in self.maps.items()} if with_maps else {}
            found.append(EntryReuse(entry=entry, row=row, plan=self.plan, maps=maps, ranges=[(segment.row_begin, end)]))
        return found

    def read(self, entry: EntryReuse, order: ReuseOrder, layers: Sequence[int]) -> list[MapRun | None]:
        """The blobs behind each other in one buffer, a chunk's layers together, as an arena has them."""
        self.reads += [(entry.entry, layer) for layer in layers]
        if self.in_ranks:
            return [self.read_ranks(self.maps[layer][entry.entry]) for layer in layers]
        maps = [self.maps[layer][entry.entry][chunk] for chunk in range(2) for layer in layers]
        sizes = np.array([blob_num_bytes(one) for one in maps])
        offsets = sizes.cumsum() - sizes
        whole = bytearray(int(sizes.sum()))
        for one, begin in zip(maps, offsets):
            with memoryview(whole) as view:
                write_blob(one, view[begin:])
        data = torch.frombuffer(whole, dtype=torch.uint8)
        shape = (2, len(layers))
        names = np.zeros(shape, dtype=np.uint64)
        runs = read_runs(data.numpy(), offsets.reshape(shape).T, sizes.reshape(shape).T, names.T)
        found: list[MapRun | None] = []
        for layer, run in zip(layers, runs):
            if self.device_arena is None or layer % 2:
                found.append(MapRun(ranks=[run], source=data, measured=run.measured))
                continue
            at = self.copies_from + (1 << 16) * (10 * layer + 2 * entry.entry) + np.array([0, 1 << 15])
            for begin, source, num_bytes in zip(at, run.offsets, run.num_bytes):
                self.device_arena[begin : begin + num_bytes] = data[source : source + num_bytes].to(self.batch.device)
            found.append(
                MapRun(
                    ranks=[run],
                    source=data,
                    measured=run.measured,
                    copies=self.device_arena,
                    copy_offsets=at[None],
                )
            )
        return found

    @staticmethod
    def read_ranks(chunks: Sequence[AttentionMap]) -> MapRun:
        """A sender with a rank for each head, whose blobs lie rank by rank."""
        maps = [only_head(one, head) for head in range(SENDER_HEADS) for one in chunks]
        sizes = np.array([blob_num_bytes(one) for one in maps])
        offsets, whole = sizes.cumsum() - sizes, bytearray(int(sizes.sum()))
        for one, begin in zip(maps, offsets):
            with memoryview(whole) as view:
                write_blob(one, view[begin:])
        data, shape = torch.frombuffer(whole, dtype=torch.uint8), (SENDER_HEADS, len(chunks))
        names = np.zeros(shape, dtype=np.uint64)
        ranks = read_runs(data.numpy(), offsets.reshape(shape), sizes.reshape(shape), names)
        return MapRun(ranks=ranks, source=data, measured=ranks[0].measured)

    copies_from = (2 << 30) + 64  # beyond what 32 bits count

    def layer_bytes(self) -> int:
        """Of the largest sender layer, with its table."""
        sizes = ([blob_num_bytes(one) for maps in layer for one in maps] for layer in self.maps.values())
        return max(sum(one) + 32 * SENDER_HEADS * len(one) + 64 for one in sizes)

    def kernels(self, staging_bytes: int, model: TransferModel | None = None) -> KernelReuse:
        device = self.batch.device
        entries = self.entries([one.block_table for one in self.batch.segments], with_maps=False)
        rows = self.batch.num_rows
        size = StepSize(num_rows=rows, context=max(one.row_end for one in self.batch.segments))
        return KernelReuse(
            entries,
            size=size,
            device=device,
            staging=StagingBuffer(staging_bytes, device),
            plans=DevicePlans(device),
            read=self.read,
            late=lambda _, wanted: (model or TransferModel()).late(wanted, rows, size.context, saved_s=0.0),
        )


@pytest.fixture
def step(make_batch: Callable[..., Any], make_maps: Callable[..., Any]) -> _Step:
    return _Step(make_batch, make_maps)


def _run(reuse: KernelReuse, batch: Any) -> list[torch.Tensor]:
    outs = []
    for layer in range(len(LAYERS)):
        reuse.prepare(layer)
        outs.append(batch.poisoned())
        reuse.attend(layer, batch.query, batch.kv, batch.scale, outs[-1])
        reuse.finish(layer)
    reuse.end()
    return outs


@pytest.mark.parametrize("layers", [7, 2], ids=["roomy", "tight"])
def test_as_the_references(step: _Step, error_of: Callable[..., float], layers: int) -> None:
    """Tight: the maps that two layers read, far apart, stay, and those of all others pass through the rest."""
    batch = step.batch
    reuse = step.kernels(layers * step.layer_bytes())
    outs = _run(reuse, batch)
    reference = StepReuse(step.entries([one.block_table for one in batch.host_segments], with_maps=True))
    query = batch.query.cpu()
    for layer, out in enumerate(outs):
        wanted = torch.full_like(query, torch.nan)
        reference.attend(layer, query, batch.host_kv, batch.scale, wanted)
        assert torch.equal(out.cpu().isnan(), wanted.isnan())
        if LAYERS[layer].mode is not Mode.COMPUTE:
            bound = 5e-2 if LAYERS[layer].mode is TRANSLATE else 1e-2  # e4m3 values
            assert error_of(out.cpu().nan_to_num(), wanted.nan_to_num()) < bound, layer
    assert sorted(step.reads) == [(entry, layer) for entry in (0, 1) for layer in range(1, 6)], "each once"
    assert [dict(one.report.reasons) for one in reuse.entries] == [{}, {}]
    counted, not_counted = (one.report for one in reuse.entries)
    assert counted.modes == {"static": 1, "guide": 4, "translate": 2}
    same = reference.entries[0].report
    assert (counted.kept_blocks, counted.causal_blocks) == (same.kept_blocks, same.causal_blocks)
    assert not_counted.causal_blocks == 0


def test_copies_on_the_gpu_are_read_in_place(step: _Step) -> None:
    """Bit for bit as if they had been copied into the staging buffer."""
    copied = _run(step.kernels(4 << 20), step.batch)
    step.device_arena = torch.empty(step.copies_from + (8 << 20), dtype=torch.uint8, device=step.batch.device)
    reuse = step.kernels(4 << 20)
    for one, other in zip(_run(reuse, step.batch), copied):
        assert torch.equal(one.view(torch.int16), other.view(torch.int16))
    assert [one.report.in_place for one in reuse.entries] == [2, 2], "of guided layers 4 and 7"


def test_heads_of_several_ranks_are_joined(step: _Step) -> None:
    """Bit for bit as if one producer had all heads."""
    together = _run(step.kernels(4 << 20), step.batch)
    step.in_ranks = True
    reuse = step.kernels(4 << 20)
    for one, other in zip(_run(reuse, step.batch), together):
        assert torch.equal(one.view(torch.int16), other.view(torch.int16))
    counted = reuse.entries[0].report
    assert counted.modes == {"static": 1, "guide": 4, "translate": 2} and counted.causal_blocks > 0


def only_head(one: AttentionMap, head: int) -> AttentionMap:
    """As a rank that has no other."""
    tiles = one.tiles
    if tiles is not None:
        begin, end = int(tiles.indptr[head, 0]), int(tiles.indptr[head, -1])
        tiles = TileSet(
            indptr=tiles.indptr[head : head + 1] - begin,
            indices=tiles.indices[begin:end],
            values=tiles.values[begin:end],
        )
    return replace(one, mass=one.mass[head : head + 1].contiguous(), tiles=tiles)


def test_ranks_make_the_map_again(step: _Step) -> None:
    for chunks in (maps for layer in step.maps.values() for maps in layer):
        for one in chunks:
            joined = join_heads([only_head(one, head) for head in range(SENDER_HEADS)])
            assert torch.equal(joined.mass, one.mass) and torch.equal(joined.row_counts, one.row_counts)
            assert (joined.tiles is None) == (one.tiles is None)
            if one.tiles is not None and joined.tiles is not None:
                assert torch.equal(joined.tiles.indptr, one.tiles.indptr)
                assert torch.equal(joined.tiles.indices, one.tiles.indices)
    first, second = step.maps[5][0]
    with pytest.raises(ValueError, match="one chunk, block and kind"):
        join_heads([first, second])


def test_less_room_than_one_layer_needs(step: _Step) -> None:
    """Its layers are left to vLLM, and said so."""
    reuse = step.kernels(20_000)
    outs = _run(reuse, step.batch)
    reused = [not bool(out.isnan().all()) for out in outs]
    assert reused == [layer.mode in (Mode.STATIC,) for layer in LAYERS]
    assert reuse.entries[0].report.reasons == {"staging_full": 5}


def test_maps_that_would_come_too_late(step: _Step) -> None:
    """Of sender layers 5, 1, 2, 3, 4, in this order, with 1 s a layer of the receiver and 10 kB/s."""
    model = TransferModel()
    model.observe_copy(10_000_000, 1000.0)
    model.observe_layers(step.batch.num_rows, max(one.row_end for one in step.batch.segments), 1.0)
    reuse = step.kernels(4 << 20, model)
    _run(reuse, step.batch)
    # 5: 20 kB for receiver layer 2, late; 1: 4 kB for 3; 2: 8 kB for 4; 3: 12 kB for 6; 4: 16 kB for 7
    assert [layer for entry, layer in step.reads if entry == 0] == [1, 2, 3, 4]
    assert reuse.entries[0].report.reasons == {"late": 1}
    assert reuse.entries[0].report.modes == {"static": 1, "guide": 2, "translate": 2}


@pytest.mark.parametrize("cost_model", [True, False])
def test_steps_that_reuse_made_slower_are_computed(step: _Step, cost_model: bool) -> None:
    """Of the size of this one, where another took half as long without reuse."""
    gpu = GpuReuse([step.plan], step.batch.device, 4 << 20, cost_model=cost_model)
    rows, context = step.batch.num_rows, max(one.row_end for one in step.batch.segments)
    for _ in range(2):
        gpu._gain.observe(rows, context, frozenset({"p"}), 1.0)
    gpu._gain.observe(rows, context, frozenset(), 0.5)
    entries = step.entries([one.block_table for one in step.batch.segments], with_maps=False)
    reuse = gpu.step(entries, rows, step.read)
    outs = _run(reuse, step.batch)
    assert all(bool(out.isnan().all()) for out in outs) is cost_model
    assert reuse.entries[0].report.reasons == ({"no_gain": 1} if cost_model else {})
    assert bool(step.reads) is not cost_model


def test_rows_that_nobody_measured(step: _Step, monkeypatch: pytest.MonkeyPatch) -> None:
    """One request's layer is computed, the other's is reused."""
    reuse = step.kernels(4 << 20)
    read = step.read

    def without(entry: EntryReuse, order: ReuseOrder, layers: Sequence[int]) -> list[MapRun | None]:
        found = read(entry, order, layers)
        for number, layer in enumerate(layers):
            if (entry.entry, layer) == (1, 5):
                found[number].measured[0] = False
            if (entry.entry, layer) == (0, 1):
                found[number] = None
        return found

    for _, _, maps in reuse._groups:
        monkeypatch.setattr(maps, "_read", without)
    for layer in range(len(LAYERS)):
        reuse.prepare(layer)
        if layer:
            expected = {2: {0}, 3: {1}, 5: {0}}.get(layer, {0, 1})
            assert set(reuse.reused_entries(layer)) == expected
        reuse.finish(layer)
    assert reuse.entries[1].report.reasons == {"rows_missing": 1}
    reuse.end()
