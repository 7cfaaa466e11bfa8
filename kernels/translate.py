"""Translate on the GPU: a sender's stored tiles, weighted per head on chip, times the receiver's paged V, varlen batch.

As `translate_reference.py`, for blocks of 64 or 128 and head_dim 64 or 128. No query, key or softmax: what limits it is
the bytes of tiles and of V that reach the multiprocessors. So e4m3 tiles are multiplied by e4m3 values as they lie,
half the bytes of bf16 at twice the rate of the tensor cores; it costs 2.7e-2 of relative error against 1.7e-3
(`value_dtype`), a tenth of what translation itself costs. bf16 tiles take V as it is.

A head's k tile lists follow each other in one accumulator: before list n it is scaled by w[n-1] / w[n], and by the
last weight at the end, so that no product is rounded twice. Lists are ordered by rising |w|, so no ratio exceeds 1.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from mapflow.kernels.block_rows import BlockRows
from mapflow.kernels.guide import line_and_head
from mapflow.kernels.map_table import MapTable
from mapflow.kernels.pack import KERNEL_DTYPES, Packed, check_kernel_kv, pack, pack_e4m3
from mapflow.kernels.paged import PagedKV
from mapflow.kernels.tensor_check import check_group, check_tensor
from mapflow.kernels.tuning import launch_config


def translate_attention(
    kv: PagedKV,
    rows: BlockRows,
    maps: MapTable,
    *,
    head_index: torch.Tensor,
    head_weight: torch.Tensor,
    out: torch.Tensor,
    value_dtype: torch.dtype | None = None,
) -> None:
    """Write the translated attention output of the rows of `rows` into `out`.

    kv: V of tokens [0, row_end) of each request (K is not read). maps: with tiles, every touched block row measured
    whole (the caller sees to it: the host knows, the device is not asked). head_index: i32 [Hr, k], heads of the maps.
    head_weight: float32 [Hr, k], finite. out: bf16 or fp16 [N, Hr, head_dim]; rows outside the segments stay as they
    are. value_dtype: torch.float8_e4m3fn (default with e4m3 tiles) or the cache's own.

    Raises ValueError for wrong shapes or dtypes, or maps without tiles.
    """
    group = _check(kv, rows, maps, out)
    num_heads = out.shape[1]
    check_tensor("head_index", head_index, shape=(num_heads, "k"), dtypes=(torch.int32,), device=kv.device)
    check_tensor("head_weight", head_weight, shape=head_index.shape, dtypes=(torch.float32,), device=kv.device)
    if head_index.shape[1] > 1:
        order = head_weight.abs().argsort(1)
        head_index, head_weight = head_index.gather(1, order), head_weight.gather(1, order)
    values = _pack_values(kv, rows, maps, value_dtype)
    config = launch_config(_variant("translate", maps, values), rows.block, kv.head_dim, kv.device)
    _translate_kernel[(rows.num_lines * group, num_heads // group)](
        maps.arena,
        _value_tiles(values, rows.block),
        values.scale,
        out,
        rows.lines,
        maps.sections,
        head_index.contiguous(),
        head_weight.contiguous(),
        maps.num_heads,
        head_index.shape[1],
        rows.num_packed_tokens,
        out.stride(0),
        out.stride(1),
        GROUP=group,
        BLOCK=rows.block,
        HEAD_DIM=kv.head_dim,
        TILE_E4M3=maps.tile_dtype == torch.float8_e4m3fn,
        VALUE_E4M3=values.scale is not None,
        SCALE=1.0 / maps.tile_scale,
        STAGES=config["num_stages"],
        **config,
    )


def _check(kv: PagedKV, rows: BlockRows, maps: MapTable, out: torch.Tensor) -> int:
    """Receiver heads per KV head; raises ValueError."""
    check_kernel_kv(kv)
    shape = (rows.num_batch_rows, "Hr", kv.head_dim)
    check_tensor("out", out, shape=shape, dtypes=KERNEL_DTYPES, device=kv.device)
    if out.stride(2) != 1:
        raise ValueError("out: expected the head_dim axis to be contiguous")
    maps.check_fits(rows)
    if maps.tile_dtype is None:
        raise ValueError("maps: expected tiles, got masses only")
    return check_group(out.shape[1], kv.num_kv_heads)


def _pack_values(kv: PagedKV, rows: BlockRows, maps: MapTable, value_dtype: torch.dtype | None) -> Packed:
    if value_dtype is None:
        value_dtype = maps.tile_dtype if maps.tile_dtype == torch.float8_e4m3fn else kv.value_cache.dtype
    if value_dtype == torch.float8_e4m3fn:
        if maps.tile_dtype != torch.float8_e4m3fn:
            raise ValueError(f"value_dtype: expected {kv.value_cache.dtype} with bf16 tiles, got {value_dtype}")
        return pack_e4m3(kv.value_cache, rows, transposed=True)
    if value_dtype != kv.value_cache.dtype:
        raise ValueError(f"value_dtype: expected {kv.value_cache.dtype} or float8_e4m3fn, got {value_dtype}")
    return pack(kv.value_cache, rows)


def _variant(kernel: str, maps: MapTable, values: Packed) -> str:
    """Name of the launch configuration: what is converted on chip and what fits into a stage differ."""
    if values.scale is not None:
        return f"{kernel}_e4m3"
    return f"{kernel}_mixed" if maps.tile_dtype == torch.float8_e4m3fn else kernel


def _value_tiles(values: Packed, block: int) -> TensorDescriptor:
    """For `_value_tile`: one block of one head at a time."""
    last_two = values.data.shape[-2:]
    shape = list(last_two) if values.scale is not None else [block, last_two[1]]
    return TensorDescriptor.from_tensor(values.data.view(-1, shape[1]), shape)


@triton.jit
def _value_tile(
    values, kv_head, token, num_packed_tokens, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, E4M3: tl.constexpr
):
    """[BLOCK, HEAD_DIM] values of a block."""
    at = kv_head * num_packed_tokens + token
    if E4M3:
        tile = values.load([at // BLOCK * HEAD_DIM, 0]).T
    else:
        tile = values.load([at, 0])
    return tile


@triton.jit
def _tile_list(arena, section, own_row, TILE_E4M3: tl.constexpr):
    """A head's tiles and their columns, and which of them belong to a block row."""
    indptr = (arena + tl.multiple_of(tl.load(section + 1), 64)).to(tl.pointer_type(tl.int32))
    columns = (arena + tl.multiple_of(tl.load(section + 2), 64)).to(tl.pointer_type(tl.int32))
    tiles = arena + tl.multiple_of(tl.load(section + 3), 64)
    if TILE_E4M3:
        tiles = tiles.to(tl.pointer_type(tl.float8e4nv))
    else:
        tiles = tiles.to(tl.pointer_type(tl.bfloat16))
    return tiles, columns, tl.load(indptr + own_row), tl.load(indptr + own_row + 1)


@triton.jit(do_not_specialize=["num_sender_heads", "num_lists", "num_packed_tokens"])
def _translate_kernel(
    arena,
    values,
    value_scale,
    out,
    lines,
    sections,
    head_index,
    head_weight,
    num_sender_heads,
    num_lists,
    num_packed_tokens,
    stride_out_row,
    stride_out_head,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_E4M3: tl.constexpr,
    VALUE_E4M3: tl.constexpr,
    SCALE: tl.constexpr,
    STAGES: tl.constexpr,
):
    at_line, head = line_and_head(GROUP)
    line = lines + at_line * 8
    row = tl.load(line + 1) * BLOCK + tl.arange(0, BLOCK)
    mine = (row >= tl.load(line + 2)) & (row < tl.load(line + 3))
    batch_row = (row + tl.load(line + 4)).to(tl.int64)[:, None]
    token_base = tl.load(line + 5)
    own_row = tl.load(line + 7)
    side = tl.arange(0, BLOCK)
    in_tile = side[:, None] * BLOCK + side[None, :]
    acc = tl.zeros([BLOCK, HEAD_DIM], tl.float32)
    weight = 0.0
    for i in range(num_lists):
        before, weight = weight, tl.load(head_weight + head * num_lists + i)
        acc *= tl.where(weight == 0.0, 0.0, before / weight)
        section = (
            sections
            + (tl.load(line + 6).to(tl.int64) * num_sender_heads + tl.load(head_index + head * num_lists + i)) * 4
        )
        tiles, columns, first, end = _tile_list(arena, section, own_row, TILE_E4M3)
        for t in tl.range(first, end, num_stages=STAGES):
            place = tiles + tl.cast(t, tl.int64) * (BLOCK * BLOCK) + in_tile
            tile = tl.load(place, eviction_policy="evict_first")  # read once; the values are what L2 is for
            token = token_base + tl.load(columns + t) * BLOCK
            v = _value_tile(values, head // GROUP, token, num_packed_tokens, BLOCK, HEAD_DIM, VALUE_E4M3)
            acc = tl.dot(tile.to(v.dtype), v, acc)
    if VALUE_E4M3:
        weight *= tl.load(value_scale + head // GROUP)
    lane = tl.arange(0, HEAD_DIM)[None, :]
    result = (acc * (weight * SCALE)).to(out.dtype.element_ty)
    tl.store(out + batch_row * stride_out_row + head * stride_out_head + lane, result, mask=mine[:, None])
