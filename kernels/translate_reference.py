"""Translate: the sender's stored tiles, combined over heads, times the receiver's V. Plain torch, also the CPU path.

    out[row, i] = sum_l head_weight[i, l] * sum_c tile(head_index[i, l], row, c) @ V[c, kv head of i]

No queries, keys or softmax, and no dense map. A block that the sender dropped counts as zero, so the weights of a row
need not sum to 1; nothing is renormalised (forcing rows to sum to 1 was measured and can blow up). Each sender head
multiplies V once for all receiver heads that use it. Accumulates in float32.
"""

from collections.abc import Sequence

import torch

from mapflow.kernels.attention_map import AttentionMap, TileSet
from mapflow.kernels.mask import check_consecutive
from mapflow.kernels.paged import PagedKV
from mapflow.kernels.row_segment import RowSegment, check_segments
from mapflow.kernels.tensor_check import FLOAT_DTYPES, check_group, check_tensor
from mapflow.kernels.tile_codec import decode_tiles


def translate_attention(
    kv: PagedKV,
    segments: Sequence[RowSegment],
    maps: Sequence[Sequence[AttentionMap]],
    *,
    head_index: torch.Tensor,
    head_weight: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Write the translated attention output of the rows of `segments` into `out`.

    kv: V of tokens [0, row_end) of each request (K is not read). maps: for each segment the consecutive chunks that
    cover its rows, from the first to the last, with tiles. head_index: i32 [Hr, k], heads *of the maps as given* (their
    first axis, so renumber after reading only some heads of a blob). head_weight: float32 [Hr, k]. A head named twice
    counts twice. out: float [N, Hr, head_dim]; rows outside the segments stay as they are.

    Raises ValueError for wrong shapes, heads that the maps lack, NaN weights, or maps that don't cover a segment: a
    chunk absent, without tiles, with a touched block row that was not measured whole, or with a head whose tiles were
    not stored. Nothing is written then.
    """
    shape = ("N", "Hr", kv.head_dim)
    check_tensor("out", out, shape=shape, dtypes=FLOAT_DTYPES, device=kv.device)
    num_rows, num_heads, _ = out.shape
    group = check_group(num_heads, kv.num_kv_heads)
    check_tensor("head_index", head_index, shape=(num_heads, "k"), dtypes=(torch.int32,))
    check_tensor("head_weight", head_weight, shape=head_index.shape, dtypes=(torch.float32,))
    if not bool(head_weight.isfinite().all()):
        raise ValueError("head_weight: expected finite values, got NaN or infinity")
    check_segments(segments, num_rows)
    if len(maps) != len(segments):
        raise ValueError(f"maps: expected one sequence for each of {len(segments)} segments, got {len(maps)}")
    dense_weights = []
    for segment, chunks in zip(segments, maps):
        check_consecutive(chunks)
        dense_weights.append(dense_head_weights(head_index, head_weight, chunks[0].num_heads))
        _check_maps(segment, chunks, kv.device, dense_weights[-1].any(0))
    for segment, chunks, weights in zip(segments, maps, dense_weights):
        out[segment.batch_rows] = _translate_segment(kv, segment, chunks, weights.view(-1, group, weights.shape[1]))


def _check_maps(
    segment: RowSegment, chunks: Sequence[AttentionMap], device: torch.device, used_heads: torch.Tensor
) -> None:
    """used_heads: bool [sender heads]."""
    covered = (chunks[0].row_begin, chunks[-1].row_end)
    if segment.row_begin < covered[0] or segment.row_end > covered[1]:
        wanted = f"[{segment.row_begin}, {segment.row_end})"
        raise ValueError(f"maps: expected chunks that cover rows {wanted}, got [{covered[0]}, {covered[1]})")
    touched = segment.block_rows(chunks[0].block)
    for chunk in chunks:
        if chunk.mass.device != device:
            raise ValueError(f"maps: expected device {device}, got {chunk.mass.device}")
        rows = range(
            max(touched.start, chunk.first_block_row), min(touched.stop, chunk.first_block_row + chunk.num_row_blocks)
        )
        if not rows:
            continue
        if chunk.tiles is None:
            raise ValueError(f"maps: expected tiles in chunk {chunk.chunk_index}, got masses only")
        own = slice(rows.start - chunk.first_block_row, rows.stop - chunk.first_block_row)
        if not bool(chunk.measured[own].all()):
            raise ValueError(f"maps: expected every row of chunk {chunk.chunk_index}'s used block rows to be measured")
        stored = chunk.tiles.indptr.diff(dim=1)[:, own].all(1)  # top-p keeps the diagonal: no tiles means not wanted
        if not bool(stored[used_heads].all()):
            missing = (used_heads & ~stored).nonzero()[:, 0].tolist()
            raise ValueError(f"maps: expected tiles of every head used, got none for {missing} in {chunk.chunk_index}")


def dense_head_weights(head_index: torch.Tensor, head_weight: torch.Tensor, num_sender_heads: int) -> torch.Tensor:
    """float32 [Hr, num_sender_heads]; raises ValueError for a head outside the maps."""
    if head_index.numel() and not bool(((head_index >= 0) & (head_index < num_sender_heads)).all()):
        low, high = (int(bound) for bound in head_index.aminmax())
        raise ValueError(f"head_index: expected heads 0 to {num_sender_heads - 1} of the maps, got {low} to {high}")
    dense = head_weight.new_zeros(head_weight.shape[0], num_sender_heads)
    return dense.scatter_add_(1, head_index.long(), head_weight)


def _translate_segment(
    kv: PagedKV, segment: RowSegment, chunks: Sequence[AttentionMap], weights: torch.Tensor
) -> torch.Tensor:
    """float32 [num_rows, Hr, head_dim]; weights: [num_kv_heads, heads of a group, sender heads]."""
    block = chunks[0].block
    values = _by_block(kv.gather_values(segment.block_table, 0, segment.row_end), block)
    result = torch.zeros(segment.num_rows, weights.shape[0], weights.shape[1], kv.head_dim, device=kv.device)
    for sender_head in range(weights.shape[2]):
        weight = weights[:, :, sender_head]  # [num_kv_heads, heads of a group]
        readers = weight.any(1).nonzero()[:, 0]  # KV heads whose group uses this sender head
        if readers.numel() == 0:
            continue
        read = values if len(readers) == values.shape[2] else values[:, :, readers].contiguous()
        product = torch.empty(segment.num_rows, len(readers), kv.head_dim, device=kv.device)
        for block_row in segment.block_rows(block):
            begin, end = segment.rows_within(block_row, block)
            chunk = chunks[block_row // chunks[0].num_row_blocks - chunks[0].chunk_index]
            assert chunk.tiles is not None  # _check_maps saw to it
            place = (sender_head, block_row - chunk.first_block_row)
            in_block = slice(begin - block_row * block, end - block_row * block)
            rows = product[begin - segment.row_begin : end - segment.row_begin].view(end - begin, -1)
            _multiply_row(chunk.tiles, place, in_block, read, rows)
        result[:, readers] += product[:, :, None] * weight[readers][:, :, None]
    return result.view(segment.num_rows, -1, kv.head_dim)


def _by_block(tokens: torch.Tensor, block: int) -> torch.Tensor:
    """[num_tokens, num_kv_heads, D] -> float32 [num_blocks, block, num_kv_heads, D], the last block padded with 0."""
    padded = tokens.new_zeros(-(-tokens.shape[0] // block) * block, *tokens.shape[1:], dtype=torch.float32)
    padded[: tokens.shape[0]] = tokens
    return padded.view(-1, block, *tokens.shape[1:])


def _multiply_row(
    tiles: TileSet, place: tuple[int, int], in_block: slice, values: torch.Tensor, out: torch.Tensor
) -> None:
    """out [rows, heads * D] = the tiles of (head, block row) `place`, rows `in_block`, times their blocks of V."""
    head, row = place
    start, end = tiles.indptr[head, row : row + 2].tolist()
    read = values.index_select(0, tiles.indices[start:end])  # [kept, block, heads, D]
    stored = decode_tiles(tiles.values[start:end, in_block])  # [kept, rows, block]
    flat = stored.transpose(0, 1).reshape(out.shape[0], -1)  # [rows, kept * block]
    torch.mm(flat, read.view(flat.shape[1], -1), out=out)
