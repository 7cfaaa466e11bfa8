"""Guide against dense float64 attention under the same token mask."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mapflow.kernels.guide_reference import guide_attention
from mapflow.kernels.paged import PagedKV
from mapflow.kernels.row_segment import RowSegment

TOLERANCE = 2e-5  # float32 rounding on values of about 1; see test_full_density_is_torch_attention for the scale


def random_mask(heads: int, block_rows: range, density: float, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(heads, len(block_rows), block_rows.stop, generator=generator) < density
    for row, block_row in enumerate(block_rows):
        empty = ~mask[:, row, : block_row + 1].any(-1)
        mask[empty, row, int(torch.randint(block_row + 1, (1,), generator=generator))] = True
    return mask


def tokens_of(mask: torch.Tensor, segment: RowSegment, block: int) -> torch.Tensor:
    """Block mask [H, R, C] -> bool [H, rows of the segment, tokens up to its end]."""
    wide = mask.repeat_interleave(block, 1).repeat_interleave(block, 2)
    skip = segment.row_begin - segment.block_rows(block).start * block
    return wide[:, skip : skip + segment.num_rows, : segment.row_end]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    group=st.integers(1, 4),
    kv_heads=st.integers(1, 2),
    block=st.sampled_from([8, 16, 64]),
    page_size=st.sampled_from([4, 16, 32, 128]),
    layout=st.sampled_from(["plain", "transposed keys", "joined"]),
    row_begin=st.integers(0, 150),
    num_rows=st.integers(1, 100),
    density=st.sampled_from([0.0, 0.2, 0.5, 1.0]),
    seed=st.integers(0, 1000),
)
def test_guide_is_masked_attention(
    make_dense: Callable[..., Any],
    make_paged: Callable[..., Any],
    group: int,
    kv_heads: int,
    block: int,
    page_size: int,
    layout: str,
    row_begin: int,
    num_rows: int,
    density: float,
    seed: int,
) -> None:
    one = make_dense(rows=num_rows, first_row=row_begin, heads=group * kv_heads, kv_heads=kv_heads, seed=seed)
    kv, block_table = make_paged(one.key, one.value, page_size, layout=layout, seed=seed)
    segment = RowSegment(row_begin=row_begin, row_end=row_begin + num_rows, out_begin=0, block_table=block_table)
    mask = random_mask(group * kv_heads, segment.block_rows(block), density, seed)
    out = torch.full_like(one.query, torch.nan)
    guide_attention(one.query, kv, [segment], [mask], block=block, scale=one.scale, out=out)
    wanted = one.output(one.probabilities(tokens_of(mask, segment, block)))
    torch.testing.assert_close(out.double(), wanted, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("group", [1, 2, 3, 4])
def test_full_density_is_torch_attention(
    make_dense: Callable[..., Any], make_paged: Callable[..., Any], group: int
) -> None:
    one = make_dense(rows=300, first_row=0, heads=2 * group, kv_heads=2, head_dim=64, seed=group)
    kv, block_table = make_paged(one.key, one.value, 16)
    mask = torch.ones(2 * group, 5, 5, dtype=torch.bool)
    segment = RowSegment(row_begin=0, row_end=300, out_begin=0, block_table=block_table)
    out = torch.full_like(one.query, torch.nan)
    guide_attention(one.query, kv, [segment], [mask], block=64, scale=one.scale, out=out)
    query, key, value = (t.transpose(0, 1)[None] for t in (one.query, one.key, one.value))
    attend = torch.nn.functional.scaled_dot_product_attention
    exact = attend(query.double(), key.double(), value.double(), is_causal=True, enable_gqa=True)[0].transpose(0, 1)
    single = attend(query, key, value, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
    error, error_of_torch = (out - exact).abs().max(), (single - exact).abs().max()
    assert float(error) < TOLERANCE
    assert float(error) < 4 * float(error_of_torch)  # no worse than torch's own float32 attention, but for luck


def test_a_batch_of_segments_leaves_other_rows_alone(
    make_dense: Callable[..., Any], make_paged: Callable[..., Any]
) -> None:
    """Two requests and a hole: rows [5, 45) are request a's, [50, 81) are b's."""
    a = make_dense(rows=40, first_row=37, heads=6, kv_heads=3, seed=1)
    b = make_dense(rows=31, first_row=0, heads=6, kv_heads=3, seed=2)
    (kv_a, table_a), (kv_b, table_b) = (make_paged(one.key, one.value, 8, seed=3) for one in (a, b))
    kv = PagedKV(
        key_cache=torch.cat([kv_a.key_cache, kv_b.key_cache]),
        value_cache=torch.cat([kv_a.value_cache, kv_b.value_cache]),
    )
    segments = [
        RowSegment(row_begin=0, row_end=31, out_begin=50, block_table=table_b + kv_a.key_cache.shape[0]),
        RowSegment(row_begin=37, row_end=77, out_begin=5, block_table=table_a),
    ]
    masks = [random_mask(6, segment.block_rows(16), 0.4, 4) for segment in segments]
    query = torch.full((90, 6, 16), torch.nan)
    query[5:45], query[50:81] = a.query, b.query
    out = torch.full_like(query, 7.5)
    guide_attention(query, kv, segments, masks, block=16, scale=a.scale, out=out)
    for one, segment, mask in ((b, segments[0], masks[0]), (a, segments[1], masks[1])):
        wanted = one.output(one.probabilities(tokens_of(mask, segment, 16)))
        torch.testing.assert_close(out[segment.batch_rows].double(), wanted, rtol=0, atol=TOLERANCE)
    for untouched in (out[:5], out[45:50], out[81:]):
        assert bool((untouched == 7.5).all())


def test_rows_cut_anywhere_give_the_same_rows(make_dense: Callable[..., Any], make_paged: Callable[..., Any]) -> None:
    one = make_dense(rows=130, first_row=0, heads=4, kv_heads=2)
    kv, block_table = make_paged(one.key, one.value, 16)
    mask = random_mask(4, range(9), 0.3, 1)
    whole = RowSegment(row_begin=0, row_end=130, out_begin=0, block_table=block_table)
    wanted = torch.full_like(one.query, torch.nan)
    guide_attention(one.query, kv, [whole], [mask], block=16, scale=one.scale, out=wanted)
    out = torch.full_like(one.query, torch.nan)
    for begin, end in ((0, 1), (1, 15), (15, 16), (16, 44), (44, 96), (96, 130)):
        segment = RowSegment(row_begin=begin, row_end=end, out_begin=begin, block_table=block_table)
        rows = segment.block_rows(16)
        part = mask[:, rows.start : rows.stop]  # more columns than needed: the rest is ignored
        guide_attention(one.query, kv, [segment], [part], block=16, scale=one.scale, out=out)
    torch.testing.assert_close(out, wanted, rtol=0, atol=1e-5)


def test_nan_in_dropped_blocks_does_not_leak(make_dense: Callable[..., Any], make_paged: Callable[..., Any]) -> None:
    one = make_dense(rows=64, first_row=64, heads=6, kv_heads=2)
    mask = random_mask(6, range(8, 16), 0.5, 2)
    mask[:, :, [1, 3, 4]] = False
    mask[:, :, 0] = True
    segment = RowSegment(row_begin=64, row_end=128, out_begin=0, block_table=torch.arange(1))
    wanted = one.output(one.probabilities(tokens_of(mask, segment, 8)))
    for dropped in (1, 3, 4):
        one.key[8 * dropped : 8 * dropped + 8] = torch.nan
        one.value[8 * dropped : 8 * dropped + 8] = torch.nan
    kv, block_table = make_paged(one.key, one.value, 8)
    segment = RowSegment(row_begin=64, row_end=128, out_begin=0, block_table=block_table)
    out = torch.full_like(one.query, torch.nan)
    guide_attention(one.query, kv, [segment], [mask], block=8, scale=one.scale, out=out)
    torch.testing.assert_close(out.double(), wanted, rtol=0, atol=TOLERANCE)


def test_bf16_inputs_accumulate_in_float32(make_dense: Callable[..., Any], make_paged: Callable[..., Any]) -> None:
    """Given bf16 numbers the float32 result is as exact as ever; a bf16 `out` adds one rounding (2**-8)."""
    one = make_dense(rows=80, first_row=20, heads=4, kv_heads=2)
    rounded = type(one)(one.query.bfloat16(), one.key.bfloat16(), one.value.bfloat16(), 20, one.scale)
    kv, block_table = make_paged(rounded.key, rounded.value, 32)
    segment = RowSegment(row_begin=20, row_end=100, out_begin=0, block_table=block_table)
    mask = random_mask(4, segment.block_rows(16), 0.6, 5)
    wanted = rounded.output(rounded.probabilities(tokens_of(mask, segment, 16)))
    for dtype, relative in ((torch.float32, 0.0), (torch.bfloat16, 2.0**-8)):
        out = torch.full(one.query.shape, torch.nan, dtype=dtype)
        guide_attention(rounded.query, kv, [segment], [mask], block=16, scale=one.scale, out=out)
        torch.testing.assert_close(out.double(), wanted, rtol=relative, atol=TOLERANCE)


def test_bad_input_is_named(make_dense: Callable[..., Any], make_paged: Callable[..., Any]) -> None:
    one = make_dense(rows=32, first_row=0, heads=4, kv_heads=2)
    kv, table = make_paged(one.key, one.value, 16)
    segment = RowSegment(row_begin=0, row_end=32, out_begin=0, block_table=table)
    mask = torch.ones(4, 2, 2, dtype=torch.bool)

    def attend(
        query: Any = one.query, mask: Any = mask, segment: Any = segment, block: int = 16, out: Any = None
    ) -> None:
        out = torch.empty_like(one.query) if out is None else out
        guide_attention(query, kv, [segment], [mask], block=block, scale=1.0, out=out)

    nothing = mask.clone()
    nothing[2, 1] = False
    with pytest.raises(ValueError, match="at least one causal block in every block row"):
        attend(mask=nothing)
    nothing[2, 0] = torch.tensor([False, True])  # only a block above the diagonal
    with pytest.raises(ValueError, match="at least one causal block"):
        attend(mask=nothing)
    with pytest.raises(ValueError, match=r"mask: expected shape \[4, 2, C\], got \[4, 3, 2\]"):
        attend(mask=torch.ones(4, 3, 2, dtype=torch.bool))
    with pytest.raises(ValueError, match="at least 2 block columns, got 1"):
        attend(mask=mask[:, :, :1])
    with pytest.raises(ValueError, match=r"torch\.bool"):
        attend(mask=mask.float())
    with pytest.raises(ValueError, match="query: expected shape"):
        attend(query=one.query[:, :, :8])
    with pytest.raises(ValueError, match="out: expected shape"):
        attend(out=torch.empty(31, 4, 16))
    with pytest.raises(ValueError, match="multiple of the 2 KV heads, got 3"):
        attend(query=one.query[:, :3], out=torch.empty(32, 3, 16), mask=mask[:3])
    with pytest.raises(ValueError, match="block"):
        attend(block=24)
    with pytest.raises(ValueError, match="batch's 32"):
        attend(segment=RowSegment(row_begin=0, row_end=32, out_begin=1, block_table=table))
    with pytest.raises(ValueError, match="one for each of 1 segments, got 0"):
        guide_attention(one.query, kv, [segment], [], block=16, scale=1.0, out=torch.empty_like(one.query))
    twice = RowSegment(row_begin=0, row_end=9, out_begin=3, block_table=table)
    with pytest.raises(ValueError, match="no overlap, got two that hold row 3"):
        guide_attention(one.query, kv, [segment, twice], [mask, mask], block=16, scale=1.0, out=torch.empty(32, 4, 16))
    with pytest.raises(ValueError, match="row_end: expected at least 6"):
        RowSegment(row_begin=5, row_end=5, out_begin=0, block_table=table)
