"""What the kernel tests compare with: dense float64 attention, and paged caches full of traps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import pytest

try:
    import torch

    from mapflow.kernels.attention_map import AttentionMap, TileSet
    from mapflow.kernels.paged import PagedKV
except ModuleNotFoundError as missing:
    if missing.name != "torch":
        raise
    collect_ignore_glob = ["test_*.py"]  # an installation without an engine


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclasses.dataclass(frozen=True)
class Dense:
    """Causal attention as one writes it down, in float64."""

    query: torch.Tensor  # [T, Hq, D], token rows [first_row, first_row + T)
    key: torch.Tensor  # [L, Hkv, D]
    value: torch.Tensor  # [L, Hkv, D]
    first_row: int
    scale: float

    def probabilities(self, kept: torch.Tensor | None = None) -> torch.Tensor:
        """[Hq, T, L]; `kept` bool [Hq, T, L] narrows what may be attended."""
        group = self.query.shape[1] // self.key.shape[1]
        keys = self.key.double().repeat_interleave(group, 1)
        scores = torch.einsum("thd,lhd->htl", self.query.double(), keys) * self.scale
        rows = torch.arange(self.first_row, self.first_row + self.query.shape[0])
        allowed = torch.arange(self.key.shape[0]) <= rows[:, None]
        if kept is not None:
            allowed = allowed & kept
        return scores.masked_fill(~allowed, -torch.inf).softmax(-1)

    def output(self, probabilities: torch.Tensor) -> torch.Tensor:
        """[T, Hq, D]"""
        group = probabilities.shape[0] // self.value.shape[1]
        return torch.einsum("htl,lhd->thd", probabilities, self.value.double().repeat_interleave(group, 1))


@pytest.fixture(scope="session")
def dense() -> type[Dense]:
    return Dense


@pytest.fixture(scope="session")
def make_dense() -> Callable[..., Dense]:
    """Random attention with some structure: sharp enough that blocks differ in mass."""

    def make(
        *,
        rows: int,
        first_row: int,
        heads: int,
        kv_heads: int,
        head_dim: int = 16,
        seed: int = 0,
        sharpness: float = 2.0,
    ) -> Dense:
        generator = torch.Generator().manual_seed(seed)
        tokens = first_row + rows
        query = torch.randn(rows, heads, head_dim, generator=generator) * sharpness
        key = torch.randn(tokens, kv_heads, head_dim, generator=generator)
        value = torch.randn(tokens, kv_heads, head_dim, generator=generator)
        return Dense(query, key, value, first_row, head_dim**-0.5)

    return make


@pytest.fixture(scope="session")
def make_paged() -> Callable[..., tuple[PagedKV, torch.Tensor]]:
    """Put keys and values [L, Hkv, D] into shuffled pages; everything that is not theirs is NaN.

    layout: "plain", "transposed keys" (a page's keys as [head_dim, page_size]), or "joined" (K and V in one row).
    """

    def make(
        key: torch.Tensor,
        value: torch.Tensor,
        page_size: int,
        *,
        layout: str = "plain",
        seed: int = 0,
        dtype: torch.dtype = torch.int32,
    ) -> tuple[PagedKV, torch.Tensor]:
        tokens, kv_heads, head_dim = key.shape
        pages = -(-tokens // page_size)
        total = 2 * pages + 3
        if layout == "joined":
            cache = torch.full((total, page_size, kv_heads, 2 * head_dim), torch.nan, dtype=key.dtype).transpose(1, 2)
            keys, values = cache[..., :head_dim], cache[..., head_dim:]
        elif layout == "transposed keys":
            keys = torch.full((total, kv_heads, head_dim, page_size), torch.nan, dtype=key.dtype).transpose(2, 3)
            values = torch.full((total, kv_heads, page_size, head_dim), torch.nan, dtype=key.dtype)
        else:
            keys = torch.full((total, kv_heads, page_size, head_dim), torch.nan, dtype=key.dtype)
            values = keys.clone()
        order = torch.randperm(total, generator=torch.Generator().manual_seed(seed))[: pages + 1]
        for token in range(tokens):
            page, slot = int(order[token // page_size]), token % page_size
            keys[page, :, slot] = key[token]
            values[page, :, slot] = value[token]
        return PagedKV(key_cache=keys, value_cache=values), order.to(dtype)

    return make


@pytest.fixture(scope="session")
def same_map() -> Callable[[AttentionMap, AttentionMap], bool]:
    """Whether two maps are equal bit for bit."""

    def same(a: AttentionMap, b: AttentionMap) -> bool:
        def fields(one: AttentionMap) -> list[object]:
            tiles = [] if one.tiles is None else [one.tiles.indptr, one.tiles.indices, one.tiles.values]
            bits = [t.contiguous().view(torch.uint8).tolist() if t.numel() else t.shape for t in tiles]
            dtypes = [t.dtype for t in tiles]
            return [
                one.chunk_index,
                one.block,
                one.approximate,
                one.mass.tolist(),
                one.row_counts.tolist(),
                bits,
                dtypes,
            ]

        return fields(a) == fields(b)

    return same


@pytest.fixture(scope="session")
def fixed_map() -> Callable[..., AttentionMap]:
    """The map of the golden files, by arithmetic alone: chunk 1 of 2 block rows of 8 tokens, 2 heads."""

    def build(tile_dtype: torch.dtype | None, approximate: bool = False) -> AttentionMap:
        mass = torch.arange(2 * 2 * 4).reshape(2, 2, 4).mul(15).to(torch.uint8)
        mass[:, 0, 3] = 0
        tiles = None
        if tile_dtype is not None:
            values = (torch.arange(5 * 64) % 113 / 128.0).reshape(5, 8, 8)
            tiles = TileSet(
                indptr=torch.tensor([[0, 2, 3], [3, 3, 5]], dtype=torch.int32),
                indices=torch.tensor([0, 2, 3, 1, 3], dtype=torch.int32),
                values=(values * 256).to(tile_dtype) if tile_dtype == torch.float8_e4m3fn else values.to(tile_dtype),
            )
        return AttentionMap(
            chunk_index=1,
            block=8,
            mass=mass,
            row_counts=torch.tensor([8, 8], dtype=torch.int32),
            tiles=tiles,
            approximate=approximate,
        )

    return build
