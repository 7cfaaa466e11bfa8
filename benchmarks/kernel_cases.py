"""What `kernels.py` measures: synthetic maps, and the calls of each kernel with the least work of each.

A synthetic map keeps the first block column, the diagonal, its neighbour, and random others until each row has its
share. Real maps cluster; random ones are the harder case for caches, and for all-heads translation the hardest.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from kernel_inputs import BF16, BLOCK, E4M3, HEAD_DIM, Baselines, Call, Shape, Work, describe, keep_blocks, ordered

from mapflow.kernels.block_rows import BlockIndex, BlockRows, ChunkSpan
from mapflow.kernels.compress import block_masses
from mapflow.kernels.guide import guide_attention
from mapflow.kernels.map_table import MapTable
from mapflow.kernels.mass_tasks import MassTasks
from mapflow.kernels.select import select_blocks
from mapflow.kernels.tiles import store_tiles
from mapflow.kernels.translate import translate_attention
from mapflow.kernels.translate_dense import translate_all_heads

Case = tuple[dict[str, Any], Call, Work]


class Synthetic:
    """Maps, index and masses of one shape and density."""

    def __init__(self, inputs: Baselines, density: float) -> None:
        self.inputs, self.shape = inputs, inputs.shape
        whole = ChunkSpan(first_chunk=0, num_chunks=1, slot=0)
        self.rows = BlockRows.from_segments(
            [inputs.segment],
            block=BLOCK,
            num_batch_rows=self.shape.context,
            device=torch.device("cuda"),
            chunk_blocks=self.shape.num_blocks,
            spans=[whole],
        )
        self.spans = (whole,)
        self.kept = keep_blocks(self.shape.sender_heads, self.shape.num_blocks, density, seed=1)

    def maps(self, tile_dtype: torch.dtype | None) -> MapTable:
        """The sender's maps: masses so that top-p at 0.5 keeps `kept`, and random tiles if asked for."""
        heads, blocks = self.kept.shape[:2]
        counts = self.kept.sum(-1)
        item = tile_dtype.itemsize * BLOCK**2 if tile_dtype is not None else 0
        sections, at = [], 0
        for num_tiles in counts.sum(1).tolist():
            section = [at]
            for num_bytes in (blocks * blocks, 4 * (blocks + 1), 4 * num_tiles, item * num_tiles):
                at += -(-num_bytes // 64) * 64
                section.append(at)
            sections.append(section[:4])
        arena = torch.randint(0, 0x78, (at,), dtype=torch.uint8, device="cuda")  # bits of e4m3 from 0 to 1
        indptr = torch.zeros(heads, blocks + 1, dtype=torch.int32, device="cuda")
        indptr[:, 1:] = counts.cumsum(1)
        for head, (mass_at, indptr_at, columns_at, tiles_at) in enumerate(sections):
            _put(arena, mass_at, self.kept[head].to(torch.uint8) * 100)
            _put(arena, indptr_at, indptr[head])
            _put(arena, columns_at, self.kept[head].nonzero()[:, 1].int())
            if tile_dtype == BF16:
                end = tiles_at + item * int(counts[head].sum())
                arena[tiles_at:end].view(BF16).uniform_()
        return MapTable(
            arena=arena,
            sections=torch.tensor(sections, device="cuda")[None],
            spans=self.spans,
            block=BLOCK,
            chunk_blocks=blocks,
            tile_dtype=tile_dtype,
        )

    def index(self) -> BlockIndex:
        """The kept blocks as the tile kernel takes them, for the first `q_heads` sender heads."""
        counts, columns = ordered(self.kept[: self.shape.q_heads])
        order = self.rows.lines[:, 1].long()
        return BlockIndex(
            columns=columns.transpose(0, 1)[order].contiguous(), counts=counts.transpose(0, 1)[order].contiguous()
        )


def _put(arena: torch.Tensor, at: int, values: torch.Tensor) -> None:
    flat = values.contiguous().view(-1).view(torch.uint8)
    arena[at : at + flat.numel()] = flat


def kernel_cases(shape: Shape, density: float, inputs: Baselines) -> Iterator[Case]:
    """Every kernel at one shape and density: its description, the call, and the least work of it."""
    made = Synthetic(inputs, density)
    rows, kv, scale, out = made.rows, inputs.kv, HEAD_DIM**-0.5, inputs.out
    kept = int(made.kept[: shape.q_heads].sum())
    real = kept / (shape.q_heads * shape.causal_blocks)
    tile_flops = 2.0 * BLOCK * BLOCK * HEAD_DIM
    rows_bytes = shape.context * shape.q_heads * HEAD_DIM * 2

    def described(kernel: str, dtype: str, *, k: int = 0, sender_heads: int = 0) -> dict[str, Any]:
        return describe(kernel, dtype, round(real, 4), k=k, sender_heads=sender_heads)

    guide_work = Work(flops=2 * kept * tile_flops, num_bytes=2 * rows_bytes + 2 * shape.kv_bytes)
    masses_only = made.maps(None)
    head_map = torch.zeros(shape.q_heads, shape.sender_heads, device="cuda")
    head_map[:, : shape.q_heads] = torch.eye(shape.q_heads, device="cuda")

    def guide() -> None:
        index = select_blocks(masses_only, rows, head_map, 0.9999, sink_blocks=0, local_blocks=0)
        guide_attention(inputs.query, kv, rows, index, scale=scale, out=out)

    yield described("guide", "bf16", sender_heads=shape.sender_heads), guide, guide_work
    for tile_dtype, value_dtype, label in ((E4M3, E4M3, "e4m3"), (E4M3, BF16, "e4m3 x bf16"), (BF16, BF16, "bf16")):
        maps = made.maps(tile_dtype)
        item, unit = tile_dtype.itemsize, "e4m3" if value_dtype == E4M3 else "bf16"
        for k in (1, 2, 4) if label == "e4m3" else (1, 2):
            heads = (torch.arange(shape.q_heads * k, device="cuda") * 7 % shape.sender_heads).view(-1, k).int()
            read = int(made.kept.sum((1, 2))[heads.long()].sum())
            weights = torch.rand(shape.q_heads, k, device="cuda") + 0.1
            work = Work(
                flops=read * tile_flops,
                num_bytes=read * BLOCK**2 * item + rows_bytes + shape.kv_bytes,
                unit=unit,
            )

            def translate(
                heads: torch.Tensor = heads,
                weights: torch.Tensor = weights,
                maps: MapTable = maps,
                value_dtype: torch.dtype = value_dtype,
            ) -> None:
                translate_attention(
                    kv, rows, maps, head_index=heads, head_weight=weights, out=out, value_dtype=value_dtype
                )

            yield described("translate", label, k=k, sender_heads=shape.sender_heads), translate, work
        if label == "e4m3":
            dense = torch.randn(shape.q_heads, shape.sender_heads, device="cuda")
            every = int(made.kept.sum())
            work = Work(
                flops=every * tile_flops * shape.kv_heads,
                num_bytes=every * BLOCK**2 * item + rows_bytes + shape.kv_bytes,
                unit=unit,
            )

            def all_heads(dense: torch.Tensor = dense, maps: MapTable = maps) -> None:
                translate_all_heads(kv, rows, maps, head_map=dense, out=out)

            every_head = described("translate_all_heads", label, k=shape.sender_heads, sender_heads=shape.sender_heads)
            yield every_head, all_heads, work
        del maps
    yield from _tiles(made, real)


def shape_cases(shape: Shape, inputs: Baselines) -> Iterator[Case]:
    """What does not depend on the density: guide with every block kept, and the compressor's first pass."""
    yield _full_density(shape, inputs)
    yield from _masses(shape, inputs)


def _full_density(shape: Shape, inputs: Baselines) -> Case:
    made = Synthetic(inputs, 0.02)
    rows, maps = made.rows, made.maps(None)
    head_map = torch.eye(shape.q_heads, shape.sender_heads, device="cuda")

    def guide() -> None:
        index = select_blocks(maps, rows, head_map, 1.0, sink_blocks=0, local_blocks=0)
        guide_attention(inputs.query, inputs.kv, rows, index, scale=HEAD_DIM**-0.5, out=inputs.out)

    num_bytes = 4.0 * shape.context * shape.q_heads * HEAD_DIM + 2 * shape.kv_bytes
    case = describe("guide", "bf16", 1.0, sender_heads=shape.sender_heads)
    return case, guide, Work(flops=shape.attention_flops, num_bytes=num_bytes)


def _masses(shape: Shape, inputs: Baselines) -> Iterator[Case]:
    rows = BlockRows.from_segments(
        [inputs.segment], block=BLOCK, num_batch_rows=shape.context, device=torch.device("cuda")
    )
    mass = torch.zeros(shape.num_blocks, shape.q_heads, shape.num_blocks, device="cuda")
    lse = torch.empty(shape.q_heads, shape.context, device="cuda")
    for stride in (1, 2, 4, 8):
        tasks = MassTasks.build(rows, group=shape.q_heads // shape.kv_heads, row_stride=stride)
        for key_dtype, unit in ((E4M3, "e4m3"), (None, "bf16")):

            def masses(tasks: MassTasks = tasks, key_dtype: torch.dtype | None = key_dtype) -> None:
                block_masses(
                    inputs.query,
                    inputs.kv,
                    tasks,
                    scale=HEAD_DIM**-0.5,
                    mass=mass,
                    row_lse=lse,
                    key_dtype=key_dtype,
                )

            work = Work(
                flops=shape.attention_flops / 2 / stride,
                num_bytes=shape.kv_bytes + 2.0 * shape.context * shape.q_heads * HEAD_DIM / stride,
                unit=unit,
            )
            yield describe(f"masses_stride_{stride}", unit, 1.0), masses, work


def _tiles(made: Synthetic, density: float) -> Iterator[Case]:
    """The compressor's second pass."""
    shape, inputs, rows, index = made.shape, made.inputs, made.rows, made.index()
    counts = index.counts.long()
    before = (counts.view(-1).cumsum(0) - counts.view(-1)).view_as(counts)
    lse = torch.full((shape.q_heads, shape.context), 15.0, device="cuda")
    for tile_dtype, label in ((E4M3, "e4m3"), (BF16, "bf16")):
        item = BLOCK**2 * tile_dtype.itemsize
        arena = torch.empty(int(counts.sum()) * item, dtype=torch.uint8, device="cuda")

        def tiles(
            arena: torch.Tensor = arena, offsets: torch.Tensor = before * item, tile_dtype: torch.dtype = tile_dtype
        ) -> None:
            store_tiles(
                inputs.query,
                inputs.kv,
                rows,
                index,
                lse,
                scale=HEAD_DIM**-0.5,
                tile_dtype=tile_dtype,
                arena=arena,
                offsets=offsets,
            )

        num_tiles = int(counts.sum())
        work = Work(
            flops=num_tiles * 2.0 * BLOCK**2 * HEAD_DIM,
            num_bytes=num_tiles * item + 2.0 * shape.context * shape.q_heads * HEAD_DIM + shape.kv_bytes,
        )
        yield describe("tiles", label, round(density, 4)), tiles, work
        del arena
