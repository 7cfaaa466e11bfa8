"""The compressor's second pass on the GPU: the probabilities of the kept blocks, written as tiles into an arena.

As `compress_reference.compress_rows` does for its tiles, from the log-sum-exp that the first pass (`compress.py`) left.
Block rows are whole here: which blocks a row keeps is known only once all of its rows are measured. On Hopper with
blocks of 128 and e4m3 tiles, `tiles_hopper.py` does the same faster.
"""

import math

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from mapflow.kernels.block_rows import BlockIndex, BlockRows
from mapflow.kernels.guide import LOG2_E, check_kernel_arguments, line_and_head
from mapflow.kernels.hopper import is_hopper
from mapflow.kernels.pack import pack
from mapflow.kernels.paged import PagedKV
from mapflow.kernels.tensor_check import check_tensor
from mapflow.kernels.tile_codec import TILE_SCALE, check_tile_dtype
from mapflow.kernels.tiles_hopper import tiles_hopper
from mapflow.kernels.tuning import launch_config


def store_tiles(
    query: torch.Tensor,
    kv: PagedKV,
    rows: BlockRows,
    index: BlockIndex,
    row_lse: torch.Tensor,
    *,
    scale: float,
    tile_dtype: torch.dtype,
    arena: torch.Tensor,
    offsets: torch.Tensor,
) -> None:
    """Write the tiles of every kept block.

    query, kv, scale, row_lse: as in `compress.block_masses`, every row measured, with exact keys (`key_dtype=None`):
    probabilities are off by as much as their row's log-sum-exp is. arena: u8 [bytes]. offsets: i64 [W, Hq], multiples
    of 64: where in the arena the tiles of a line and head begin, one behind the other in the order of `index`;
    negative: none are wanted. The caller has room for all of them (an extent that it reserved).

    Raises ValueError for wrong shapes or dtypes, or a segment that starts or ends inside a block.
    """
    group = check_kernel_arguments(query, kv, rows, scale)
    num_heads, head_dim = query.shape[1:]
    index.check_fits(rows, num_heads)
    check_tile_dtype(tile_dtype)
    for segment in rows.segments:
        if segment.row_begin % rows.block or segment.row_end % rows.block:
            wanted = f"whole blocks of {rows.block} rows"
            raise ValueError(f"segments: expected {wanted}, got rows [{segment.row_begin}, {segment.row_end})")
    shape = (num_heads, query.shape[0])
    check_tensor("row_lse", row_lse, shape=shape, dtypes=(torch.float32,), device=kv.device)
    check_tensor("arena", arena, shape=("bytes",), dtypes=(torch.uint8,), device=kv.device)
    shape = (rows.num_lines, num_heads)
    check_tensor("offsets", offsets, shape=shape, dtypes=(torch.int64,), device=kv.device)
    e4m3 = tile_dtype == torch.float8_e4m3fn
    if e4m3 and rows.block == 128 and is_hopper(kv.device):
        keys = pack(kv.key_cache, rows, interleaved=True)
        tiles_hopper(query, keys, rows, index, row_lse, scale * LOG2_E, arena, offsets, group)
        return
    keys = pack(kv.key_cache, rows)
    config = launch_config("tiles", rows.block, head_dim, kv.device)
    _tiles_kernel[(rows.num_lines * group, num_heads // group)](
        query,
        TensorDescriptor.from_tensor(keys.data.view(-1, head_dim), [rows.block, head_dim]),
        row_lse,
        arena,
        offsets,
        rows.lines,
        index.columns,
        index.counts,
        scale * LOG2_E,
        rows.num_packed_tokens,
        rows.num_columns,
        query.stride(0),
        query.stride(1),
        row_lse.stride(0),
        GROUP=group,
        BLOCK=rows.block,
        HEAD_DIM=head_dim,
        E4M3=e4m3,
        LOG2_SCALE=math.log2(TILE_SCALE) if e4m3 else 0.0,
        STAGES=config["num_stages"],
        **config,
    )


@triton.jit(do_not_specialize=["num_packed_tokens", "max_columns", "stride_lse"])
def _tiles_kernel(
    query,
    keys,
    row_lse,
    arena,
    offsets,
    lines,
    columns,
    counts,
    qk_scale,
    num_packed_tokens,
    max_columns,
    stride_query_row,
    stride_query_head,
    stride_lse,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    E4M3: tl.constexpr,
    LOG2_SCALE: tl.constexpr,
    STAGES: tl.constexpr,
):
    at_line, head = line_and_head(GROUP)
    line = lines + at_line * 8
    block_row = tl.load(line + 1)
    side = tl.arange(0, BLOCK)
    batch_row = (block_row * BLOCK + side + tl.load(line + 4)).to(tl.int64)
    at = batch_row[:, None] * stride_query_row + head * stride_query_head
    q = tl.load(query + at + tl.arange(0, HEAD_DIM)[None, :])
    lse = tl.load(row_lse + head.to(tl.int64) * stride_lse + batch_row) - LOG2_SCALE
    kv_row = (head // GROUP) * num_packed_tokens + tl.load(line + 5)
    slot = at_line.to(tl.int64) * (tl.num_programs(1) * GROUP) + head
    column = columns + slot * max_columns
    offset = tl.load(offsets + slot)
    count = tl.where(offset < 0, 0, tl.load(counts + slot))
    place = arena + tl.multiple_of(offset, 64)
    if E4M3:
        place = place.to(tl.pointer_type(tl.float8e4nv))
    else:
        place = place.to(tl.pointer_type(tl.bfloat16))
    in_tile = side[:, None] * BLOCK + side[None, :]
    for t in tl.range(0, count, num_stages=STAGES):
        c = tl.load(column + t)
        scores = tl.dot(q, keys.load([kv_row + c * BLOCK, 0]).T)
        p = tl.exp2(scores * qk_scale - lse[:, None])
        p = tl.where((c < block_row) | (side[:, None] >= side[None, :]), p, 0.0)
        p = tl.minimum(p, 256.0 if E4M3 else 1.0)  # a probability is at most 1, whatever rounding says
        tl.store(place + tl.cast(t, tl.int64) * (BLOCK * BLOCK) + in_tile, p.to(place.dtype.element_ty))
