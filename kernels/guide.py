"""Guide and static on the GPU: exact causal softmax attention inside the kept blocks, over paged K/V, varlen batch.

As `guide_reference.py`, for blocks of 64 or 128 and head_dim 64 or 128. Two kernels do the same: `guide_hopper.py` on
Hopper with blocks of 128 (warp-specialised; a third faster), and the plain Triton one below everywhere else, also in
Triton's interpreter. Scores are accumulated in float32; probabilities are rounded to the values' dtype for the second
product, as FlashAttention does.
"""

import math

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from mapflow.kernels.block_rows import BlockIndex, BlockRows
from mapflow.kernels.guide_hopper import guide_hopper
from mapflow.kernels.hopper import is_hopper
from mapflow.kernels.pack import KERNEL_DTYPES, Packed, check_kernel_kv, pack_both
from mapflow.kernels.paged import PagedKV
from mapflow.kernels.tensor_check import check_group, check_tensor
from mapflow.kernels.tuning import launch_config

LOG2_E = math.log2(math.e)


def guide_attention(
    query: torch.Tensor, kv: PagedKV, rows: BlockRows, index: BlockIndex, *, scale: float, out: torch.Tensor
) -> None:
    """Attend the rows of `rows` to the blocks that `index` keeps, and write them into `out`.

    query: bf16 or fp16 [N, Hr, head_dim], heads and head_dim contiguous. out: the same, any row stride; rows outside
    the segments stay as they are. kv: K and V of tokens [0, row_end) of each request, of the query's dtype; Hr is a
    multiple of its heads. scale: positive factor of the scores, 1 / sqrt(head_dim) as a rule.

    Raises ValueError for wrong shapes, dtypes or strides, head_dim other than 64 and 128, or a scale that is not
    positive. Never reads device memory back.
    """
    group = check_kernel_arguments(query, kv, rows, scale)
    check_tensor("out", out, shape=query.shape, dtypes=(query.dtype,), device=kv.device)
    if out.stride(2) != 1:
        raise ValueError("out: expected the head_dim axis to be contiguous")
    index.check_fits(rows, query.shape[1])
    keys, values = pack_both(kv, rows)
    if rows.block == 128 and is_hopper(kv.device):
        guide_hopper(query, keys, values, rows, index, scale * LOG2_E, out, group)
    else:
        _guide(query, keys, values, rows, index, scale * LOG2_E, out, group)


def check_kernel_arguments(query: torch.Tensor, kv: PagedKV, rows: BlockRows, scale: float) -> int:
    """Query heads per KV head; raise ValueError for anything that the kernels over queries and keys can't take."""
    check_kernel_kv(kv)
    shape = (rows.num_batch_rows, "Hr", kv.head_dim)
    check_tensor("query", query, shape=shape, dtypes=(kv.key_cache.dtype,), device=kv.device)
    if query.dtype not in KERNEL_DTYPES:
        raise ValueError(f"query: expected bfloat16 or float16, got {query.dtype}")
    if query.stride(2) != 1 or query.stride(1) != query.shape[2] or query.stride(0) % 8 or query.data_ptr() % 16:
        raise ValueError("query: expected contiguous heads, and rows that start at multiples of 16 bytes")
    if rows.device != kv.device:
        raise ValueError(f"rows: expected device {kv.device}, got {rows.device}")
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"scale: expected a positive number, got {scale}")
    return check_group(query.shape[1], kv.num_kv_heads)


def _guide(
    query: torch.Tensor,
    keys: Packed,
    values: Packed,
    rows: BlockRows,
    index: BlockIndex,
    qk_scale: float,
    out: torch.Tensor,
    group: int,
) -> None:
    head_dim = query.shape[2]
    config = launch_config("guide", rows.block, head_dim, query.device)
    block_n = config.pop("block_n")
    _guide_kernel[(rows.num_lines * group, query.shape[1] // group)](
        query,
        TensorDescriptor.from_tensor(keys.data.view(-1, head_dim), [block_n, head_dim]),
        TensorDescriptor.from_tensor(values.data.view(-1, head_dim), [block_n, head_dim]),
        out,
        rows.lines,
        index.columns,
        index.counts,
        qk_scale,
        rows.num_packed_tokens,
        rows.num_columns,
        query.stride(0),
        query.stride(1),
        out.stride(0),
        out.stride(1),
        GROUP=group,
        BLOCK=rows.block,
        BLOCK_N=block_n,
        HEAD_DIM=head_dim,
        STAGES=config["num_stages"],
        **config,
    )


@triton.jit
def line_and_head(GROUP: tl.constexpr):
    """Of a grid (lines x group, KV heads): KV head by KV head, so that those that run together share K and V in L2."""
    return tl.program_id(0) // GROUP, tl.program_id(1) * GROUP + tl.program_id(0) % GROUP


@triton.jit
def _softmax_step(scores, qk_scale, largest, total, acc):
    """Online softmax over one more tile of scores: its probabilities, and the running state brought up to date."""
    new_largest = tl.maximum(largest, tl.max(scores, 1) * qk_scale)
    probabilities = tl.exp2(scores * qk_scale - new_largest[:, None])
    rescale = tl.exp2(largest - new_largest)
    return probabilities, new_largest, total * rescale + tl.sum(probabilities, 1), acc * rescale[:, None]


@triton.jit(do_not_specialize=["num_packed_tokens", "max_columns"])
def _guide_kernel(
    query,
    keys,
    values,
    out,
    lines,
    columns,
    counts,
    qk_scale,
    num_packed_tokens,
    max_columns,
    stride_query_row,
    stride_query_head,
    stride_out_row,
    stride_out_head,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STAGES: tl.constexpr,
):
    at_line, head = line_and_head(GROUP)
    line = lines + at_line * 8
    block_row = tl.load(line + 1)
    token = block_row * BLOCK + tl.arange(0, BLOCK)
    mine = (token >= tl.load(line + 2)) & (token < tl.load(line + 3))
    batch_row = (token + tl.load(line + 4)).to(tl.int64)[:, None]
    lane = tl.arange(0, HEAD_DIM)[None, :]
    q = tl.load(query + batch_row * stride_query_row + head * stride_query_head + lane, mask=mine[:, None], other=0.0)
    kv_row = (head // GROUP) * num_packed_tokens + tl.load(line + 5)
    slot = at_line.to(tl.int64) * (tl.num_programs(1) * GROUP) + head
    column = columns + slot * max_columns
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    acc = tl.zeros([BLOCK, HEAD_DIM], tl.float32)
    PARTS: tl.constexpr = BLOCK // BLOCK_N
    for i in tl.range(0, (tl.load(counts + slot) - 1) * PARTS, num_stages=STAGES):  # the diagonal block comes last
        at = kv_row + tl.load(column + i // PARTS) * BLOCK + (i % PARTS) * BLOCK_N
        scores = tl.dot(q, keys.load([at, 0]).T)
        p, largest, total, acc = _softmax_step(scores, qk_scale, largest, total, acc)
        acc = tl.dot(p.to(q.dtype), values.load([at, 0]), acc)
    for part in tl.static_range(PARTS):
        start = block_row * BLOCK + part * BLOCK_N
        scores = tl.dot(q, keys.load([kv_row + start, 0]).T)
        past = token[:, None] >= (start + tl.arange(0, BLOCK_N))[None, :]
        scores = tl.where(past, scores, float("-inf"))
        p, largest, total, acc = _softmax_step(scores, qk_scale, largest, total, acc)
        acc = tl.dot(p.to(q.dtype), values.load([kv_row + start, 0]), acc)
    result = (acc / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + batch_row * stride_out_row + head * stride_out_head + lane, result, mask=mine[:, None])
