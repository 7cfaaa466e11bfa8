"""Pages into packed operands: the keys or values of a step's requests, contiguous, as bf16/fp16 or as scaled e4m3.

The attention kernels read K and V of a block as one tile that the copy engine can fetch; a cache of 16-token pages has
no such tiles. Packing reads and writes each token once (2 x 67 MB a layer at 32k tokens of Qwen3-8B, 0.03 ms of an
H200), keeps every concern of paging in this file, and is where fp8 operands come from: e4m3 with one scale a KV head,
its largest magnitude over 448. What lies outside a request's tokens (stale pages, the end of the last page) becomes 0.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from mapflow.kernels.block_rows import BlockRows
from mapflow.kernels.paged import PagedKV

E4M3_MAX = tl.constexpr(448.0)
SMALLEST = tl.constexpr(1e-15)  # magnitude that is still scaled up; below it everything is 0
HEAD_DIMS = (64, 128)
KERNEL_DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Packed:
    """Keys or values of all requests of a step, request after request, each padded to whole blocks with zeros."""

    data: torch.Tensor  # [num_kv_heads, tokens, head_dim]; transposed: [num_kv_heads, blocks, head_dim, block]
    scale: torch.Tensor | None = None  # float32 [num_kv_heads], e4m3 only: value = data * scale


def check_kernel_kv(kv: PagedKV) -> None:
    """Raise ValueError for a cache that the kernels cannot read: dtype, head_dim, or values that are not contiguous."""
    if kv.key_cache.dtype not in KERNEL_DTYPES:
        raise ValueError(f"kv: expected dtype bfloat16 or float16, got {kv.key_cache.dtype}")
    if kv.head_dim not in HEAD_DIMS:
        raise ValueError(f"head_dim: expected 64 or 128, got {kv.head_dim}")
    if kv.key_cache.stride(3) != 1 or kv.value_cache.stride(3) != 1:
        raise ValueError("kv: expected the head_dim axis to be contiguous")


def pack(cache: torch.Tensor, rows: BlockRows, *, interleaved: bool = False) -> Packed:
    """Copy a cache ([num_pages, num_kv_heads, page_size, head_dim], any page strides) as it is.

    `interleaved`, for blocks of 128: row 64h + 8j + 2q + b of a block is its token 64h + 16q + 2j + b (j < 8, q < 4).
    """
    data = cache.new_empty(cache.shape[1], rows.num_packed_tokens, cache.shape[3])
    _launch(cache, rows, data, None, None, interleaved=interleaved)
    return Packed(data=data)


def pack_both(kv: PagedKV, rows: BlockRows) -> tuple[Packed, Packed]:
    """Keys and values, as `pack`; in one launch where they are strided alike."""
    keys, values = kv.key_cache, kv.value_cache
    if keys.stride() != values.stride():
        return pack(keys, rows), pack(values, rows)
    data = keys.new_empty(2, keys.shape[1], rows.num_packed_tokens, keys.shape[3])
    _launch(keys, rows, data, None, None, second=values)
    return Packed(data=data[0]), Packed(data=data[1])


def pack_e4m3(cache: torch.Tensor, rows: BlockRows, *, transposed: bool = False) -> Packed:
    """Quantise a cache to e4m3, one scale a head. `transposed`: each block as [head_dim, block], as V is multiplied."""
    heads, tokens, head_dim = cache.shape[1], rows.num_packed_tokens, cache.shape[3]
    shape = (heads, tokens // rows.block, head_dim, rows.block) if transposed else (heads, tokens, head_dim)
    largest = torch.zeros(heads, dtype=torch.float32, device=cache.device)
    _launch(cache, rows, None, largest, None)
    data = torch.empty(shape, dtype=torch.float8_e4m3fn, device=cache.device)
    scale = torch.empty_like(largest)
    _launch(cache, rows, data, largest, scale, transposed=transposed)
    return Packed(data=data, scale=scale)


def _launch(
    cache: torch.Tensor,
    rows: BlockRows,
    out: torch.Tensor | None,
    largest: torch.Tensor | None,
    scale: torch.Tensor | None,
    *,
    transposed: bool = False,
    interleaved: bool = False,
    second: torch.Tensor | None = None,
) -> None:
    _pack_kernel[(rows.packed_blocks.shape[0], cache.shape[1], 1 if second is None else 2)](
        cache,
        second,
        rows.block_tables,
        rows.packed_blocks,
        out,
        largest,
        scale,
        rows.block_tables.shape[1],
        rows.num_packed_tokens,
        cache.stride(0),
        cache.stride(1),
        cache.stride(2),
        PAGE=cache.shape[2],
        BLOCK=rows.block,
        HEAD_DIM=cache.shape[3],
        MEASURED=out is None,
        TRANSPOSED=transposed,
        INTERLEAVED=interleaved,
        SCALED=scale is not None,
        BOTH=second is not None,
        num_warps=8,
    )


@triton.jit
def _load_block(cache, tables, block, max_pages, stride_page, stride_head, stride_token, PAGE, BLOCK, HEAD_DIM):
    """Tokens of one packed block, [BLOCK, HEAD_DIM], zeros where the request has none."""
    token = tl.load(block + 1) + tl.arange(0, BLOCK)
    inside = token < tl.load(block + 2)
    table = tables + tl.load(block) * max_pages
    page = tl.load(table + token // PAGE, mask=inside, other=0).to(tl.int64)
    at = page * stride_page + tl.program_id(1) * stride_head + (token % PAGE) * stride_token
    return tl.load(cache + at[:, None] + tl.arange(0, HEAD_DIM)[None, :], mask=inside[:, None], other=0.0)


@triton.jit(do_not_specialize=["max_pages", "num_tokens"])
def _pack_kernel(
    cache,
    second,
    tables,
    blocks,
    out,
    largest,
    scale,
    max_pages,
    num_tokens,
    stride_page,
    stride_head,
    stride_token,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MEASURED: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    SCALED: tl.constexpr,
    BOTH: tl.constexpr,
):
    """MEASURED: largest[head] = max(largest[head], largest magnitude of the block). Otherwise
    out[head, block] = the block, scaled to e4m3 if SCALED, as [HEAD_DIM, BLOCK] if TRANSPOSED. The heads of a second
    cache come behind those of the first if BOTH.
    """
    head = tl.program_id(1)
    if BOTH:
        if tl.program_id(2) == 1:
            cache = second
    block = blocks + tl.program_id(0) * 4
    x = _load_block(cache, tables, block, max_pages, stride_page, stride_head, stride_token, PAGE, BLOCK, HEAD_DIM)
    if MEASURED:
        tl.atomic_max(largest + head, tl.max(tl.max(tl.abs(x.to(tl.float32)), 1), 0))
    else:
        if SCALED:
            most = tl.maximum(tl.load(largest + head), SMALLEST)
            x = (x.to(tl.float32) * (E4M3_MAX / most)).to(tl.float8e4nv)
            if tl.program_id(0) == 0:
                tl.store(scale + head, most / E4M3_MAX)
        row_of_heads = tl.program_id(2) * tl.num_programs(1) + head
        place = out + (row_of_heads.to(tl.int64) * num_tokens + tl.program_id(0) * BLOCK) * HEAD_DIM
        if TRANSPOSED:
            where = tl.arange(0, HEAD_DIM)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
            tl.store(place + where, tl.trans(x))
        else:
            row = tl.arange(0, BLOCK)
            if INTERLEAVED:
                row = row // 64 * 64 + row % 16 // 2 * 8 + row % 64 // 16 * 2 + row % 2
            tl.store(place + row[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :], x)
