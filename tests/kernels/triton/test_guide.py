"""Guide against dense float64 attention under the same block mask."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from mapflow.kernels.guide import guide_attention
from mapflow.kernels.paged import PagedKV
from mapflow.kernels.row_segment import RowSegment
from mapflow.kernels.select import select_static

BF16, FP16 = torch.bfloat16, torch.float16
BOUND = {BF16: 1e-2, FP16: 2e-3}
ON_GPU = torch.cuda.is_available()


def attend(batch: Any, rows: Any, index: Any) -> torch.Tensor:
    out: torch.Tensor = batch.poisoned()
    guide_attention(batch.query, batch.kv, rows, index, scale=batch.scale, out=out)
    return out


@pytest.mark.parametrize(
    ("group", "kv_heads", "block", "head_dim", "dtype", "page_size", "layout"),
    [
        (1, 2, 64, 64, BF16, 16, "plain"),
        (2, 1, 128, 128, BF16, 16, "joined"),
        (3, 1, 64, 128, FP16, 32, "tokens first"),
        (4, 1, 128, 64, FP16, 128, "joined"),
        (8, 1, 64, 64, BF16, 128, "plain"),
        (3, 2, 128, 128, BF16, 32, "joined"),
    ],
)
def test_guide_is_masked_attention(
    make_batch: Callable[..., Any],
    group: int,
    kv_heads: int,
    block: int,
    head_dim: int,
    dtype: torch.dtype,
    page_size: int,
    layout: str,
) -> None:
    """Two requests, the first cut at both ends, the second shorter than a block."""
    spans = ((block - 27, 3 * block + 5), (0, 19))
    size: dict[str, Any] = {"group": group, "kv_heads": kv_heads, "head_dim": head_dim}
    batch = make_batch(*spans, dtype=dtype, page_size=page_size, layout=layout, **size)
    rows, masks = batch.rows(block), batch.random_masks(block, 0.5)
    out = attend(batch, rows, batch.index(rows, masks))
    batch.check(out, batch.attention(masks, block), BOUND[dtype])


@pytest.mark.parametrize("block", [64, 128])
def test_a_selected_index_will_do(make_batch: Callable[..., Any], block: int) -> None:
    batch = make_batch((10, 4 * block - 3), group=2, kv_heads=1)
    rows = batch.rows(block)
    index = select_static(rows, 2, sink_blocks=1, local_blocks=2)
    masks = batch.masks(rows, index)
    assert not masks[0].all(0)[-1, 1]
    batch.check(attend(batch, rows, index), batch.attention(masks, block), BOUND[BF16])


def test_rows_cut_anywhere_give_the_same_rows(make_batch: Callable[..., Any]) -> None:
    """Chunked prefill: bit for bit, as no row depends on what else is in the batch."""
    batch = make_batch((0, 200), group=2, kv_heads=1)
    rows, mask = batch.rows(64), batch.random_masks(64, 0.5)[0]
    wanted = attend(batch, rows, batch.index(rows, [mask]))
    out, (segment,) = batch.poisoned(), batch.segments
    for begin, end in ((0, 1), (1, 63), (63, 130), (130, 200)):
        cut = RowSegment(
            row_begin=begin, row_end=end, out_begin=segment.out_begin + begin, block_table=segment.block_table
        )
        part = dataclasses.replace(batch, segments=[cut])
        touched = cut.block_rows(64)
        part_rows, part_mask = part.rows(64), mask[:, touched.start : touched.stop, : touched.stop]
        index = part.index(part_rows, [part_mask])
        guide_attention(batch.query, batch.kv, part_rows, index, scale=batch.scale, out=out)
    assert torch.equal(out.nan_to_num(7.5), wanted.nan_to_num(7.5))


@pytest.mark.parametrize("block", [64, 128])
def test_nan_in_dropped_blocks_does_not_leak(make_batch: Callable[..., Any], block: int) -> None:
    """Columns 0 and 2 belong to nobody; stale pages and later tokens are NaN anyway."""

    def poison(one: Any) -> None:
        for column in (0, 2):
            for tokens in (one.key, one.value):
                tokens[column * block : (column + 1) * block] = torch.nan

    spans, size = [(4 * block + 9, 5 * block - 30)], {"group": 3, "kv_heads": 1}
    clean, poisoned = make_batch(*spans, **size), make_batch(*spans, edit=poison, **size)
    masks = clean.random_masks(block, 0.7)
    masks[0][..., [0, 2]] = False
    masks[0][..., 1] = True
    rows = clean.rows(block)
    wanted = attend(clean, rows, clean.index(rows, masks))
    rows = poisoned.rows(block)
    out = attend(poisoned, rows, poisoned.index(rows, masks))
    clean.check(out, clean.attention(masks, block), BOUND[BF16])
    assert torch.equal(out.nan_to_num(7.5), wanted.nan_to_num(7.5))


def test_strides_of_query_and_out(make_batch: Callable[..., Any]) -> None:
    """Query as a slice of a fused projection, out with a stride of its own."""
    batch = make_batch((3, 100), group=2, kv_heads=1)
    fused = torch.full((batch.num_rows, 6, 64), torch.nan, dtype=BF16, device=batch.device)
    fused[:, 2:4] = batch.query
    wide = torch.full((batch.num_rows, 3, 64), torch.nan, dtype=BF16, device=batch.device)
    rows, masks = batch.rows(64), batch.random_masks(64, 1.0)
    index = batch.index(rows, masks)
    guide_attention(fused[:, 2:4], batch.kv, rows, index, scale=batch.scale, out=wide[:, 1:])
    batch.check(wide[:, 1:], batch.attention(masks, 64), BOUND[BF16])
    assert bool(wide[:, 0].isnan().all())


def test_large_scores_stay_finite(make_batch: Callable[..., Any]) -> None:
    batch = make_batch((0, 130), group=1, kv_heads=1, dtype=FP16, sharpness=50.0)
    rows, masks = batch.rows(64), batch.random_masks(64, 1.0)
    batch.check(attend(batch, rows, batch.index(rows, masks)), batch.attention(masks, 64), BOUND[FP16])


@pytest.mark.parametrize("seed", range(16 if ON_GPU else 2))
def test_random_shapes(make_batch: Callable[..., Any], random_shape: Callable[[int], Any], seed: int) -> None:
    shape = random_shape(seed)
    batch = make_batch(*shape.spans, **shape.options)
    rows, masks = batch.rows(shape.block), batch.random_masks(shape.block, shape.density, seed)
    out = attend(batch, rows, batch.index(rows, masks))
    batch.check(out, batch.attention(masks, shape.block), BOUND[shape.options["dtype"]])


@pytest.mark.gpu
def test_pages_beyond_two_to_the_31(make_batch: Callable[..., Any]) -> None:
    """The last pages of a cache of 2**31 elements."""
    if torch.cuda.mem_get_info()[0] < 6 << 30:
        pytest.skip("needs 6 GB of free GPU memory")
    batch = make_batch((5, 200), group=2, kv_heads=1)
    pages, _, page_size, head_dim = batch.kv.key_cache.shape
    skipped = 2**31 // (2 * page_size * head_dim)  # K and V of a page side by side
    large = torch.empty(skipped + pages, 2, 1, page_size, head_dim, dtype=BF16, device=batch.device)
    large[skipped:, 0], large[skipped:, 1] = batch.kv.key_cache, batch.kv.value_cache
    (segment,) = batch.segments
    moved = dataclasses.replace(
        batch,
        kv=PagedKV(key_cache=large[:, 0], value_cache=large[:, 1]),
        segments=[dataclasses.replace(segment, block_table=segment.block_table + skipped)],
    )
    rows, masks = moved.rows(64), moved.random_masks(64, 0.5)
    moved.check(attend(moved, rows, moved.index(rows, masks)), moved.attention(masks, 64), BOUND[BF16])
