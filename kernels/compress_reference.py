"""The compressor: block masses of a sender's rows, and the tiles of the blocks worth storing. Plain torch.

Never a dense map: only the probabilities of one block row exist at a time, of as many heads as fit into 64 MiB. Rows
arrive as chunked prefill delivers them, a few block rows at a time; `assemble_chunk` puts the parts of a chunk
together. Publishing is somebody else's.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from mapflow.kernels.attention_map import AttentionMap, TileSet, encode_mass
from mapflow.kernels.tensor_check import (
    FLOAT_DTYPES,
    check_block,
    check_group,
    check_heads,
    check_int,
    check_tensor,
)
from mapflow.kernels.tile_codec import check_tile_dtype, encode_tiles
from mapflow.kernels.top_p import check_p, select_top_p

_MAX_SCORES = 2**24  # float32 probabilities held at a time (64 MiB), unless one head's block row alone is more


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CompressedRows:
    """Masses, and tiles if asked for, of block rows [first_block_row, first_block_row + R) of a prompt."""

    first_block_row: int
    block: int
    mass: torch.Tensor  # float32 [num_heads, R, first_block_row + R]
    tiles: TileSet | None = None  # of the same heads and block rows

    def __post_init__(self) -> None:
        check_int("first_block_row", self.first_block_row, minimum=0)
        check_block(self.block)
        rows = self.mass.shape[1] if self.mass.dim() == 3 else 0
        shape = ("num_heads", rows, self.first_block_row + rows)
        check_tensor("mass", self.mass, shape=shape, dtypes=(torch.float32,))
        if self.tiles is not None:
            check_tensor("tiles.indptr", self.tiles.indptr, shape=(self.mass.shape[0], rows + 1), dtypes=(torch.int32,))
            if self.tiles.block != self.block:
                raise ValueError(f"tiles: expected block {self.block}, got {self.tiles.block}")

    @property
    def num_row_blocks(self) -> int:
        """Block rows measured."""
        return self.mass.shape[1]


def block_masses(query: torch.Tensor, key: torch.Tensor, *, first_row: int, block: int, scale: float) -> torch.Tensor:
    """Mass of each block, for all heads of `query` under causal attention: the root mean square, over the rows of its
    block row, of the probability that the row gives to the block.

    query: float [T, Hq, head_dim], token rows [first_row, first_row + T); T and first_row are multiples of `block`.
    key: float [L, Hkv, head_dim], tokens [0, L) with L >= first_row + T (more are ignored); Hq is a multiple of Hkv.

    Returns float32 [Hq, R, C], R = T / block, C = (first_row + T) / block. A row's squares sum to
    at most 1; zeros above the diagonal.
    """
    return compress_rows(query, key, first_row=first_row, block=block, scale=scale).mass


def compress_rows(
    query: torch.Tensor,
    key: torch.Tensor,
    *,
    first_row: int,
    block: int,
    scale: float,
    top_p: float | None = None,
    tile_dtype: torch.dtype = torch.float8_e4m3fn,
    heads: Sequence[int] | None = None,
    tile_heads: Sequence[int] | None = None,
) -> CompressedRows:
    """Masses of whole block rows, arguments as in `block_masses`, and tiles of the blocks that top-p keeps.

    top_p: None stores no tiles. heads: those wanted (default all); the others get zero masses and no tiles.
    tile_heads: those of `heads` whose tiles are wanted (default all of them). Raises ValueError for wrong shapes or
    dtypes, rows that are not whole blocks, or NaN scores.
    """
    group = _check_rows(query, key, first_row, block)
    num_heads = query.shape[1]
    wanted = check_heads(range(num_heads) if heads is None else heads, num_heads)
    with_tiles = set(check_heads(wanted if tile_heads is None else tile_heads, num_heads, "tile_heads"))
    if not with_tiles <= set(wanted):
        raise ValueError(f"tile_heads: expected some of heads {list(wanted)}, got {sorted(with_tiles)}")
    check_tile_dtype(tile_dtype)
    if top_p is not None:
        check_p(top_p)
    first_block_row, rows = first_row // block, query.shape[0] // block
    columns = first_block_row + rows
    mass = torch.zeros(num_heads, rows, columns, device=query.device)
    kept = torch.zeros(num_heads, rows, columns, dtype=torch.bool, device=query.device)
    tiles: dict[int, list[torch.Tensor]] = {head: [] for head in sorted(with_tiles)}
    keys = key[: columns * block].float().transpose(0, 1).contiguous()  # [Hkv, C * block, head_dim]
    for some in _in_groups(sorted(wanted), _MAX_SCORES // (block * block * columns)):
        scaled = query[:, some].float().transpose(0, 1) * scale  # [heads, T, head_dim]
        kv_heads = [head // group for head in some]
        tiled = [place for place, head in enumerate(some) if head in with_tiles]
        for row, probabilities in enumerate(_probabilities(scaled, keys, kv_heads, first_block_row, block)):
            reached = probabilities.shape[2]  # block columns
            mass[some, row, :reached] = probabilities.sum(-1).square().mean(1).sqrt()
            if top_p is not None and tiled:
                own = mass[[some[place] for place in tiled], row, None, :reached]
                keep = select_top_p(own, top_p, first_block_row=first_block_row + row)[:, 0]
                for place, columns_kept in zip(tiled, keep):
                    kept[some[place], row, :reached] = columns_kept
                    chosen = probabilities[place].index_select(1, columns_kept.nonzero()[:, 0])
                    tiles[some[place]].append(encode_tiles(chosen.transpose(0, 1), tile_dtype))
    if not bool(mass.isfinite().all()):
        raise ValueError("query or key: expected finite scores, got NaN or infinity")
    result = CompressedRows(first_block_row=first_block_row, block=block, mass=mass)
    if top_p is None:
        return result
    head_major = [one for of_head in tiles.values() for one in of_head]
    return replace(result, tiles=_tile_set(kept, head_major, tile_dtype, block))


def assemble_chunk(
    parts: Sequence[CompressedRows],
    *,
    chunk_index: int,
    chunk_tokens: int,
    block: int,
    num_heads: int,
    approximate: bool = False,
) -> AttentionMap:
    """One chunk's map from whatever parts of it were measured; block rows of a part outside the chunk are left out.

    Block rows that no part holds get row_counts 0, zero masses and no tiles. The map has tiles if the parts do.
    Raises ValueError for a `chunk_tokens` that is not a multiple of `block`, for two parts that hold the same block
    row, or for parts of another block, number of heads, or tile dtype (none included) than the others.
    """
    check_block(block)
    check_int("chunk_tokens", chunk_tokens, minimum=block)
    check_int("chunk_index", chunk_index, minimum=0)
    check_int("num_heads", num_heads, minimum=1)
    if chunk_tokens % block:
        raise ValueError(f"chunk_tokens: expected a multiple of block {block}, got {chunk_tokens}")
    rows = chunk_tokens // block
    begin, columns = chunk_index * rows, (chunk_index + 1) * rows
    sources: list[tuple[CompressedRows, int] | None] = [None] * rows  # part and its row, for each row of the chunk
    used = [part for part in parts if _overlap(part, begin, columns)]
    for part in used:
        _check_part(part, used[0], block, num_heads)
        for block_row in _overlap(part, begin, columns):
            if sources[block_row - begin] is not None:
                raise ValueError(f"parts: expected each block row once, got block row {block_row} twice")
            sources[block_row - begin] = (part, block_row - part.first_block_row)
    mass = torch.zeros(num_heads, rows, columns)
    for row, source in enumerate(sources):
        if source is not None:
            reached = min(source[0].mass.shape[2], columns)
            mass[:, row, :reached] = source[0].mass[:, source[1], :reached].cpu()
    with_tiles = [
        None if source is None or source[0].tiles is None else (source[0].tiles, source[1]) for source in sources
    ]
    return AttentionMap(
        chunk_index=chunk_index,
        block=block,
        mass=encode_mass(mass),
        row_counts=torch.tensor([0 if source is None else block for source in sources], dtype=torch.int32),
        tiles=None if not used or used[0].tiles is None else _gather_tiles(with_tiles, num_heads, used[0].tiles),
        approximate=approximate,
    )


def _check_rows(query: torch.Tensor, key: torch.Tensor, first_row: int, block: int) -> int:
    check_block(block)
    check_tensor("query", query, shape=("T", "Hq", "head_dim"), dtypes=FLOAT_DTYPES)
    check_tensor("key", key, shape=("L", "Hkv", query.shape[2]), dtypes=FLOAT_DTYPES, device=query.device)
    check_int("first_row", first_row, minimum=0)
    if query.shape[0] == 0 or query.shape[0] % block or first_row % block:
        got = f"T {query.shape[0]} and first_row {first_row}"
        raise ValueError(f"query: expected T > 0 and first_row to be multiples of block {block}, got {got}")
    if key.shape[0] < first_row + query.shape[0]:
        raise ValueError(f"key: expected at least {first_row + query.shape[0]} tokens, got {key.shape[0]}")
    return check_group(query.shape[1], key.shape[1])


def _in_groups(heads: Sequence[int], size: int) -> Iterator[list[int]]:
    """The heads in runs of at most `size`, at least one."""
    size = max(size, 1)
    for start in range(0, len(heads), size):
        yield list(heads[start : start + size])


def _probabilities(
    scaled: torch.Tensor, keys: torch.Tensor, kv_heads: Sequence[int], first_block_row: int, block: int
) -> Iterator[torch.Tensor]:
    """For each block row the causal softmax of all `scaled` heads: float32 [heads, block, block columns, block].

    scaled: [heads, T, head_dim], times the scale. keys: [Hkv, tokens, head_dim]. kv_heads: which keys each head reads.
    """
    future = torch.ones(block, block, dtype=torch.bool, device=scaled.device).triu(1)
    for row in range(scaled.shape[1] // block):
        reached = first_block_row + row + 1
        rows = scaled[:, row * block : (row + 1) * block]
        out = torch.empty(len(kv_heads), block, reached * block, device=scaled.device)
        for place, kv_head in enumerate(kv_heads):  # head by head: the scores of one stay in the CPU's cache
            scores = rows[place] @ keys[kv_head, : reached * block].T
            scores[:, -block:].masked_fill_(future, -torch.inf)
            torch.softmax(scores, -1, out=out[place])
        yield out.view(len(kv_heads), block, reached, block)


def _tile_set(kept: torch.Tensor, tiles: Sequence[torch.Tensor], dtype: torch.dtype, block: int) -> TileSet:
    """kept: bool [num_heads, R, C]; tiles: in the order of its nonzero block rows, each [n, block, block]."""
    values = torch.cat(list(tiles)) if tiles else torch.empty(0, block, block, dtype=dtype, device=kept.device)
    return TileSet(indptr=_indptr(kept.sum(-1)), indices=kept.nonzero()[:, 2].int(), values=values)


def _overlap(part: CompressedRows, begin: int, end: int) -> range:
    """The part's block rows within [begin, end)."""
    return range(max(part.first_block_row, begin), min(part.first_block_row + part.num_row_blocks, end))


def _check_part(part: CompressedRows, first: CompressedRows, block: int, num_heads: int) -> None:
    wanted = (block, num_heads, None if first.tiles is None else first.tiles.values.dtype)
    got = (part.block, part.mass.shape[0], None if part.tiles is None else part.tiles.values.dtype)
    if got != wanted:
        raise ValueError(f"parts: expected (block, num_heads, tile dtype) {wanted}, got {got}")


def _gather_tiles(sources: Sequence[tuple[TileSet, int] | None], num_heads: int, like: TileSet) -> TileSet:
    """The tiles of a chunk's block rows, head-major, on the host. sources: each block row's part and its row there."""
    spans = [None if source is None else source[0].indptr[:, source[1] : source[1] + 2].tolist() for source in sources]
    ends, indices, values = [], [like.indices[:0]], [like.values[:0]]
    for head in range(num_heads):
        for source, span in zip(sources, spans):
            if source is not None and span is not None:
                start, end = span[head]
                indices.append(source[0].indices[start:end])
                values.append(source[0].values[start:end])
            ends.append(0 if span is None else span[head][1] - span[head][0])
    return TileSet(
        indptr=_indptr(torch.tensor(ends).view(num_heads, -1)),
        indices=torch.cat(indices).cpu(),
        values=torch.cat(values).cpu(),
    )


def _indptr(counts: torch.Tensor) -> torch.Tensor:
    """counts [num_heads, R] of kept blocks -> i32 [num_heads, R + 1], offsets over all heads."""
    ends = counts.reshape(-1).cumsum(0).view_as(counts)
    indptr = torch.zeros(counts.shape[0], counts.shape[1] + 1, dtype=torch.int32, device=counts.device)
    indptr[:, 1:] = ends
    indptr[1:, 0] = ends[:-1, -1]
    return indptr
