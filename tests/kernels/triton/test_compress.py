"""The compressor's two passes against dense float64 probabilities and `compress_reference.py`."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from mapflow.kernels.compress import block_masses
from mapflow.kernels.compress_reference import compress_rows
from mapflow.kernels.mass_tasks import MassTasks
from mapflow.kernels.row_segment import RowSegment
from mapflow.kernels.select import select_by_mass
from mapflow.kernels.tiles import store_tiles

E4M3, BF16, FP16 = torch.float8_e4m3fn, torch.bfloat16, torch.float16
BOUND = {E4M3: 1.5e-2, None: 2e-4}  # of squares, so twice that of masses
ON_GPU = torch.cuda.is_available()
UNTOUCHED = -7.0


def exact(batch: Any, block: int, row_stride: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 sums of squared shares [mass rows, heads, C] and log-sum-exp [heads, N], NaN where not measured."""
    num_heads, num_columns = batch.query.shape[1], max(-(-one.row_end // block) for one in batch.segments)
    masses, lse = [], torch.full((num_heads, batch.num_rows), torch.nan, dtype=torch.float64)
    for one, segment in zip(batch.requests, batch.segments):
        rows = torch.arange(segment.row_begin, segment.row_end)
        measured = rows % row_stride == row_stride - 1
        p = one.probabilities() * measured[:, None]
        by_column = torch.zeros(num_heads, segment.num_rows, num_columns * block, dtype=torch.float64)
        by_column[..., : p.shape[2]] = p
        by_column = by_column.view(num_heads, segment.num_rows, num_columns, block).sum(-1).square()
        for block_row in segment.block_rows(block):
            begin, end = segment.rows_within(block_row, block)
            masses.append(by_column[:, begin - segment.row_begin : end - segment.row_begin].sum(1))
        keys = one.key.double().repeat_interleave(num_heads // one.key.shape[1], 1)
        scores = torch.einsum("thd,lhd->htl", one.query.double(), keys) * one.scale
        scores.masked_fill_(torch.arange(segment.row_end) > rows[:, None], -torch.inf)
        own = scores.logsumexp(-1) / math.log(2)
        lse[:, segment.batch_rows] = own.masked_fill(~measured, torch.nan)
    return torch.stack(masses), lse


def empty(batch: Any, rows: Any, num_mass_rows: int, extra_columns: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    num_heads = batch.query.shape[1]
    mass = torch.zeros(num_mass_rows, num_heads, rows.num_columns + extra_columns, device=batch.device)
    return mass, torch.full((num_heads, batch.num_rows), UNTOUCHED, device=batch.device)


def check_masses(
    batch: Any, block: int, error_of: Callable[..., float], *, row_stride: int = 1, key_dtype: Any = E4M3
) -> None:
    rows = batch.rows(block)
    wanted, wanted_lse = exact(batch, block, row_stride)
    mass, lse = empty(batch, rows, wanted.shape[0], extra_columns=3)
    tasks = MassTasks.build(rows, group=batch.group, row_stride=row_stride)
    block_masses(batch.query, batch.kv, tasks, scale=batch.scale, mass=mass, row_lse=lse, key_dtype=key_dtype)
    bound = BOUND[None if key_dtype != E4M3 else E4M3] * math.sqrt(row_stride)  # fewer rows to average the rounding
    assert not mass[..., rows.num_columns :].any()
    got = mass[..., : rows.num_columns].cpu()
    assert error_of(got, wanted) < bound
    assert not got[wanted == 0].any()  # above the diagonal
    assert bool((got.sum(-1) < tasks.measured[:, None] + 1e-2).all()), "squares of shares that sum to 1"
    measured = wanted_lse.isfinite()
    assert bool((lse.cpu()[~measured] == UNTOUCHED).all())
    got_lse, own_lse = lse.cpu()[measured].double(), wanted_lse[measured]
    assert float((got_lse - own_lse).norm() / math.sqrt(own_lse.numel())) < (0.1 if key_dtype == E4M3 else 1e-3)


@pytest.mark.parametrize(
    ("group", "kv_heads", "block", "head_dim", "dtype", "layout", "page_size"),
    [
        (1, 2, 64, 64, BF16, "plain", 16),
        (2, 1, 128, 128, FP16, "joined", 16),
        (3, 1, 64, 128, BF16, "joined", 32),
        (4, 1, 128, 64, BF16, "tokens first", 128),
        (8, 1, 64, 64, FP16, "plain", 32),
    ],
)
@pytest.mark.parametrize("key_dtype", [E4M3, None])
def test_masses_are_sums_of_squared_shares(
    make_batch: Callable[..., Any],
    error_of: Callable[..., float],
    group: int,
    kv_heads: int,
    block: int,
    head_dim: int,
    dtype: torch.dtype,
    layout: str,
    page_size: int,
    key_dtype: torch.dtype | None,
) -> None:
    """Three requests cut inside blocks; values are never read (NaN)."""
    spans = ((block - 21, 3 * block + 5), (0, 17), (block, 2 * block))
    size: dict[str, Any] = {"group": group, "kv_heads": kv_heads, "head_dim": head_dim, "page_size": page_size}
    batch = make_batch(*spans, dtype=dtype, layout=layout, edit=lambda one: one.value.fill_(torch.nan), **size)
    check_masses(batch, block, error_of, key_dtype=key_dtype)


@pytest.mark.parametrize(("row_stride", "group", "block"), [(4, 1, 64), (8, 1, 64), (8, 3, 128), (64, 2, 64)])
def test_a_row_stride_measures_the_last_of_each_run(
    make_batch: Callable[..., Any], error_of: Callable[..., float], row_stride: int, group: int, block: int
) -> None:
    batch = make_batch((block - 21, 3 * block + 5), (0, 70), group=group, kv_heads=1)
    check_masses(batch, block, error_of, row_stride=row_stride, key_dtype=None)


@pytest.mark.parametrize("key_dtype", [None, E4M3], ids=["exact", "e4m3"])
@pytest.mark.parametrize(("row_stride", "group"), [(1, 3), (4, 1), (8, 4)])
def test_log_sum_exps_that_are_known(
    make_batch: Callable[..., Any], error_of: Callable[..., float], row_stride: int, group: int, key_dtype: Any
) -> None:
    """They are read where rows are measured, and left as they were."""
    batch = make_batch((43, 64 * 35 + 5), (0, 70), group=group, kv_heads=2)
    rows = batch.rows(64)
    wanted, wanted_lse = exact(batch, 64, row_stride)
    mass, _ = empty(batch, rows, wanted.shape[0])
    tasks = MassTasks.build(rows, group=group, row_stride=row_stride)
    known = wanted_lse.float().to(batch.device)
    options = {"scale": batch.scale, "mass": mass, "key_dtype": key_dtype}
    block_masses(batch.query, batch.kv, tasks, **options, row_lse=known, is_lse_known=True)
    got, bound = mass.cpu(), BOUND[key_dtype] * math.sqrt(row_stride)
    assert not got[wanted == 0].any()
    assert error_of(got, wanted) < (bound if key_dtype is None else 5 * bound), "rounded keys shift whole rows"
    sums, wanted_sums = (one.sum(-1, keepdim=True).clamp_min(1e-9) for one in (got, wanted))
    assert error_of(got / sums * wanted_sums, wanted) < 2.5 * bound, "what they are to each other hardly changes"
    assert torch.equal(known.cpu().nan_to_num(), wanted_lse.float().nan_to_num())


def test_more_than_one_round_of_columns(make_batch: Callable[..., Any], error_of: Callable[..., float]) -> None:
    """40 block columns: the notes are read 32 at a time."""
    batch = make_batch((64 * 39 - 5, 64 * 40 - 3), group=2, kv_heads=1, page_size=128)
    check_masses(batch, 64, error_of, key_dtype=None)


def test_queries_and_keys_of_zeros(make_batch: Callable[..., Any], error_of: Callable[..., float]) -> None:
    """e4m3 has no scale to find: every token weighs the same."""

    def clear(one: Any) -> None:
        one.query.zero_()
        one.key.zero_()

    check_masses(make_batch((0, 130), edit=clear), 64, error_of, key_dtype=E4M3)


@pytest.mark.parametrize("row_stride", [1, 4, 8])
def test_chunked_prefill_adds_up(
    make_batch: Callable[..., Any], error_of: Callable[..., float], row_stride: int
) -> None:
    """Calls cut at odd rows give what one call gives; each adds into the block rows that it touches."""
    batch = make_batch((0, 250), group=3, kv_heads=1)
    rows, (segment,) = batch.rows(64), batch.segments
    options = {"scale": batch.scale, "key_dtype": None}
    wanted, wanted_lse = empty(batch, rows, 4)
    whole = MassTasks.build(rows, group=3, row_stride=row_stride)
    block_masses(batch.query, batch.kv, whole, mass=wanted, row_lse=wanted_lse, **options)
    mass, lse = empty(batch, rows, 4)
    counts = torch.zeros(4, dtype=torch.int32)
    for begin, end in ((0, 1), (1, 63), (63, 131), (131, 250)):
        cut = RowSegment(
            row_begin=begin, row_end=end, out_begin=segment.out_begin + begin, block_table=segment.block_table
        )
        part_rows, touched = dataclasses.replace(batch, segments=[cut]).rows(64), cut.block_rows(64)
        own = mass[touched.start : touched.stop]
        part = MassTasks.build(part_rows, group=3, row_stride=row_stride)
        block_masses(batch.query, batch.kv, part, mass=own, row_lse=lse, **options)
        counts[touched.start : touched.stop] += part.measured
    assert torch.equal(counts, whole.measured)
    assert counts.tolist() == [64 // row_stride] * 3 + [(250 - 192) // row_stride]
    assert error_of(mass, wanted) < 1e-5
    torch.testing.assert_close(lse, wanted_lse, rtol=0, atol=1e-4)


def exact_tiles(batch: Any, block: int) -> Iterator[tuple[int, int, Any]]:
    """(request, block row, float64 probabilities [heads, C, block, block]) of every block row."""
    for request, (one, segment) in enumerate(zip(batch.requests, batch.segments)):
        p = one.probabilities()
        blocks = p.view(p.shape[0], -1, block, p.shape[2] // block, block).transpose(2, 3)
        for place, block_row in enumerate(segment.block_rows(block)):
            yield request, block_row, blocks[:, place]


def check_tiles(batch: Any, block: int, tile_dtype: torch.dtype, density: float, seed: int = 0) -> None:
    """Every kept tile within one step of the exact one rounded; nothing else of the arena is touched."""
    rows, masks = batch.rows(block), batch.random_masks(block, density, seed)
    index = batch.index(rows, masks)
    _, lse = exact(batch, block)
    item = 1 if tile_dtype == E4M3 else 2
    sizes = index.counts.cpu().long() * block * block * item
    wanted_here = torch.rand(sizes.shape, generator=torch.Generator().manual_seed(seed)) < 0.8
    wanted_here[0, 0], wanted_here[-1, -1] = False, True
    sizes = sizes * wanted_here
    offsets = (sizes.flatten().cumsum(0).view_as(sizes) - sizes + 64).masked_fill(~wanted_here, -1)
    arena = torch.full((int(sizes.sum()) + 128,), 0xA5, dtype=torch.uint8, device=batch.device)
    store_tiles(
        batch.query,
        batch.kv,
        rows,
        index,
        lse.float().to(batch.device),
        scale=batch.scale,
        tile_dtype=tile_dtype,
        arena=arena,
        offsets=offsets.to(batch.device),
    )
    host = arena.cpu()
    assert bool((host[:64] == 0xA5).all()) and bool((host[-64:] == 0xA5).all())
    line_of = {(request, row): line for line, (request, row) in enumerate(rows.lines[:, :2].tolist())}
    for request, block_row, blocks in exact_tiles(batch, block):
        line = line_of[request, block_row]
        for head in range(blocks.shape[0]):
            if not wanted_here[line, head]:
                continue
            start, size = int(offsets[line, head]), int(sizes[line, head])
            columns = index.columns[line, head, : int(index.counts[line, head])].long().cpu()
            stored = host[start : start + size].view(torch.uint8 if item == 1 else torch.int16)
            rounded = (blocks[head, columns] * (256 if item == 1 else 1)).float().to(tile_dtype)
            steps = stored.int() - rounded.view(stored.dtype).reshape(-1).int()
            assert int(steps.abs().max()) <= 1
            assert float((steps != 0).float().mean()) < 0.02


@pytest.mark.parametrize(
    ("group", "kv_heads", "block", "head_dim", "dtype", "tile_dtype", "layout"),
    [
        (1, 2, 64, 64, BF16, E4M3, "plain"),
        (2, 1, 128, 128, BF16, E4M3, "joined"),
        (3, 1, 64, 128, FP16, BF16, "joined"),
        (4, 1, 128, 64, FP16, E4M3, "plain"),
        (8, 1, 64, 64, BF16, BF16, "tokens first"),
    ],
)
def test_tiles_are_probabilities(
    make_batch: Callable[..., Any],
    group: int,
    kv_heads: int,
    block: int,
    head_dim: int,
    dtype: torch.dtype,
    tile_dtype: torch.dtype,
    layout: str,
) -> None:
    size: dict[str, Any] = {"group": group, "kv_heads": kv_heads, "head_dim": head_dim, "sharpness": 4.0}
    spans = ((block, 3 * block), (0, block))
    batch = make_batch(*spans, dtype=dtype, layout=layout, edit=lambda one: one.value.fill_(torch.nan), **size)
    check_tiles(batch, block, tile_dtype, 0.6)


@pytest.mark.parametrize(("block", "tile_dtype"), [(64, E4M3), (128, E4M3), (64, BF16)])
def test_both_passes_are_the_reference(
    make_batch: Callable[..., Any], error_of: Callable[..., float], block: int, tile_dtype: torch.dtype
) -> None:
    """Masses, the selection from them, and the tiles: as `compress_rows`, whose tiles lie in the same order."""
    batch = make_batch((block, 4 * block), group=2, kv_heads=1, sharpness=4.0, page_size=32)
    rows, (one,) = batch.rows(block), batch.requests
    mass, lse = empty(batch, rows, 3)
    tasks = MassTasks.build(rows, group=2)
    block_masses(batch.query, batch.kv, tasks, scale=batch.scale, mass=mass, row_lse=lse, key_dtype=None)
    index = select_by_mass(mass, rows, 0.6)
    wanted = compress_rows(
        one.query, one.key, first_row=block, block=block, scale=one.scale, top_p=0.6, tile_dtype=tile_dtype
    )
    assert error_of((mass.transpose(0, 1) / block).sqrt(), wanted.mass) < BOUND[None]
    tiles = wanted.tiles
    assert tiles is not None
    (mask,) = batch.masks(rows, index)
    assert torch.equal(mask.sum(-1).int(), tiles.indptr.diff(dim=1))
    assert torch.equal(mask.nonzero()[:, 2].int(), tiles.indices)
    item = tiles.values.element_size()
    block_rows = (rows.lines[:, 1].long() - 1).cpu()
    offsets = (tiles.indptr[:, :-1].T[block_rows].long() * block * block * item).contiguous().to(batch.device)
    arena = torch.full((tiles.values.numel() * item,), 0xA5, dtype=torch.uint8, device=batch.device)
    options = {"scale": batch.scale, "tile_dtype": tile_dtype, "arena": arena, "offsets": offsets}
    store_tiles(batch.query, batch.kv, rows, index, lse, **options)
    bits = torch.uint8 if item == 1 else torch.int16
    steps = arena.cpu().view(bits).int() - tiles.values.view(bits).reshape(-1).int()
    assert int(steps.abs().max()) <= 1
    assert float((steps != 0).float().mean()) < 0.02


@pytest.mark.parametrize("seed", range(16 if ON_GPU else 2))
def test_random_shapes(
    make_batch: Callable[..., Any], random_shape: Callable[[int], Any], error_of: Callable[..., float], seed: int
) -> None:
    shape = random_shape(seed + 3000)
    batch = make_batch(*shape.spans, **shape.options)
    check_masses(batch, shape.block, error_of, row_stride=(1, 1, 4, 8)[seed % 4], key_dtype=(None, E4M3)[seed % 2])
    whole = [(b // shape.block * shape.block, -(-e // shape.block) * shape.block) for b, e in shape.spans]
    batch = make_batch(*whole, **shape.options)
    check_tiles(batch, shape.block, (E4M3, BF16)[seed % 2], shape.density, seed)


@pytest.mark.gpu
def test_an_arena_beyond_two_to_the_31(make_batch: Callable[..., Any]) -> None:
    if torch.cuda.mem_get_info()[0] < 6 << 30:
        pytest.skip("needs 6 GB of free GPU memory")
    for block in (64, 128):
        batch = make_batch((0, block), group=1, kv_heads=1)
        rows, masks = batch.rows(block), batch.random_masks(block, 1.0)
        _, lse = exact(batch, block)
        stored = []
        for padding in (0, 2**31 + 192):
            arena = torch.zeros(padding + block * block, dtype=torch.uint8, device=batch.device)
            offsets = torch.full((1, 1), padding, dtype=torch.int64, device=batch.device)
            options = {"scale": batch.scale, "tile_dtype": E4M3, "arena": arena, "offsets": offsets}
            index, row_lse = batch.index(rows, masks), lse.float().to(batch.device)
            store_tiles(batch.query, batch.kv, rows, index, row_lse, **options)
            stored.append(arena[padding:])
        assert bool(stored[0].any()) and torch.equal(stored[0], stored[1])
