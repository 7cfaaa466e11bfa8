"""Packing, and the two tables that every kernel walks: block rows and maps."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from mapflow.kernels.block_rows import BlockRows, ChunkSpan
from mapflow.kernels.map_table import MapTable
from mapflow.kernels.pack import pack, pack_both, pack_e4m3
from mapflow.kernels.row_segment import RowSegment

E4M3, BF16, FP16 = torch.float8_e4m3fn, torch.bfloat16, torch.float16


def packed_tokens(batch: Any, block: int, name: str) -> torch.Tensor:
    """[kv heads, tokens, head_dim] on the CPU, each request padded to whole blocks with zeros."""
    parts = []
    for one in batch.requests:
        tokens = getattr(one, name)
        padded = tokens.new_zeros(-(-tokens.shape[0] // block) * block, *tokens.shape[1:])
        padded[: tokens.shape[0]] = tokens
        parts.append(padded)
    return torch.cat(parts).transpose(0, 1)


@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize(("page_size", "layout"), [(16, "joined"), (32, "tokens first"), (128, "plain")])
@pytest.mark.parametrize(("head_dim", "dtype"), [(64, BF16), (128, FP16)])
def test_packed_is_gathered(
    make_batch: Callable[..., Any], block: int, page_size: int, layout: str, head_dim: int, dtype: torch.dtype
) -> None:
    """Bit for bit; stale pages and the end of the last page (NaN) become 0."""
    size: dict[str, Any] = {"page_size": page_size, "layout": layout, "head_dim": head_dim, "dtype": dtype}
    batch = make_batch((70, 201), (0, 128), (0, 1), **size)
    rows = batch.rows(block)
    for cache, name in ((batch.kv.key_cache, "key"), (batch.kv.value_cache, "value")):
        got = pack(cache, rows)
        assert got.scale is None
        assert torch.equal(got.data.cpu(), packed_tokens(batch, block, name))
    apart = replace(batch.kv, value_cache=torch.cat([batch.kv.value_cache] * 2, dim=1)[:, : batch.kv.num_kv_heads])
    assert apart.value_cache.stride() != apart.key_cache.stride() == batch.kv.value_cache.stride()
    for kv in (batch.kv, apart):  # in one launch, and in two
        for got, name in zip(pack_both(kv, rows), ("key", "value")):
            assert torch.equal(got.data.cpu(), packed_tokens(batch, block, name))


def test_interleaved_tokens(make_batch: Callable[..., Any]) -> None:
    """For blocks of 128: row 64h + 8j + 2q + b holds token 64h + 16q + 2j + b."""
    batch = make_batch((70, 201), (0, 128))
    rows = batch.rows(128)
    plain = packed_tokens(batch, 128, "key").view(2, -1, 2, 4, 8, 2, 64)  # ..., h, q, j, b
    got = pack(batch.kv.key_cache, rows, interleaved=True).data.cpu()
    assert torch.equal(got, plain.transpose(3, 4).reshape(got.shape))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("block", "layout"), [(64, "joined"), (128, "plain")])
def test_e4m3_has_one_scale_a_head(make_batch: Callable[..., Any], block: int, layout: str, transposed: bool) -> None:
    """Within one step of e4m3: 2**-4 relative, 2**-10 of 448 / largest at the small end."""

    def enlarge(one: Any) -> None:
        one.value[:, 1] *= 1000

    batch = make_batch((70, 201), (0, 130), layout=layout, edit=enlarge)
    rows = batch.rows(block)
    got = pack_e4m3(batch.kv.value_cache, rows, transposed=transposed)
    wanted = packed_tokens(batch, block, "value").double()
    assert got.scale is not None
    scale = got.scale.double().cpu()
    assert got.data.dtype == E4M3
    torch.testing.assert_close(scale, wanted.abs().amax((1, 2)) / 448, rtol=1e-6, atol=0)
    data = got.data.cpu().float().double()
    if transposed:
        assert data.shape == (2, rows.num_packed_tokens // block, 64, block)
        data = data.transpose(2, 3).reshape(wanted.shape)
    error = (data * scale[:, None, None] - wanted).abs()
    assert bool((error <= 2.0**-4 * wanted.abs() + 2.0**-10 * scale[:, None, None]).all())
    assert bool((data.abs().amax((1, 2)) == 448).all())


def test_e4m3_of_zeros_is_zeros(make_batch: Callable[..., Any]) -> None:
    batch = make_batch((0, 40), edit=lambda one: one.value.zero_())
    got = pack_e4m3(batch.kv.value_cache, batch.rows(64))
    assert got.scale is not None
    assert not got.data.float().any()
    assert bool(got.scale.isfinite().all())


def test_lines_of_block_rows(device: torch.device) -> None:
    segments = [
        RowSegment(row_begin=60, row_end=130, out_begin=7, block_table=torch.tensor([5, 2, 9], device=device)),
        RowSegment(row_begin=128, row_end=320, out_begin=100, block_table=torch.tensor([1], device=device)),
    ]
    rows = BlockRows.from_segments(segments, block=64, num_batch_rows=300, device=device)
    assert rows.lines.tolist() == [
        [1, 4, 128, 320, -28, 192, 5, 4],
        [1, 3, 128, 320, -28, 192, 4, 3],
        [0, 2, 60, 130, -53, 0, 2, 2],
        [1, 2, 128, 320, -28, 192, 3, 2],
        [0, 1, 60, 130, -53, 0, 1, 1],
        [0, 0, 60, 130, -53, 0, 0, 0],
    ]
    assert rows.block_tables.tolist() == [[5, 2, 9], [1, 0, 0]]
    starts = [[0, token, 130, 0] for token in (0, 64, 128)] + [[1, token, 320, 0] for token in range(0, 320, 64)]
    assert rows.packed_blocks.tolist() == starts
    assert (rows.num_lines, rows.num_columns, rows.num_packed_tokens) == (6, 5, 512)
    spans = [ChunkSpan(first_chunk=0, num_chunks=2, slot=0), ChunkSpan(first_chunk=1, num_chunks=2, slot=2)]
    rows = BlockRows.from_segments(segments, block=64, num_batch_rows=300, device=device, chunk_blocks=2, spans=spans)
    placed = {(request, row): (slot, own) for request, row, *_, slot, own in rows.lines.tolist()}
    assert placed == {(0, 0): (0, 0), (0, 1): (0, 1), (0, 2): (1, 0), (1, 2): (2, 0), (1, 3): (2, 1), (1, 4): (3, 0)}


@pytest.mark.parametrize(("tile_dtype", "p"), [(E4M3, 0.6), (BF16, 0.6), (E4M3, 0.0), (E4M3, 1.0), (None, 0.0)])
def test_a_map_table_finds_every_part(
    make_maps: Callable[..., Any], device: torch.device, tile_dtype: torch.dtype | None, p: float
) -> None:
    """Masses, indptr, indices and tiles where `sections` says, for every head of two segments' chunks."""
    options: dict[str, Any] = {"heads": 5, "tile_dtype": tile_dtype, "p": p}
    maps = [make_maps(end_chunk=3, first_chunk=1, **options), make_maps(end_chunk=1, seed=9, **options)]
    table = MapTable.from_maps(maps, device)
    assert [(span.first_chunk, span.num_chunks, span.slot) for span in table.spans] == [(1, 2, 0), (0, 1, 2)]
    assert (table.num_heads, table.block, table.chunk_blocks, table.tile_dtype) == (5, 64, 2, tile_dtype)
    arena, sections = table.arena.cpu(), table.sections.cpu()
    assert not bool((sections[..., : 1 if tile_dtype is None else 4] % 64).any())
    for chunk, one in enumerate([*maps[0], *maps[1]]):
        for head in range(5):
            mass, indptr, indices, tiles = sections[chunk, head].tolist()
            assert torch.equal(arena[mass : mass + one.mass[head].numel()], one.mass[head].reshape(-1))
            if one.tiles is None:
                continue
            start, end = int(one.tiles.indptr[head, 0]), int(one.tiles.indptr[head, -1])
            assert torch.equal(arena[indptr : indptr + 12].view(torch.int32), one.tiles.indptr[head] - start)
            stored = arena[indices : indices + 4 * (end - start)].view(torch.int32)
            assert torch.equal(stored, one.tiles.indices[start:end])
            wanted = one.tiles.values[start:end].contiguous().view(torch.uint8).reshape(-1)
            assert torch.equal(arena[tiles : tiles + wanted.numel()], wanted)
