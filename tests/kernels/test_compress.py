"""The compressor against dense float64 probabilities, whole and in parts."""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mapflow.kernels import compress_reference
from mapflow.kernels.attention_map import AttentionMap, encode_mass
from mapflow.kernels.compress_reference import assemble_chunk, block_masses, compress_rows
from mapflow.kernels.tile_codec import decode_tiles
from mapflow.kernels.top_p import select_top_p

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16


def dense_masses(one: Any, block: int) -> torch.Tensor:
    """float64 [H, R, C] from the dense probabilities."""
    p = one.probabilities()
    heads, rows, tokens = p.shape
    shares: torch.Tensor = p.view(heads, rows // block, block, tokens // block, block).sum(4)
    return shares.square().mean(2).sqrt()


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    group=st.integers(1, 4),
    kv_heads=st.integers(1, 3),
    block=st.sampled_from([8, 16, 64]),
    first=st.integers(0, 4),
    rows=st.integers(1, 4),
    seed=st.integers(0, 1000),
)
def test_masses_are_root_mean_squares_of_shares(
    make_dense: Callable[..., Any], group: int, kv_heads: int, block: int, first: int, rows: int, seed: int
) -> None:
    one = make_dense(
        rows=rows * block, first_row=first * block, heads=group * kv_heads, kv_heads=kv_heads, seed=seed, sharpness=4.0
    )
    key = torch.cat([one.key, torch.full((5, kv_heads, 16), torch.nan)])  # later tokens, not written yet
    mass = block_masses(one.query, key, first_row=first * block, block=block, scale=one.scale)
    assert mass.dtype == torch.float32
    torch.testing.assert_close(mass.double(), dense_masses(one, block), rtol=0, atol=1e-6)
    assert bool((mass.square().sum(-1) <= 1 + 1e-5).all())
    assert not mass.triu(first + 1).any()


@pytest.mark.parametrize("together", [1, 10**9])
def test_masses_do_not_depend_on_the_memory_bound(
    make_dense: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, together: int
) -> None:
    one = make_dense(rows=32, first_row=16, heads=6, kv_heads=2)
    wanted = compress_rows(one.query, one.key, first_row=16, block=16, scale=one.scale, top_p=0.8)
    monkeypatch.setattr(compress_reference, "_MAX_SCORES", together)
    got = compress_rows(one.query, one.key, first_row=16, block=16, scale=one.scale, top_p=0.8)
    assert got.tiles is not None
    assert wanted.tiles is not None
    torch.testing.assert_close(got.mass, wanted.mass, rtol=0, atol=1e-6)
    assert torch.equal(got.tiles.indices, wanted.tiles.indices)
    assert torch.equal(got.tiles.indptr, wanted.tiles.indptr)


def test_bf16_queries_and_keys_accumulate_in_float32(make_dense: Callable[..., Any]) -> None:
    one = make_dense(rows=32, first_row=32, heads=4, kv_heads=2)
    rounded = dataclasses.replace(one, query=one.query.bfloat16(), key=one.key.bfloat16())
    mass = block_masses(rounded.query, rounded.key, first_row=32, block=16, scale=one.scale)
    torch.testing.assert_close(mass.double(), dense_masses(rounded, 16), rtol=0, atol=1e-6)


@pytest.mark.parametrize("p", [0.3, 0.9, 1.0])
@pytest.mark.parametrize("dtype", [E4M3, BF16])
def test_tiles_are_the_probabilities_of_the_kept_blocks(
    make_dense: Callable[..., Any], dtype: torch.dtype, p: float
) -> None:
    """Bounds: e4m3 2**-4 relative, 2**-18 absolute; bf16 2**-8 relative; and float32 rounding."""
    one = make_dense(rows=48, first_row=32, heads=6, kv_heads=2, sharpness=4.0)
    got = compress_rows(one.query, one.key, first_row=32, block=16, scale=one.scale, top_p=p, tile_dtype=dtype)
    kept = select_top_p(got.mass, p, first_block_row=2)
    tiles = got.tiles
    assert tiles is not None
    assert torch.equal(tiles.indptr.diff(dim=1), kept.sum(-1).int())
    assert torch.equal(tiles.indices.long(), kept.nonzero()[:, 2])
    blocks = one.probabilities().view(6, 3, 16, 5, 16).transpose(2, 3)[kept]
    relative, absolute = (2.0**-4, 2.0**-18) if dtype == E4M3 else (2.0**-8, 0.0)
    error = (decode_tiles(tiles.values).double() - blocks).abs()
    assert bool((error <= relative * blocks + absolute + 1e-6).all())
    if p == 1.0:
        assert tiles.num_tiles == 6 * (3 + 4 + 5)


def test_heads_not_wanted_have_no_masses_and_no_tiles(make_dense: Callable[..., Any]) -> None:
    one = make_dense(rows=32, first_row=16, heads=6, kv_heads=3)
    whole = compress_rows(one.query, one.key, first_row=16, block=16, scale=one.scale, top_p=0.9)
    some = compress_rows(
        one.query, one.key, first_row=16, block=16, scale=one.scale, top_p=0.9, heads=[4, 0, 3], tile_heads=[3, 0]
    )
    assert whole.tiles is not None
    assert some.tiles is not None
    for head in range(6):
        has_mass, has_tiles = head in (0, 3, 4), head in (0, 3)
        wanted = whole.mass[head] if has_mass else torch.zeros_like(whole.mass[head])
        assert torch.equal(some.mass[head], wanted)
        span = slice(int(some.tiles.indptr[head, 0]), int(some.tiles.indptr[head, -1]))
        span_of_whole = slice(int(whole.tiles.indptr[head, 0]), int(whole.tiles.indptr[head, -1]))
        assert (span.stop > span.start) == has_tiles
        if has_tiles:
            assert torch.equal(some.tiles.indices[span], whole.tiles.indices[span_of_whole])
            assert torch.equal(some.tiles.values[span].float(), whole.tiles.values[span_of_whole].float())
    none = compress_rows(one.query, one.key, first_row=16, block=16, scale=one.scale, top_p=0.9, tile_heads=[])
    assert none.tiles is not None
    assert none.tiles.num_tiles == 0
    assert torch.equal(none.mass, whole.mass)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(cuts=st.sets(st.integers(1, 11), max_size=6), top_p=st.sampled_from([None, 0.6, 1.0]), shuffle=st.randoms())
def test_chunks_assembled_from_parts_equal_the_whole(
    make_dense: Callable[..., Any],
    same_map: Callable[[AttentionMap, AttentionMap], bool],
    cuts: set[int],
    top_p: float | None,
    shuffle: Any,
) -> None:
    """12 block rows = 3 chunks of 4, delivered in runs that do not respect the chunks."""
    one = make_dense(rows=96, first_row=0, heads=4, kv_heads=2, sharpness=4.0)

    def compress(begin: int, end: int) -> compress_reference.CompressedRows:
        query, key = one.query[8 * begin : 8 * end], one.key[: 8 * end]
        return compress_rows(query, key, first_row=8 * begin, block=8, scale=one.scale, top_p=top_p)

    edges = [0, *sorted(cuts), 12]
    parts = [compress(begin, end) for begin, end in itertools.pairwise(edges)]
    shuffle.shuffle(parts)
    whole = compress(0, 12)
    for chunk in range(3):
        size: dict[str, Any] = {"chunk_index": chunk, "chunk_tokens": 32, "block": 8, "num_heads": 4}
        got, wanted = assemble_chunk(parts, **size), assemble_chunk([whole], **size)
        assert same_map(got, wanted)
        assert got.row_counts.tolist() == [8] * 4
        rows = slice(4 * chunk, 4 * chunk + 4)
        assert torch.equal(got.mass, encode_mass(whole.mass[:, rows, : 4 * chunk + 4]))
        if top_p is not None:
            assert got.tiles is not None
            assert got.tiles.num_tiles == int(select_top_p(whole.mass, top_p, first_block_row=0)[:, rows].sum())


def test_missing_block_rows_are_marked(make_dense: Callable[..., Any]) -> None:
    one = make_dense(rows=64, first_row=0, heads=2, kv_heads=1)
    middle = compress_rows(one.query[40:48], one.key, first_row=40, block=8, scale=one.scale, top_p=1.0)
    got = assemble_chunk([middle], chunk_index=1, chunk_tokens=32, block=8, num_heads=2, approximate=True)
    assert got.approximate
    assert got.row_counts.tolist() == [0, 8, 0, 0]
    assert not got.mass[:, [0, 2, 3]].any()
    assert got.tiles is not None
    assert got.tiles.indptr.tolist() == [[0, 0, 6, 6, 6], [6, 6, 12, 12, 12]]
    nothing = assemble_chunk([], chunk_index=0, chunk_tokens=32, block=8, num_heads=2)
    assert nothing.tiles is None
    assert not nothing.measured.any()
    assert not assemble_chunk([middle], chunk_index=0, chunk_tokens=32, block=8, num_heads=2).measured.any()


def test_parts_that_do_not_fit_are_refused(make_dense: Callable[..., Any]) -> None:
    one = make_dense(rows=32, first_row=0, heads=2, kv_heads=1)
    part = compress_rows(one.query, one.key, first_row=0, block=8, scale=one.scale, top_p=1.0)
    last = compress_rows(one.query[24:], one.key, first_row=24, block=8, scale=one.scale)
    size: dict[str, Any] = {"chunk_index": 0, "chunk_tokens": 32, "block": 8, "num_heads": 2}
    with pytest.raises(ValueError, match="block row 0 twice"):
        assemble_chunk([part, part], **size)
    with pytest.raises(ValueError, match="tile dtype"):
        assemble_chunk([part, last], **size)
    with pytest.raises(ValueError, match="num_heads"):
        assemble_chunk([part], **{**size, "num_heads": 3})
    with pytest.raises(ValueError, match="multiple of block 16, got 24"):
        assemble_chunk([], chunk_index=0, chunk_tokens=24, block=16, num_heads=2)
    with pytest.raises(ValueError, match="block"):
        assemble_chunk([part], **{**size, "block": 16})


def test_bad_input_is_named(make_dense: Callable[..., Any]) -> None:
    one = make_dense(rows=32, first_row=0, heads=4, kv_heads=2)

    def compress(query: Any = one.query, key: Any = one.key, first_row: int = 0, block: int = 8, **more: Any) -> None:
        compress_rows(query, key, first_row=first_row, block=block, scale=one.scale, **more)

    with pytest.raises(ValueError, match="multiples of block 8, got T 31 and first_row 0"):
        compress(query=one.query[:31])
    with pytest.raises(ValueError, match="first_row 3"):
        compress(query=one.query[:8], first_row=3)
    with pytest.raises(ValueError, match="at least 40 tokens, got 32"):
        compress(first_row=8)
    with pytest.raises(ValueError, match="multiple of the 2 KV heads, got 3"):
        compress(query=one.query[:, :3])
    with pytest.raises(ValueError, match="key: expected shape"):
        compress(key=one.key[:, :, :8])
    with pytest.raises(ValueError, match="each head once"):
        compress(heads=[1, 1])
    with pytest.raises(ValueError, match="at most 3"):
        compress(heads=[4])
    with pytest.raises(ValueError, match="tile_heads: expected some of heads"):
        compress(heads=[1], tile_heads=[2], top_p=0.5)
    with pytest.raises(ValueError, match="p: expected"):
        compress(top_p=-1.0)
    with pytest.raises(ValueError, match="tile dtype"):
        compress(top_p=0.5, tile_dtype=torch.float32)
    poisoned = one.query.clone()
    poisoned[3, 1, 0] = torch.nan
    with pytest.raises(ValueError, match="NaN or infinity"):
        compress(query=poisoned)
