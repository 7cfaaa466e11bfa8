"""Translate against `translate_reference.py`, head by head and with every sender head."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from mapflow.kernels import translate_dense, translate_reference
from mapflow.kernels.map_table import MapTable
from mapflow.kernels.select import select_blocks
from mapflow.kernels.translate import translate_attention
from mapflow.kernels.translate_dense import translate_all_heads

E4M3, BF16, FP16 = torch.float8_e4m3fn, torch.bfloat16, torch.float16
BOUND = {E4M3: 5e-2, BF16: 1e-2, FP16: 2e-3}
ON_GPU = torch.cuda.is_available()


def reference(batch: Any, maps: Any, head_index: torch.Tensor, head_weight: torch.Tensor) -> list[torch.Tensor]:
    out = torch.full(batch.query.shape, torch.nan)
    options = {"head_index": head_index, "head_weight": head_weight, "out": out}
    translate_reference.translate_attention(batch.host_kv, batch.host_segments, maps, **options)
    return [out[segment.batch_rows] for segment in batch.host_segments]


def sparse_weights(heads: int, k: int, sender_heads: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Some weights 0, of either sign, heads named twice."""
    generator = torch.Generator().manual_seed(seed)
    index = torch.randint(0, sender_heads, (heads, k), generator=generator, dtype=torch.int32)
    weight = torch.randn(heads, k, generator=generator)
    weight[0, 0] = 0.0
    return index, weight


def translate(batch: Any, table: MapTable, index: torch.Tensor, weight: torch.Tensor, **more: Any) -> torch.Tensor:
    rows = batch.rows(table.block, chunk_blocks=table.chunk_blocks, spans=table.spans)
    out: torch.Tensor = batch.poisoned()
    heads = {"head_index": index.to(batch.device), "head_weight": weight.to(batch.device)}
    translate_attention(batch.kv, rows, table, out=out, **heads, **more)
    return out


def translate_dense_map(batch: Any, table: MapTable, head_map: torch.Tensor, **more: Any) -> torch.Tensor:
    rows = batch.rows(table.block, chunk_blocks=table.chunk_blocks, spans=table.spans)
    out: torch.Tensor = batch.poisoned()
    translate_all_heads(batch.kv, rows, table, head_map=head_map.to(batch.device), out=out, **more)
    return out


def every_head(head_map: torch.Tensor) -> torch.Tensor:
    return torch.arange(head_map.shape[1], dtype=torch.int32).expand(head_map.shape[0], -1).contiguous()


PRECISIONS: list[tuple[Any, ...]] = [
    (E4M3, None, BF16, E4M3),
    (E4M3, BF16, BF16, BF16),
    (E4M3, FP16, FP16, FP16),
    (BF16, None, BF16, BF16),
]


@pytest.mark.parametrize(
    ("precision", "group", "kv_heads", "block", "head_dim", "k", "layout"),
    [
        (0, 1, 2, 64, 64, 2, "plain"),
        (0, 2, 1, 128, 128, 1, "joined"),
        (0, 3, 1, 64, 128, 4, "joined"),
        (0, 8, 1, 64, 64, 2, "tokens first"),
        (1, 3, 1, 64, 64, 3, "joined"),
        (1, 2, 1, 128, 64, 2, "plain"),
        (2, 4, 1, 64, 128, 2, "plain"),
        (2, 1, 1, 128, 64, 2, "joined"),
        (3, 4, 1, 128, 64, 2, "plain"),
        (3, 3, 2, 64, 128, 1, "tokens first"),
    ],
)
def test_translate_is_the_reference(
    make_batch: Callable[..., Any],
    make_maps: Callable[..., Any],
    precision: int,
    group: int,
    kv_heads: int,
    block: int,
    head_dim: int,
    k: int,
    layout: str,
) -> None:
    """The first request cut at both ends, the second within its chunk 1; keys are never read (NaN)."""
    tile_dtype, value_dtype, dtype, bound = PRECISIONS[precision]
    spans = ((block - 5, 3 * block + 9), (2 * block, 3 * block - 1))
    size: dict[str, Any] = {"group": group, "kv_heads": kv_heads, "head_dim": head_dim}
    batch = make_batch(*spans, layout=layout, dtype=dtype, edit=lambda one: one.key.fill_(torch.nan), **size)
    options: dict[str, Any] = {"block": block, "tile_dtype": tile_dtype}
    maps = [make_maps(end_chunk=2, **options), make_maps(end_chunk=2, first_chunk=1, seed=7, **options)]
    index, weight = sparse_weights(group * kv_heads, k, 3, seed=k)
    if k == 1:
        weight[0] = 0.5
    out = translate(batch, MapTable.from_maps(maps, batch.device), index, weight, value_dtype=value_dtype)
    batch.check(out, reference(batch, maps, index, weight), BOUND[bound])


@pytest.mark.parametrize(
    ("precision", "group", "kv_heads", "block", "head_dim"),
    [(0, 1, 3, 64, 64), (0, 3, 2, 64, 128), (1, 8, 1, 128, 64), (2, 4, 1, 64, 64), (3, 2, 2, 64, 64)],
)
def test_every_head_is_the_reference(
    make_batch: Callable[..., Any],
    make_maps: Callable[..., Any],
    precision: int,
    group: int,
    kv_heads: int,
    block: int,
    head_dim: int,
) -> None:
    """Products and weights are bf16, so fp16 is no more exact."""
    tile_dtype, value_dtype, dtype, bound = PRECISIONS[precision]
    spans = ((block - 9, 2 * block + 3), (0, 5))
    size: dict[str, Any] = {"group": group, "kv_heads": kv_heads, "head_dim": head_dim}
    batch = make_batch(*spans, dtype=dtype, edit=lambda one: one.key.fill_(torch.nan), **size)
    options: dict[str, Any] = {"block": block, "tile_dtype": tile_dtype}
    maps = [make_maps(end_chunk=2, **options), make_maps(end_chunk=1, seed=7, **options)]
    head_map = torch.randn(group * kv_heads, 3, generator=torch.Generator().manual_seed(2))
    out = translate_dense_map(batch, MapTable.from_maps(maps, batch.device), head_map, value_dtype=value_dtype)
    batch.check(out, reference(batch, maps, every_head(head_map), head_map), max(BOUND[bound], BOUND[BF16]))


def test_a_small_workspace_changes_nothing(
    make_batch: Callable[..., Any], make_maps: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """17 sender heads: padded to 32 in the combination."""
    batch = make_batch((60, 70), group=2, kv_heads=1)
    table = MapTable.from_maps([make_maps(end_chunk=2, heads=17)], batch.device)
    head_map = torch.randn(2, 17, generator=torch.Generator().manual_seed(2))
    wanted = translate_dense_map(batch, table, head_map)
    monkeypatch.setattr(translate_dense, "_WORKSPACE_BYTES", 1)
    assert torch.equal(translate_dense_map(batch, table, head_map).nan_to_num(7.5), wanted.nan_to_num(7.5))


@pytest.mark.parametrize("dense", [False, True])
def test_nan_in_blocks_without_a_tile_does_not_leak(
    make_batch: Callable[..., Any], make_maps: Callable[..., Any], dense: bool
) -> None:
    """p = 0 keeps the diagonal alone, so values of other blocks are not read."""

    def poison(one: Any) -> None:
        one.value[:128] = torch.nan

    maps = [make_maps(end_chunk=2, p=0.0)]
    index, weight = sparse_weights(2, 3, 3, seed=1)
    outs, wanted = [], []
    for edit in (None, poison):
        batch = make_batch((130, 256), group=2, kv_heads=1, edit=edit)
        table = MapTable.from_maps(maps, batch.device)
        if dense:
            out = translate_dense_map(batch, table, weight, value_dtype=BF16)
        else:
            out = translate(batch, table, index, weight, value_dtype=BF16)
        outs.append(out)
        wanted.append(reference(batch, maps, every_head(weight) if dense else index, weight))
    batch.check(outs[0], wanted[0], BOUND[BF16])
    assert torch.equal(outs[0].nan_to_num(7.5), outs[1].nan_to_num(7.5))


def test_weights_of_any_size(make_batch: Callable[..., Any], make_maps: Callable[..., Any]) -> None:
    """The accumulator is rescaled between lists: no overflow, and zero weights alone give 0."""
    batch = make_batch((0, 128), group=4, kv_heads=1)
    maps = [make_maps(end_chunk=1)]
    index = torch.tensor([[0, 1, 2]] * 4, dtype=torch.int32)
    weight = torch.tensor([[1e3, -1e-12, 0.5], [0.0, 0.0, 0.0], [0.0, 1e-30, 2.0], [-1.0, 1.0, 1.0]])
    out = translate(batch, MapTable.from_maps(maps, batch.device), index, weight)
    (wanted,) = reference(batch, maps, index, weight)
    (segment,) = batch.segments
    got = out[segment.batch_rows].double().cpu()
    assert not got[:, 1].any()
    for head in (0, 2, 3):
        assert float((got[:, head] - wanted[:, head]).norm() / wanted[:, head].norm()) < BOUND[E4M3]


def test_out_of_another_dtype_and_stride(make_batch: Callable[..., Any], make_maps: Callable[..., Any]) -> None:
    batch = make_batch((3, 120), group=2, kv_heads=1)
    maps = [make_maps(end_chunk=1)]
    table = MapTable.from_maps(maps, batch.device)
    rows = batch.rows(64, chunk_blocks=2, spans=table.spans)
    index, weight = sparse_weights(2, 2, 3, seed=5)
    wide = torch.full((batch.num_rows, 5, 64), torch.nan, dtype=FP16, device=batch.device)
    heads = {"head_index": index.to(batch.device), "head_weight": weight.to(batch.device)}
    translate_attention(batch.kv, rows, table, out=wide[:, 2:4], **heads)
    batch.check(wide[:, 2:4], reference(batch, maps, index, weight), BOUND[E4M3])
    head_map = weight.new_zeros(2, 3).scatter_add_(1, index.long(), weight).to(batch.device)
    wide[:, 2:4] = torch.nan
    translate_all_heads(batch.kv, rows, table, head_map=head_map, out=wide[:, 2:4])
    batch.check(wide[:, 2:4], reference(batch, maps, index, weight), BOUND[E4M3])
    assert bool(wide[:, [0, 1, 4]].isnan().all())


@pytest.mark.parametrize("seed", range(16 if ON_GPU else 2))
def test_random_shapes(
    make_batch: Callable[..., Any], make_maps: Callable[..., Any], random_shape: Callable[[int], Any], seed: int
) -> None:
    shape = random_shape(seed + 2000)
    batch = make_batch(*shape.spans, **shape.options)
    tile_dtype, chunk_blocks = (E4M3, E4M3, BF16)[seed % 3], 1 + seed % 3
    chunk = chunk_blocks * shape.block
    options: dict[str, Any] = {"block": shape.block, "chunk_blocks": chunk_blocks, "tile_dtype": tile_dtype}
    maps = [
        make_maps(
            end_chunk=-(-end // chunk), first_chunk=begin // chunk, seed=seed, p=0.3 + 0.6 * shape.density, **options
        )
        for begin, end in shape.spans
    ]
    table = MapTable.from_maps(maps, batch.device)
    index, weight = sparse_weights(batch.query.shape[1], 1 + seed % 4, 3, seed)
    weight[0, 0] = 1.0
    bound = BOUND[E4M3] if tile_dtype == E4M3 else BOUND[BF16]
    batch.check(translate(batch, table, index, weight), reference(batch, maps, index, weight), bound)
    dense = torch.zeros(index.shape[0], 3).scatter_add_(1, index.long(), weight)
    batch.check(translate_dense_map(batch, table, dense), reference(batch, maps, index, weight), bound)


@pytest.mark.gpu
def test_maps_beyond_two_to_the_31(make_batch: Callable[..., Any], make_maps: Callable[..., Any]) -> None:
    """The same blobs behind 2**31 bytes of padding: same selection, same output."""
    if torch.cuda.mem_get_info()[0] < 6 << 30:
        pytest.skip("needs 6 GB of free GPU memory")
    batch = make_batch((5, 256), group=2, kv_heads=1)
    near = MapTable.from_maps([make_maps(end_chunk=2)], batch.device)
    padding = 2**31 + 192
    arena = torch.full((padding + near.arena.shape[0],), 0xFF, dtype=torch.uint8, device=batch.device)
    arena[padding:] = near.arena
    far = dataclasses.replace(near, arena=arena, sections=near.sections + padding)
    index, weight = sparse_weights(2, 3, 3, seed=1)
    for function, heads in ((translate, (index, weight)), (translate_dense_map, (weight,))):
        out, wanted = function(batch, far, *heads), function(batch, near, *heads)
        assert torch.equal(out.nan_to_num(7.5), wanted.nan_to_num(7.5))
    rows = batch.rows(64, chunk_blocks=2, spans=near.spans)
    floor = {"sink_blocks": 0, "local_blocks": 0}
    masks = [
        batch.masks(rows, select_blocks(t, rows, weight.abs().to(batch.device), 0.5, **floor)) for t in (far, near)
    ]
    assert torch.equal(masks[0][0], masks[1][0])
