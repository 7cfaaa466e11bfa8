"""Translate against scipy.sparse BSR in float64, and against dense attention within the stated tile precision."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import sparse

from mapflow.kernels.attention_map import AttentionMap
from mapflow.kernels.compress_reference import assemble_chunk, compress_rows
from mapflow.kernels.row_segment import RowSegment
from mapflow.kernels.translate_reference import translate_attention

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
BLOCK, CHUNK = 8, 32
Maps = list[AttentionMap]


@pytest.fixture(scope="module")
def sender_maps(make_dense: Callable[..., Any]) -> Callable[..., Maps]:
    """Maps of 4 chunks of 32 tokens of a sender with 5 heads."""
    made: dict[tuple[Any, float], Maps] = {}

    def maps(dtype: torch.dtype = E4M3, p: float = 0.6) -> Maps:
        if (dtype, p) not in made:
            one = make_dense(rows=128, first_row=0, heads=5, kv_heads=1, seed=11, sharpness=4.0)
            rows = compress_rows(
                one.query, one.key, first_row=0, block=BLOCK, scale=one.scale, top_p=p, tile_dtype=dtype
            )
            made[dtype, p] = [
                assemble_chunk([rows], chunk_index=c, chunk_tokens=CHUNK, block=BLOCK, num_heads=5) for c in range(4)
            ]
        return made[dtype, p]

    return maps


def bsr_of(maps: Sequence[AttentionMap], head: int) -> Any:
    """One head's rows of consecutive chunks as a float64 scipy BSR matrix, built from the stored values alone."""
    indptr, indices, data = [0], [], []
    for one in maps:
        assert one.tiles is not None
        start, end = int(one.tiles.indptr[head, 0]), int(one.tiles.indptr[head, -1])
        scale = 256.0 if one.tiles.values.dtype == E4M3 else 1.0
        data.append((one.tiles.values[start:end].to(torch.float64) / scale).numpy())
        indices.append(one.tiles.indices[start:end].numpy())
        indptr += [indptr[-1] + int(offset) - start for offset in one.tiles.indptr[head, 1:]]
    shape = (BLOCK * (len(indptr) - 1), maps[-1].row_end)
    return sparse.bsr_matrix((np.concatenate(data), np.concatenate(indices), np.array(indptr)), shape=shape)


def expected(
    maps: Sequence[AttentionMap],
    value: torch.Tensor,
    begin: int,
    end: int,
    index: torch.Tensor,
    weight: torch.Tensor,
) -> torch.Tensor:
    """float64 [rows, Hr, D]"""
    group = index.shape[0] // value.shape[1]
    matrices = [bsr_of(maps, head) for head in range(maps[0].num_heads)]
    padded = np.zeros((maps[-1].row_end, *value.shape[1:]))
    padded[: len(value)] = value.double().numpy()[: len(padded)]
    heads = []
    for i in range(index.shape[0]):
        mixed = sum(float(w) * (matrices[int(s)] @ padded[:, i // group]) for s, w in zip(index[i], weight[i]))
        heads.append(mixed[begin - maps[0].row_begin : end - maps[0].row_begin])
    return torch.from_numpy(np.stack(heads, 1))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    group=st.integers(1, 4),
    kv_heads=st.integers(1, 3),
    k=st.integers(1, 5),
    page_size=st.sampled_from([4, 16, 64]),
    row_begin=st.integers(0, 120),
    num_rows=st.integers(1, 60),
    dtype=st.sampled_from([E4M3, BF16]),
    seed=st.integers(0, 1000),
)
def test_translate_is_scipy_bsr(
    sender_maps: Callable[..., Maps],
    make_paged: Callable[..., Any],
    group: int,
    kv_heads: int,
    k: int,
    page_size: int,
    row_begin: int,
    num_rows: int,
    dtype: torch.dtype,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    heads, row_end = group * kv_heads, min(row_begin + num_rows, 128)
    value = torch.randn(row_end, kv_heads, 16, generator=generator)  # later tokens are not written yet
    kv, block_table = make_paged(torch.full_like(value, torch.nan), value, page_size, seed=seed)
    index = torch.randint(0, 5, (heads, k), generator=generator, dtype=torch.int32)
    weight = torch.randn(heads, k, generator=generator)
    maps = sender_maps(dtype)[row_begin // CHUNK : -(-row_end // CHUNK)]
    segment = RowSegment(row_begin=row_begin, row_end=row_end, out_begin=0, block_table=block_table)
    out = torch.full((row_end - row_begin, heads, 16), torch.nan)
    translate_attention(kv, [segment], [maps], head_index=index, head_weight=weight, out=out)
    wanted = expected(maps, value, row_begin, row_end, index, weight)
    torch.testing.assert_close(out.double(), wanted, rtol=0, atol=5e-5)


@pytest.mark.parametrize("dtype", [E4M3, BF16])
def test_own_maps_at_full_density_are_attention(
    make_dense: Callable[..., Any], make_paged: Callable[..., Any], dtype: torch.dtype
) -> None:
    """A model that translates its own map with the identity loses exactly the precision of the tiles.

    Bound of each element: sum over tokens of (relative * p + absolute) * |v|, with the codec's constants.
    """
    one = make_dense(rows=64, first_row=0, heads=4, kv_heads=2, sharpness=4.0)
    rows = compress_rows(one.query, one.key, first_row=0, block=8, scale=one.scale, top_p=1.0, tile_dtype=dtype)
    maps = [assemble_chunk([rows], chunk_index=c, chunk_tokens=32, block=8, num_heads=4) for c in range(2)]
    kv, block_table = make_paged(one.key, one.value, 16)
    segment = RowSegment(row_begin=0, row_end=64, out_begin=0, block_table=block_table)
    index, weight = torch.arange(4, dtype=torch.int32)[:, None], torch.ones(4, 1)
    out = torch.full((64, 4, 16), torch.nan)
    translate_attention(kv, [segment], [maps], head_index=index, head_weight=weight, out=out)
    p = one.probabilities()
    magnitude = dataclasses.replace(one, value=one.value.abs())
    relative, absolute = (2.0**-4, 2.0**-18) if dtype == E4M3 else (2.0**-8, 0.0)
    bound = magnitude.output(relative * p + absolute) + 1e-5
    error = (out.double() - one.output(p)).abs()
    assert bool((error <= bound).all())
    assert float(error.max()) > 1e-5  # and the tiles, not some exact path, made it


def test_a_batch_of_segments_leaves_other_rows_alone(
    sender_maps: Callable[..., Maps], make_paged: Callable[..., Any]
) -> None:
    generator = torch.Generator().manual_seed(3)
    value = torch.randn(100, 2, 16, generator=generator)
    kv, block_table = make_paged(value, value, 16)
    index = torch.tensor([[0, 1], [4, 4], [2, 0], [3, 1]], dtype=torch.int32)  # head 4 twice counts twice
    weight = torch.randn(4, 2, generator=generator)
    segments = [
        RowSegment(row_begin=33, row_end=100, out_begin=20, block_table=block_table),
        RowSegment(row_begin=2, row_end=11, out_begin=4, block_table=block_table),
    ]
    maps = [sender_maps()[1:4], sender_maps()[0:1]]
    out = torch.full((90, 4, 16), 7.5)
    translate_attention(kv, segments, maps, head_index=index, head_weight=weight, out=out)
    for segment, chunks in zip(segments, maps):
        wanted = expected(chunks, value, segment.row_begin, segment.row_end, index, weight)
        torch.testing.assert_close(out[segment.batch_rows].double(), wanted, rtol=0, atol=5e-5)
    for untouched in (out[:4], out[13:20], out[87:]):
        assert bool((untouched == 7.5).all())


def test_nan_in_dropped_blocks_and_unused_heads_does_not_leak(
    make_dense: Callable[..., Any], make_paged: Callable[..., Any]
) -> None:
    one = make_dense(rows=32, first_row=32, heads=2, kv_heads=1, sharpness=6.0)
    rows = compress_rows(one.query, one.key, first_row=32, block=8, scale=one.scale, top_p=0.3)
    assert rows.tiles is not None
    maps = [assemble_chunk([rows], chunk_index=1, chunk_tokens=32, block=8, num_heads=2)]
    used = set(rows.tiles.indices[: int(rows.tiles.indptr[0, -1])].tolist())
    dropped = sorted(set(range(8)) - used)
    assert dropped
    index, weight = torch.zeros(3, 1, dtype=torch.int32), torch.ones(3, 1)
    wanted = expected(maps, one.value, 32, 64, index, weight)
    value = one.value.clone()
    for column in dropped:
        value[8 * column : 8 * column + 8] = torch.nan
    kv, block_table = make_paged(value, value, 4)
    segment = RowSegment(row_begin=32, row_end=64, out_begin=0, block_table=block_table)
    out = torch.full((32, 3, 16), torch.nan)
    translate_attention(kv, [segment], [maps], head_index=index, head_weight=weight, out=out)
    torch.testing.assert_close(out.double(), wanted, rtol=0, atol=5e-5)


def test_bf16_values_and_out(sender_maps: Callable[..., Maps], make_paged: Callable[..., Any]) -> None:
    value = torch.randn(64, 2, 16, generator=torch.Generator().manual_seed(5)).bfloat16()
    kv, block_table = make_paged(value, value, 16)
    segment = RowSegment(row_begin=0, row_end=64, out_begin=0, block_table=block_table)
    index, weight = torch.arange(4, dtype=torch.int32)[:, None], torch.ones(4, 1)
    out = torch.full((64, 4, 16), torch.nan, dtype=torch.bfloat16)
    translate_attention(kv, [segment], [sender_maps()[:2]], head_index=index, head_weight=weight, out=out)
    wanted = expected(sender_maps()[:2], value, 0, 64, index, weight)
    torch.testing.assert_close(out.double(), wanted, rtol=2.0**-8, atol=5e-5)


def test_zero_weights_write_zeros(sender_maps: Callable[..., Maps], make_paged: Callable[..., Any]) -> None:
    value = torch.ones(32, 1, 16)
    kv, block_table = make_paged(value, value, 16)
    segment = RowSegment(row_begin=0, row_end=32, out_begin=0, block_table=block_table)
    out = torch.full((32, 2, 16), torch.nan)
    index, weight = torch.zeros(2, 1, dtype=torch.int32), torch.zeros(2, 1)
    translate_attention(kv, [segment], [sender_maps()[:1]], head_index=index, head_weight=weight, out=out)
    assert bool((out == 0).all())


def test_what_the_maps_lack_is_refused_before_anything_is_written(
    make_dense: Callable[..., Any], sender_maps: Callable[..., Maps], make_paged: Callable[..., Any]
) -> None:
    value = torch.ones(128, 1, 16)
    kv, table = make_paged(value, value, 16)
    out = torch.full((128, 2, 16), 7.5)
    maps = sender_maps()

    def translate(begin: int, end: int, chunks: Any, index: Any = ((0,), (4,)), weight: Any = ((1.0,), (1.0,))) -> None:
        segment = RowSegment(row_begin=begin, row_end=end, out_begin=begin, block_table=table)
        translate_attention(
            kv,
            [segment],
            [chunks],
            head_index=torch.tensor(index, dtype=torch.int32),
            head_weight=torch.tensor(weight),
            out=out,
        )

    with pytest.raises(ValueError, match=r"cover rows \[60, 100\), got \[32, 96\)"):
        translate(60, 100, maps[1:3])
    with pytest.raises(ValueError, match=r"cover rows \[0, 64\), got \[32, 64\)"):
        translate(0, 64, maps[1:2])
    with pytest.raises(ValueError, match=r"maps\[1\]: expected"):
        translate(0, 96, [maps[0], maps[2]])
    with pytest.raises(ValueError, match="at least one, got none"):
        translate(0, 96, [])
    with pytest.raises(ValueError, match="tiles in chunk 1, got masses only"):
        translate(0, 33, [maps[0], dataclasses.replace(maps[1], tiles=None)])
    with pytest.raises(ValueError, match="heads 0 to 4 of the maps, got 0 to 5"):
        translate(0, 32, maps[:1], index=((0,), (5,)))
    with pytest.raises(ValueError, match="heads 0 to 4 of the maps, got -1 to 0"):
        translate(0, 32, maps[:1], index=((0,), (-1,)))
    with pytest.raises(ValueError, match="NaN or infinity"):
        translate(0, 32, maps[:1], weight=((1.0,), (float("nan"),)))
    with pytest.raises(ValueError, match="head_weight: expected shape"):
        translate(0, 32, maps[:1], weight=((1.0, 1.0), (1.0, 1.0)))
    one = make_dense(rows=16, first_row=0, heads=5, kv_heads=1)
    half = compress_rows(one.query, one.key, first_row=0, block=8, scale=one.scale, top_p=1.0, tile_heads=[0, 1])
    partial = assemble_chunk([half], chunk_index=0, chunk_tokens=32, block=8, num_heads=5)
    with pytest.raises(ValueError, match="to be measured"):
        translate(0, 17, [partial], index=((0,), (1,)))
    with pytest.raises(ValueError, match=r"tiles of every head used, got none for \[4\]"):
        translate(0, 16, [partial])
    assert bool((out == 7.5).all())
    translate(0, 16, [partial], index=((0,), (1,)))  # the rows and heads that are there will do
    assert bool(out[:16].isfinite().all()) and not bool((out[:16] == 7.5).any())
    assert bool((out[16:] == 7.5).all())
