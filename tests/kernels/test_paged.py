"""Gathers from shuffled pages, token by token."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mapflow.kernels.paged import PagedKV

LAYOUTS = ["plain", "transposed keys", "joined"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_gather_is_the_tokens(make_paged: Callable[..., Any], layout: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)

    @settings(max_examples=25, deadline=None, derandomize=True)
    @given(page_size=st.sampled_from([1, 7, 16, 32, 64, 128]), tokens=st.integers(1, 200), data=st.data())
    def check(page_size: int, tokens: int, data: st.DataObject) -> None:
        key = torch.randn(tokens, 2, 4, generator=generator)
        value = torch.randn(tokens, 2, 4, generator=generator)
        kv, block_table = make_paged(key, value, page_size, layout=layout, seed=tokens, dtype=dtype)
        assert (kv.page_size, kv.num_kv_heads, kv.head_dim) == (page_size, 2, 4)
        start = data.draw(st.integers(0, tokens))
        end = data.draw(st.integers(start, tokens))
        keys, values = kv.gather(block_table, start, end)
        assert torch.equal(keys, key[start:end])  # also false if one NaN got in
        assert torch.equal(values, value[start:end])

    check()


def test_gather_is_a_copy(make_paged: Callable[..., Any]) -> None:
    tokens = torch.ones(8, 1, 4)
    kv, block_table = make_paged(tokens, tokens, 8)
    kv.gather_keys(block_table, 0, 8).zero_()
    assert torch.equal(kv.gather_keys(block_table, 0, 8), tokens)


@pytest.mark.parametrize(
    ("start", "end", "message"),
    [(-1, 2, "start"), (3, 2, "end: expected at least 3"), (0, 13, "end: expected at most 12")],
)
def test_ranges_outside_the_table_are_refused(start: int, end: int, message: str) -> None:
    cache = torch.zeros(5, 1, 4, 8)
    kv = PagedKV(key_cache=cache, value_cache=cache)
    with pytest.raises(ValueError, match=message):
        kv.gather(torch.tensor([0, 1, 2]), start, end)


def test_pages_outside_the_cache_are_refused_only_if_needed() -> None:
    cache = torch.zeros(5, 1, 4, 8)
    kv = PagedKV(key_cache=cache, value_cache=cache)
    table = torch.tensor([4, 0, 5, -1], dtype=torch.int32)
    assert kv.gather_values(table, 0, 8).shape == (8, 1, 8)
    with pytest.raises(ValueError, match="expected pages from 0 to 4, got 5 to 5"):
        kv.gather_values(table, 8, 9)
    with pytest.raises(ValueError, match="got -1 to 5"):
        kv.gather_values(table, 4, 16)
    with pytest.raises(ValueError, match="block_table: expected dtype"):
        kv.gather_values(table.float(), 0, 1)


def test_bad_caches_are_refused() -> None:
    cache = torch.zeros(5, 1, 4, 8)
    with pytest.raises(ValueError, match="value_cache: expected shape"):
        PagedKV(key_cache=cache, value_cache=cache[:, :, :, :4])
    with pytest.raises(ValueError, match="value_cache: expected dtype"):
        PagedKV(key_cache=cache, value_cache=cache.bfloat16())
    with pytest.raises(ValueError, match="key_cache: expected shape"):
        PagedKV(key_cache=cache[0], value_cache=cache[0])
    with pytest.raises(ValueError, match="key_cache: expected dtype"):
        PagedKV(key_cache=cache.to(torch.uint8), value_cache=cache.to(torch.uint8))
    with pytest.raises(ValueError, match="no empty dimension"):
        PagedKV(key_cache=cache[:, :, :0], value_cache=cache[:, :, :0])
