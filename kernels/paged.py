"""Keys and values where an engine keeps them: pages of a few tokens, found through a request's block table.

A view only: it owns nothing and writes nothing. A square block of an attention map may straddle pages or be smaller
than one; `gather` returns whole runs of tokens, so nobody else has to know the page size. It touches only the tokens
asked for: what stale pages or the unused end of a page hold never reaches a result.
"""

from dataclasses import dataclass

import torch

from mapflow.kernels.tensor_check import FLOAT_DTYPES, check_int, check_tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PagedKV:
    """One layer's paged cache; any strides. Raises TypeError or ValueError for wrong shapes, dtypes or devices.

    An engine that stores a page's keys as [head_dim, page_size] passes the transposed view.
    """

    key_cache: torch.Tensor  # float [num_pages, num_kv_heads, page_size, head_dim]
    value_cache: torch.Tensor  # float [num_pages, num_kv_heads, page_size, head_dim]

    def __post_init__(self) -> None:
        shape = ("num_pages", "num_kv_heads", "page_size", "head_dim")
        check_tensor("key_cache", self.key_cache, shape=shape, dtypes=FLOAT_DTYPES)
        if 0 in self.key_cache.shape[1:]:
            raise ValueError(f"key_cache: expected no empty dimension, got {list(self.key_cache.shape)}")
        check_tensor(
            "value_cache",
            self.value_cache,
            shape=self.key_cache.shape,
            dtypes=(self.key_cache.dtype,),
            device=self.key_cache.device,
        )

    @property
    def num_kv_heads(self) -> int:
        """Key/value heads."""
        return self.key_cache.shape[1]

    @property
    def page_size(self) -> int:
        """Tokens in a page."""
        return self.key_cache.shape[2]

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.key_cache.shape[3]

    @property
    def device(self) -> torch.device:
        """Where the cache lies."""
        return self.key_cache.device

    def gather(self, block_table: torch.Tensor, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of tokens [start, end): copies [end - start, num_kv_heads, head_dim] in the cache's dtype.

        `block_table` (i32 or i64 [pages]) is the request's own: entry n is the page of tokens
        [n * page_size, (n + 1) * page_size). Raises ValueError for a range outside it, or a page outside the cache.
        """
        return self.gather_keys(block_table, start, end), self.gather_values(block_table, start, end)

    def gather_keys(self, block_table: torch.Tensor, start: int, end: int) -> torch.Tensor:
        """The keys alone, as `gather` returns them."""
        return _gather(self.key_cache, block_table, start, end)

    def gather_values(self, block_table: torch.Tensor, start: int, end: int) -> torch.Tensor:
        """The values alone, as `gather` returns them."""
        return _gather(self.value_cache, block_table, start, end)


def _gather(cache: torch.Tensor, block_table: torch.Tensor, start: int, end: int) -> torch.Tensor:
    num_pages, num_kv_heads, page_size, head_dim = cache.shape
    check_tensor("block_table", block_table, shape=("pages",), dtypes=(torch.int32, torch.int64))
    check_int("start", start, minimum=0)
    check_int("end", end, minimum=start, maximum=block_table.shape[0] * page_size)
    if start == end:
        return cache.new_empty(0, num_kv_heads, head_dim)
    first_page = start // page_size
    pages = block_table[first_page : -(-end // page_size)].to(cache.device, torch.int64)
    if cache.device.type == "cpu":
        low, high = (int(bound) for bound in pages.aminmax())
        if low < 0 or high >= num_pages:
            raise ValueError(f"block_table: expected pages from 0 to {num_pages - 1}, got {low} to {high}")
    tokens = cache.permute(0, 2, 1, 3).index_select(0, pages)  # [pages, page_size, num_kv_heads, head_dim]
    return tokens.reshape(-1, num_kv_heads, head_dim)[start - first_page * page_size : end - first_page * page_size]
