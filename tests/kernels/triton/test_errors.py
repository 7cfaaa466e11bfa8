"""What the wrappers refuse, with the value and what was expected."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from mapflow.kernels.block_rows import BlockIndex, BlockRows, ChunkSpan
from mapflow.kernels.compress import block_masses
from mapflow.kernels.guide import guide_attention
from mapflow.kernels.map_table import MapTable
from mapflow.kernels.mass_tasks import MassTasks
from mapflow.kernels.paged import PagedKV
from mapflow.kernels.row_segment import RowSegment
from mapflow.kernels.select import select_blocks, select_by_mass, select_static
from mapflow.kernels.tiles import store_tiles
from mapflow.kernels.translate import translate_attention
from mapflow.kernels.translate_dense import translate_all_heads

E4M3, BF16, FP16 = torch.float8_e4m3fn, torch.bfloat16, torch.float16


def test_block_rows(device: torch.device) -> None:
    segment = RowSegment(row_begin=100, row_end=200, out_begin=0, block_table=torch.arange(13, device=device))

    def build(*segments: RowSegment, block: int = 64, num_batch_rows: int = 100, **more: Any) -> None:
        size = {"block": block, "num_batch_rows": num_batch_rows, "device": device}
        BlockRows.from_segments(segments, **size, **more)

    with pytest.raises(ValueError, match="block: expected 64 or 128 on an accelerator, got 32"):
        build(segment, block=32)
    with pytest.raises(ValueError, match="segments: expected at least one, got none"):
        build()
    with pytest.raises(ValueError, match="batch's 99, got one that ends at 100"):
        build(segment, num_batch_rows=99)
    with pytest.raises(ValueError, match="no overlap, got two that hold row 0"):
        build(segment, segment)
    with pytest.raises(ValueError, match="one for each of 1 segments, got 0"):
        build(segment, spans=[])
    with pytest.raises(ValueError, match="chunk_blocks: expected at least 1, got 0"):
        build(segment, chunk_blocks=0)
    for first, count in ((0, 1), (1, 1), (2, 3)):  # the rows lie in chunks 0 and 1 of 128 tokens
        with pytest.raises(ValueError, match=rf"cover rows \[100, 200\), got chunks {first} to {first + count - 1}"):
            build(segment, chunk_blocks=2, spans=[ChunkSpan(first_chunk=first, num_chunks=count, slot=0)])


def test_map_table(make_maps: Callable[..., Any], device: torch.device) -> None:
    maps = make_maps(end_chunk=2)
    with pytest.raises(ValueError, match="expected at least one, got none"):
        MapTable.from_maps([[]], device)
    with pytest.raises(ValueError, match=r"maps\[1\]: expected"):
        MapTable.from_maps([[maps[0], maps[0]]], device)
    for other in ({"heads": 2}, {"tile_dtype": BF16}, {"tile_dtype": None}, {"chunk_blocks": 1}, {"block": 128}):
        with pytest.raises(ValueError, match=r"maps: expected \(block, num_heads, block rows, tile dtype\)"):
            MapTable.from_maps([maps, make_maps(end_chunk=1, **other)], device)
    table = MapTable.from_maps([maps], device)
    with pytest.raises(ValueError, match="block: expected 64 or 128 on an accelerator, got 32"):
        MapTable.from_maps([make_maps(end_chunk=1, block=32)], device)
    with pytest.raises(ValueError, match=r"tile_dtype: expected e4m3, bf16 or None, got torch.float16"):
        dataclasses.replace(table, tile_dtype=FP16)
    with pytest.raises(ValueError, match="multiple of 16"):
        dataclasses.replace(table, arena=table.arena[8:])
    with pytest.raises(ValueError, match="sections: expected dtype"):
        dataclasses.replace(table, sections=table.sections.int())


def test_selection(make_batch: Callable[..., Any], make_maps: Callable[..., Any]) -> None:
    batch = make_batch((0, 130))
    table = MapTable.from_maps([make_maps(end_chunk=2)], batch.device)
    rows = batch.rows(64, chunk_blocks=2, spans=table.spans)
    head_map = torch.ones(4, 3, device=batch.device)
    floor = {"sink_blocks": 1, "local_blocks": 1}
    with pytest.raises(ValueError, match=r"head_map: expected shape \[Hr, 3\], got \[4, 2\]"):
        select_blocks(table, rows, head_map[:, :2], 0.5, **floor)
    with pytest.raises(ValueError, match=r"head_map: expected dtype torch.float32, got torch.bfloat16"):
        select_blocks(table, rows, head_map.bfloat16(), 0.5, **floor)
    with pytest.raises(ValueError, match="p: expected a finite number of at least 0, got -1"):
        select_blocks(table, rows, head_map, -1, **floor)
    with pytest.raises(ValueError, match="sink_blocks: expected at least 0, got -1"):
        select_blocks(table, rows, head_map, 0.5, sink_blocks=-1, local_blocks=0)
    with pytest.raises(ValueError, match=r"rows: expected \(block, device, segments\)"):
        select_blocks(table, batch.rows(128), head_map, 0.5, **floor)
    two = make_batch((0, 130), (0, 3))
    with pytest.raises(ValueError, match=r"rows: expected \(block, device, segments\)"):
        select_blocks(table, two.rows(64), head_map, 0.5, **floor)
    mass = torch.ones(3, 4, 2, device=batch.device)
    with pytest.raises(ValueError, match=r"mass: expected at least 3 contiguous columns, got \[3, 4, 2\]"):
        select_by_mass(mass, rows, 0.5)
    with pytest.raises(ValueError, match=r"mass: expected dtype torch.float32, got torch.float64"):
        select_by_mass(mass.double(), rows, 0.5)
    with pytest.raises(ValueError, match="contiguous"):
        select_by_mass(torch.ones(3, 4, 6, device=batch.device)[..., ::2], rows, 0.5)
    with pytest.raises(ValueError, match="num_heads: expected at least 1, got 0"):
        select_static(rows, 0, **floor)


def test_index(device: torch.device) -> None:
    columns = torch.zeros(2, 3, 4, dtype=torch.int32, device=device)
    counts = torch.ones(2, 3, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match=r"counts: expected shape \[2, 3\], got \[2, 2\]"):
        BlockIndex(columns=columns, counts=counts[:, :2])
    with pytest.raises(ValueError, match=r"columns: expected dtype torch.int32, got torch.int64"):
        BlockIndex(columns=columns.long(), counts=counts)


def bad_arguments(batch: Any) -> list[tuple[dict[str, Any], str]]:
    """Of every kernel over queries and keys."""
    query, kv = batch.query, batch.kv
    narrow = PagedKV(key_cache=kv.key_cache[..., :96], value_cache=kv.value_cache[..., :96])
    single = PagedKV(key_cache=kv.key_cache.float(), value_cache=kv.value_cache.float())
    keys_across = kv.key_cache.transpose(2, 3).contiguous().transpose(2, 3)
    padded = torch.zeros(*query.shape[:2], 136, dtype=query.dtype, device=query.device)
    return [
        ({"kv": narrow}, "head_dim: expected 64 or 128, got 96"),
        ({"kv": single}, "kv: expected dtype bfloat16 or float16, got torch.float32"),
        ({"query": query.float()}, "query: expected dtype torch.bfloat16, got torch.float32"),
        ({"query": query.half()}, "query: expected dtype torch.bfloat16, got torch.float16"),
        ({"query": query[:-1]}, r"query: expected shape \[136, Hr, 128\], got \[135, 4, 128\]"),
        ({"query": query[..., :64]}, r"query: expected shape \[136, Hr, 128\], got \[136, 4, 64\]"),
        ({"query": query[:, :3]}, "query heads: expected a multiple of the 2 KV heads, got 3"),
        ({"query": padded[..., :128]}, "query: expected contiguous heads"),
        ({"query": padded.flatten()[4 : 4 + query.numel()].view(query.shape)}, "multiples of 16 bytes"),
        (
            {"kv": PagedKV(key_cache=keys_across, value_cache=kv.value_cache)},
            "kv: expected the head_dim axis to be contiguous",
        ),
        *[({"scale": scale}, f"scale: expected a positive number, got {scale}") for scale in (0.0, -1.0, float("nan"))],
    ]


def test_guide(make_batch: Callable[..., Any]) -> None:
    batch = make_batch((0, 130), head_dim=128)
    rows = batch.rows(64)
    out, index = batch.poisoned(), batch.index(rows, batch.random_masks(64, 1.0))

    def attend(**change: Any) -> None:
        arguments = {"query": batch.query, "kv": batch.kv, "rows": rows, "index": index, "scale": 1.0, "out": out}
        guide_attention(**{**arguments, **change})

    for change, message in bad_arguments(batch):
        with pytest.raises(ValueError, match=message):
            attend(**change)
    with pytest.raises(ValueError, match=r"out: expected dtype torch.bfloat16, got torch.float32"):
        attend(out=out.float())
    with pytest.raises(ValueError, match=r"out: expected shape \[136, 4, 128\], got \[136, 2, 128\]"):
        attend(out=out[:, :2])
    with pytest.raises(ValueError, match="out: expected the head_dim axis to be contiguous"):
        attend(out=out.transpose(1, 2).contiguous().transpose(1, 2))
    with pytest.raises(ValueError, match=r"index: expected columns \[3, 4, 3\], got \[2, 4, 2\]"):
        attend(index=batch.index(batch.rows(128), batch.random_masks(128, 1.0)))
    assert bool(out.isnan().all())


def test_masses(make_batch: Callable[..., Any]) -> None:
    batch = make_batch((0, 130), head_dim=128)
    rows = batch.rows(64)
    mass, lse = torch.zeros(3, 4, 3, device=batch.device), torch.zeros(4, 136, device=batch.device)

    def measure(rows: Any = rows, row_stride: int = 1, group: int = 2, **change: Any) -> None:
        tasks = MassTasks.build(rows, group=group, row_stride=row_stride)
        arguments = {"query": batch.query, "kv": batch.kv, "tasks": tasks, "scale": 1.0, "mass": mass, "row_lse": lse}
        block_masses(**{**arguments, **change})

    for change, message in bad_arguments(batch):
        with pytest.raises(ValueError, match=message):
            measure(**change)
    for row_stride in (0, -1, 3, 128):
        with pytest.raises(ValueError, match=f"row_stride: expected a divisor of block 64, got {row_stride}"):
            measure(row_stride=row_stride)
    with pytest.raises(ValueError, match="tasks: expected ones built for 2 query heads a KV head, got 4"):
        measure(group=4)
    with pytest.raises(ValueError, match=r"mass: expected shape \[3, 4, C\], got \[2, 4, 3\]"):
        measure(mass=mass[:2])
    with pytest.raises(ValueError, match=r"mass: expected at least 3 contiguous columns, got \[3, 4, 2\]"):
        measure(mass=mass[..., :2])
    with pytest.raises(ValueError, match=r"mass: expected dtype torch.float32, got torch.bfloat16"):
        measure(mass=mass.bfloat16())
    with pytest.raises(ValueError, match=r"row_lse: expected shape \[4, 136\], got \[136, 4\]"):
        measure(row_lse=lse.T)
    with pytest.raises(ValueError, match=r"key_dtype: expected float8_e4m3fn or torch.bfloat16, got torch.float16"):
        measure(key_dtype=FP16)
    assert not mass.any() and not lse.any()


def test_tiles(make_batch: Callable[..., Any]) -> None:
    batch = make_batch((0, 130), head_dim=128)
    whole = dataclasses.replace(batch, segments=[dataclasses.replace(batch.segments[0], row_end=128)])
    rows = whole.rows(64)
    index, lse = whole.index(rows, whole.random_masks(64, 1.0)), torch.zeros(4, 136, device=batch.device)
    arena = torch.zeros(64, dtype=torch.uint8, device=batch.device)
    offsets = torch.full((2, 4), -1, dtype=torch.int64, device=batch.device)
    arguments: dict[str, Any] = {"query": batch.query, "kv": batch.kv, "rows": rows, "index": index, "row_lse": lse}
    arguments |= {"scale": 1.0, "tile_dtype": E4M3, "arena": arena, "offsets": offsets}
    for change, message in bad_arguments(batch):
        with pytest.raises(ValueError, match=message):
            store_tiles(**{**arguments, **change})
    cut = batch.rows(64)
    changes: list[tuple[dict[str, Any], str]] = [
        ({"tile_dtype": FP16}, "tile dtype: expected torch.float8_e4m3fn or torch.bfloat16, got torch.float16"),
        ({"arena": arena.float()}, "arena: expected dtype torch.uint8, got torch.float32"),
        ({"offsets": offsets[:1]}, r"offsets: expected shape \[2, 4\], got \[1, 4\]"),
        ({"offsets": offsets.int()}, "offsets: expected dtype torch.int64, got torch.int32"),
        ({"row_lse": lse[:, :5]}, r"row_lse: expected shape \[4, 136\], got \[4, 5\]"),
        (
            {"rows": cut, "index": batch.index(cut, batch.random_masks(64, 1.0))},
            r"segments: expected whole blocks of 64 rows, got rows \[0, 130\)",
        ),
    ]
    for change, message in changes:
        with pytest.raises(ValueError, match=message):
            store_tiles(**{**arguments, **change})
    store_tiles(**arguments)
    assert not arena.any()  # nothing was wanted


@pytest.mark.parametrize("dense", [False, True])
def test_translate(make_batch: Callable[..., Any], make_maps: Callable[..., Any], dense: bool) -> None:
    batch = make_batch((0, 130))
    table = MapTable.from_maps([make_maps(end_chunk=2)], batch.device)
    rows, out = batch.rows(64, chunk_blocks=2, spans=table.spans), batch.poisoned()
    weight = torch.ones(4, 3, device=batch.device)
    index = torch.zeros(4, 3, dtype=torch.int32, device=batch.device)
    heads: dict[str, Any] = {"head_map": weight} if dense else {"head_index": index, "head_weight": weight}

    def translate(**change: Any) -> None:
        arguments = {"kv": batch.kv, "rows": rows, "maps": table, "out": out, **heads, **change}
        (translate_all_heads if dense else translate_attention)(**arguments)

    kv = batch.kv
    narrow = PagedKV(key_cache=kv.key_cache[..., :32], value_cache=kv.value_cache[..., :32])
    bf16_tiles = MapTable.from_maps([make_maps(end_chunk=2, tile_dtype=BF16)], batch.device)
    changes: list[tuple[dict[str, Any], str]] = [
        ({"kv": narrow}, "head_dim: expected 64 or 128, got 32"),
        ({"out": out.float()}, "out: expected dtype torch.bfloat16 or torch.float16, got torch.float32"),
        ({"out": out[:5]}, r"out: expected shape \[136, Hr, 64\], got \[5, 4, 64\]"),
        ({"out": out[:, :3]}, "multiple of the 2 KV heads, got 3"),
        ({"out": out.transpose(1, 2).contiguous().transpose(1, 2)}, "out: expected the head_dim axis"),
        ({"rows": batch.rows(128)}, r"rows: expected \(block, device, segments\)"),
        (
            {"maps": MapTable.from_maps([make_maps(end_chunk=2, tile_dtype=None)], batch.device)},
            "maps: expected tiles, got masses only",
        ),
        ({"value_dtype": FP16}, "value_dtype: expected torch.bfloat16 or float8_e4m3fn, got torch.float16"),
        (
            {"maps": bf16_tiles, "value_dtype": E4M3},
            "value_dtype: expected torch.bfloat16 with bf16 tiles, got torch.float8_e4m3fn",
        ),
    ]
    if dense:
        changes += [
            ({"head_map": weight[:, :2]}, r"head_map: expected shape \[4, 3\], got \[4, 2\]"),
            ({"head_map": weight.bfloat16()}, "head_map: expected dtype torch.float32, got torch.bfloat16"),
        ]
    else:
        changes += [
            ({"head_index": index[:2]}, r"head_index: expected shape \[4, k\], got \[2, 3\]"),
            ({"head_index": index.long()}, "head_index: expected dtype torch.int32, got torch.int64"),
            ({"head_weight": weight[:, :1]}, r"head_weight: expected shape \[4, 3\], got \[4, 1\]"),
            ({"head_weight": weight.half()}, "head_weight: expected dtype torch.float32, got torch.float16"),
        ]
    for change, message in changes:
        with pytest.raises(ValueError, match=message):
            translate(**change)
    assert bool(out.isnan().all())
