"""Guide: the receiver's own exact softmax attention, inside kept blocks only. Plain torch, also the CPU path.

For each head and block row it takes the kept blocks of K and V, so the work is proportional to the density and no
padding is computed; what lies in dropped blocks is never read into a result. Accumulates in float32.
"""

from collections.abc import Sequence

import torch

from mapflow.kernels.paged import PagedKV
from mapflow.kernels.row_segment import RowSegment, check_segments
from mapflow.kernels.tensor_check import FLOAT_DTYPES, check_block, check_group, check_tensor
from mapflow.kernels.top_p import causal_blocks


def guide_attention(
    query: torch.Tensor,
    kv: PagedKV,
    segments: Sequence[RowSegment],
    masks: Sequence[torch.Tensor],
    *,
    block: int,
    scale: float,
    out: torch.Tensor,
) -> None:
    """Attend the rows of `segments` to the blocks that their masks keep, and write them into `out`.

    query: float [N, Hr, head_dim], packed batch. out: float [N, Hr, head_dim]; rows outside the segments stay as they
    are. kv: K and V of tokens [0, row_end) of each request, the segment's own included; Hr is a multiple of its heads.
    masks: one bool [Hr, R, C] a segment, R = the block rows it touches (cut ones count), C >= the block columns up to
    its end; columns past the diagonal are ignored. scale: factor of the scores, 1 / sqrt(head_dim) as a rule.

    Raises ValueError for wrong shapes, or a block row that keeps no causal block in some head. With every block kept
    this is causal attention.
    """
    check_block(block)
    num_rows, num_heads, head_dim = query.shape if query.dim() == 3 else (0, 0, 0)
    shape = ("N", "Hr", kv.head_dim)
    check_tensor("query", query, shape=shape, dtypes=FLOAT_DTYPES, device=kv.device)
    check_tensor("out", out, shape=(num_rows, num_heads, head_dim), dtypes=FLOAT_DTYPES, device=kv.device)
    check_group(num_heads, kv.num_kv_heads)
    check_segments(segments, num_rows)
    if len(masks) != len(segments):
        raise ValueError(f"masks: expected one for each of {len(segments)} segments, got {len(masks)}")
    kept = [_check_mask(mask, segment, num_heads, block, kv.device) for mask, segment in zip(masks, segments)]
    for mask, segment in zip(kept, segments):
        _attend_segment(query, kv, segment, mask, block, scale, out)


def _check_mask(
    mask: torch.Tensor, segment: RowSegment, num_heads: int, block: int, device: torch.device
) -> torch.Tensor:
    """The causal part of the mask, bool [Hr, R, first_block_row + R]."""
    rows = segment.block_rows(block)
    check_tensor("mask", mask, shape=(num_heads, len(rows), "C"), dtypes=(torch.bool,), device=device)
    if mask.shape[2] < rows.stop:
        raise ValueError(f"mask: expected at least {rows.stop} block columns, got {mask.shape[2]}")
    causal = mask[:, :, : rows.stop] & causal_blocks(rows.start, len(rows), rows.stop, mask.device)
    if not bool(causal.any(-1).all()):
        raise ValueError("mask: expected at least one causal block in every block row of every head")
    return causal


def _attend_segment(
    query: torch.Tensor,
    kv: PagedKV,
    segment: RowSegment,
    mask: torch.Tensor,
    block: int,
    scale: float,
    out: torch.Tensor,
) -> None:
    """Attend one segment; mask: bool [Hr, R, first_block_row + R], causal, no row empty."""
    group = check_group(query.shape[1], kv.num_kv_heads)
    keys, values = (_by_block(tokens, block) for tokens in kv.gather(segment.block_table, 0, segment.row_end))
    scaled = query[segment.batch_rows].float().mul(scale).transpose(0, 1).contiguous()  # [Hr, rows, head_dim]
    result = torch.empty_like(scaled)
    first_block_row = segment.block_rows(block).start
    future = torch.ones(block, block, dtype=torch.bool, device=query.device).triu(1)
    columns = mask.nonzero()[:, 2]  # kept block columns, ordered by head, then block row
    ends = mask.sum(-1).reshape(-1).cumsum(0).tolist()
    has_diagonal = mask.diagonal(first_block_row, dim1=1, dim2=2).reshape(-1).tolist()
    for place, (start, end) in enumerate(zip([0, *ends], ends)):
        head, block_row = place // mask.shape[1], first_block_row + place % mask.shape[1]
        row_begin, row_end = segment.rows_within(block_row, block)
        rows = slice(row_begin - segment.row_begin, row_end - segment.row_begin)
        kept = columns[start:end]
        scores = scaled[head, rows] @ _take(keys[head // group], kept).T  # [rows, kept * block]
        if has_diagonal[place]:
            in_block = slice(row_begin - block_row * block, row_end - block_row * block)
            scores[:, -block:].masked_fill_(future[in_block], -torch.inf)  # the diagonal block comes last
        torch.mm(scores.softmax(-1), _take(values[head // group], kept), out=result[head, rows])
    out[segment.batch_rows] = result.transpose(0, 1)


def _by_block(tokens: torch.Tensor, block: int) -> torch.Tensor:
    """[num_tokens, num_kv_heads, D] -> float32 [num_kv_heads, num_blocks, block, D], the last block padded with 0."""
    num_tokens, num_kv_heads, head_dim = tokens.shape
    padded = torch.zeros(num_kv_heads, -(-num_tokens // block) * block, head_dim, device=tokens.device)
    padded[:, :num_tokens] = tokens.transpose(0, 1)
    return padded.view(num_kv_heads, -1, block, head_dim)


def _take(blocks: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """The kept blocks of [num_blocks, block, D] below each other: [kept * block, D]. No copy if they are neighbours."""
    first, last = int(kept[0]), int(kept[-1])
    if last - first + 1 == kept.shape[0]:
        return blocks[first : last + 1].view(-1, blocks.shape[2])
    return blocks.index_select(0, kept).view(-1, blocks.shape[2])
