"""One attention map from several of the same chunk: their heads side by side, or the rows that each measured."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from mapflow.kernels.attention_map import AttentionMap, TileSet
from mapflow.kernels.tile_codec import TILE_BITS


def join_heads(parts: Sequence[AttentionMap]) -> AttentionMap:
    """One map with the heads of all parts, in order; a row counts as measured as far as every part measured it.

    Raises ValueError if the parts are not of one chunk, block and kind.
    """
    first = parts[0]
    for one in parts[1:]:
        same = (one.chunk_index, one.block, one.mass.shape[1:], one.tiles is None, one.approximate)
        if same != (first.chunk_index, first.block, first.mass.shape[1:], first.tiles is None, first.approximate):
            raise ValueError("parts: expected maps of one chunk, block and kind")
    if len(parts) == 1:
        return first
    tiles = [one.tiles for one in parts if one.tiles is not None]
    starts = [0]
    for some in tiles:
        starts.append(starts[-1] + some.num_tiles)
    joined = None
    if tiles:
        joined = TileSet(
            indptr=torch.cat([some.indptr + start for some, start in zip(tiles, starts)]),
            indices=torch.cat([some.indices for some in tiles]),
            values=torch.cat([some.values for some in tiles]),
        )
    return replace(
        first,
        mass=torch.cat([one.mass for one in parts]),
        row_counts=torch.stack([one.row_counts for one in parts]).amin(0),
        tiles=joined,
    )


def join_rows(parts: Sequence[AttentionMap]) -> AttentionMap:
    """One map with the rows of all parts, on the host; of a row that several parts measured, the last one's.

    Raises ValueError if the parts are not of one chunk, block, number of heads and kind of tiles.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    kind = (first.chunk_index, first.block, first.mass.shape, first.tile_dtype)
    if any((one.chunk_index, one.block, one.mass.shape, one.tile_dtype) != kind for one in parts[1:]):
        raise ValueError("parts: expected maps of one chunk, block, number of heads and kind of tiles")
    owner = torch.stack([(part + 1) * one.measured for part, one in enumerate(parts)]).amax(0) - 1
    rows = torch.arange(first.num_row_blocks)
    is_owned = owner >= 0
    mass = torch.stack([one.mass for one in parts])[owner, :, rows].transpose(0, 1) * is_owned[:, None]
    row_counts = torch.stack([one.row_counts for one in parts])[owner, rows] * is_owned
    sets = [one.tiles for one in parts if one.tiles is not None]
    return replace(first, mass=mass, row_counts=row_counts, tiles=_join_row_tiles(sets, owner) if sets else None)


def _join_row_tiles(sets: Sequence[TileSet], owner: torch.Tensor) -> TileSet:
    """owner: i64 [num_row_blocks], whose tiles a row has; -1 for none."""
    rows = torch.arange(owner.shape[0])
    bases = torch.tensor([0, *(one.num_tiles for one in sets)]).cumsum(0)[:-1, None, None]
    starts = (torch.stack([one.indptr[:, :-1] for one in sets]) + bases)[owner, :, rows].T
    counts = torch.stack([one.indptr.diff(dim=1) for one in sets])[owner, :, rows].T * (owner >= 0)
    ends = counts.flatten().cumsum(0)
    shift = starts.flatten() - ends + counts.flatten()
    index = torch.arange(int(ends[-1])) + shift.repeat_interleave(counts.flatten())
    indptr = torch.zeros(counts.shape[0], counts.shape[1] + 1, dtype=torch.int32)
    indptr[:, 1:] = ends.view_as(counts)
    indptr[1:, 0] = indptr[:-1, -1]
    values = torch.cat([one.values.view(TILE_BITS[one.values.dtype]) for one in sets]).index_select(0, index)
    return TileSet(
        indptr=indptr,
        indices=torch.cat([one.indices for one in sets]).index_select(0, index),
        values=values.view(sets[0].values.dtype),
    )
