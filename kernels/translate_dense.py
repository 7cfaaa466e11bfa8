"""Translate with every sender head for every receiver head, the form of the paper: A_i = sum_l w[l, i] A_l.

Head by head that would multiply each tile by V once per receiver head. Instead

    P[l, g] = A_l V_g            each sender head's tiles times the V of every KV head, each pair once
    out[i]  = sum_l w[i, l] P[l, kv head of i]         the combination, on the tensor cores

which does num_heads / num_kv_heads times less work, and does not care how much the heads' block patterns overlap
(combining tiles first costs a product for every block that any head keeps). P lies in a bounded workspace, a window of
block rows at a time.
"""

import torch
import triton
import triton.language as tl

from mapflow.kernels.block_rows import BlockRows
from mapflow.kernels.map_table import MapTable
from mapflow.kernels.pack import Packed
from mapflow.kernels.paged import PagedKV
from mapflow.kernels.tensor_check import check_tensor
from mapflow.kernels.translate import _check, _pack_values, _tile_list, _value_tile, _value_tiles, _variant
from mapflow.kernels.tuning import launch_config

_WORKSPACE_BYTES = 512 << 20


def translate_all_heads(
    kv: PagedKV,
    rows: BlockRows,
    maps: MapTable,
    *,
    head_map: torch.Tensor,
    out: torch.Tensor,
    value_dtype: torch.dtype | None = None,
) -> None:
    """As `translate.translate_attention`, with dense weights.

    head_map: float32 [Hr, Hs], finite; rounded to bf16 for the combination. Sender heads that have no tiles in a block
    row add nothing.
    """
    group = _check(kv, rows, maps, out)
    shape = (out.shape[1], maps.num_heads)
    check_tensor("head_map", head_map, shape=shape, dtypes=(torch.float32,), device=kv.device)
    values = _pack_values(kv, rows, maps, value_dtype)
    num_kv_heads, head_dim = kv.num_kv_heads, kv.head_dim
    weights = _grouped_weights(head_map, num_kv_heads, group)
    bytes_of_line = maps.num_heads * num_kv_heads * rows.block * head_dim * 2
    window = max(1, min(rows.num_lines, _WORKSPACE_BYTES // bytes_of_line))
    products = torch.empty(
        window, num_kv_heads, weights.shape[2], rows.block, head_dim, dtype=torch.bfloat16, device=kv.device
    )
    if weights.shape[2] > maps.num_heads:
        products[:, :, maps.num_heads :] = 0  # padding of the sum over sender heads
    for start in range(0, rows.num_lines, window):
        part = rows.window(start, start + window)
        _multiply(values, part, maps, products)
        _mix(products, part, weights, out, group)


def _grouped_weights(head_map: torch.Tensor, num_kv_heads: int, group: int) -> torch.Tensor:
    """bf16 [num_kv_heads, heads of a group padded to 16, sender heads padded to a power of two of at least 16]."""
    num_sender_heads = head_map.shape[1]
    padded = max(16, triton.next_power_of_2(num_sender_heads))
    weights = head_map.new_zeros(num_kv_heads, max(16, triton.next_power_of_2(group)), padded, dtype=torch.bfloat16)
    weights[:, :group, :num_sender_heads] = head_map.view(num_kv_heads, group, num_sender_heads)
    return weights


def _multiply(values: Packed, rows: BlockRows, maps: MapTable, products: torch.Tensor) -> None:
    num_kv_heads, head_dim = values.data.shape[0], products.shape[4]
    pair = 2 if num_kv_heads % 2 == 0 else 1
    config = launch_config(_variant("translate_pairs", maps, values), rows.block, head_dim, products.device)
    _multiply_kernel[(num_kv_heads // pair, maps.num_heads, rows.num_lines)](
        maps.arena,
        _value_tiles(values, rows.block),
        values.scale,
        products,
        rows.lines,
        maps.sections,
        maps.num_heads,
        rows.num_packed_tokens,
        NUM_KV_HEADS=num_kv_heads,
        PADDED_HEADS=products.shape[2],
        PAIR=pair,
        BLOCK=rows.block,
        HEAD_DIM=head_dim,
        TILE_E4M3=maps.tile_dtype == torch.float8_e4m3fn,
        VALUE_E4M3=values.scale is not None,
        SCALE=1.0 / maps.tile_scale,
        STAGES=config["num_stages"],
        **config,
    )


def _mix(products: torch.Tensor, rows: BlockRows, weights: torch.Tensor, out: torch.Tensor, group: int) -> None:
    num_kv_heads, padded_group, padded_heads = weights.shape
    config = launch_config("mix", rows.block, products.shape[4], products.device)
    _mix_kernel[(num_kv_heads, rows.num_lines, rows.block)](
        products,
        weights,
        out,
        rows.lines,
        out.stride(0),
        out.stride(1),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        PADDED_GROUP=padded_group,
        PADDED_HEADS=padded_heads,
        BLOCK=rows.block,
        HEAD_DIM=products.shape[4],
        **config,
    )


@triton.jit(do_not_specialize=["num_sender_heads", "num_packed_tokens"])
def _multiply_kernel(
    arena,
    values,
    value_scale,
    products,
    lines,
    sections,
    num_sender_heads,
    num_packed_tokens,
    NUM_KV_HEADS: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    PAIR: tl.constexpr,
    BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_E4M3: tl.constexpr,
    VALUE_E4M3: tl.constexpr,
    SCALE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """products[line, g, l] = tiles of sender head l times V of KV head g, for PAIR neighbouring g at a time."""
    kv_head = tl.program_id(0) * PAIR
    sender_head = tl.program_id(1)
    line = lines + tl.program_id(2) * 8
    token_base = tl.load(line + 5)
    section = sections + (tl.load(line + 6).to(tl.int64) * num_sender_heads + sender_head) * 4
    tiles, columns, first, end = _tile_list(arena, section, tl.load(line + 7), TILE_E4M3)
    side = tl.arange(0, BLOCK)
    in_tile = side[:, None] * BLOCK + side[None, :]
    acc = tl.zeros([BLOCK, HEAD_DIM], tl.float32)
    acc_2 = tl.zeros([BLOCK, HEAD_DIM], tl.float32)
    for t in tl.range(first, end, num_stages=STAGES):
        tile = tl.load(tiles + tl.cast(t, tl.int64) * (BLOCK * BLOCK) + in_tile)
        token = token_base + tl.load(columns + t) * BLOCK
        v = _value_tile(values, kv_head, token, num_packed_tokens, BLOCK, HEAD_DIM, VALUE_E4M3)
        acc = tl.dot(tile.to(v.dtype), v, acc)
        if PAIR == 2:
            v_2 = _value_tile(values, kv_head + 1, token, num_packed_tokens, BLOCK, HEAD_DIM, VALUE_E4M3)
            acc_2 = tl.dot(tile.to(v.dtype), v_2, acc_2)
    scale = SCALE
    scale_2 = SCALE
    if VALUE_E4M3:
        scale *= tl.load(value_scale + kv_head)
        if PAIR == 2:
            scale_2 *= tl.load(value_scale + kv_head + 1)
    where = (tl.program_id(2).to(tl.int64) * NUM_KV_HEADS + kv_head) * PADDED_HEADS + sender_head
    place = products + where * (BLOCK * HEAD_DIM) + side[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    tl.store(place, (acc * scale).to(tl.bfloat16))
    if PAIR == 2:
        tl.store(place + PADDED_HEADS * BLOCK * HEAD_DIM, (acc_2 * scale_2).to(tl.bfloat16))


@triton.jit
def _mix_kernel(
    products,
    weights,
    out,
    lines,
    stride_out_row,
    stride_out_head,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """out[row, heads of a group] = weights [group, sender heads] @ products [sender heads, HEAD_DIM], one row."""
    kv_head = tl.program_id(0)
    line = lines + tl.program_id(1) * 8
    row = tl.program_id(2)
    token = tl.load(line + 1) * BLOCK + row
    if (token >= tl.load(line + 2)) & (token < tl.load(line + 3)):
        sender = tl.arange(0, PADDED_HEADS)
        receiver = tl.arange(0, PADDED_GROUP)
        lane = tl.arange(0, HEAD_DIM)
        w = tl.load(weights + (kv_head * PADDED_GROUP + receiver[:, None]) * PADDED_HEADS + sender[None, :])
        of_line = (tl.program_id(1).to(tl.int64) * NUM_KV_HEADS + kv_head) * PADDED_HEADS
        x = tl.load(products + ((of_line + sender[:, None]) * BLOCK + row) * HEAD_DIM + lane[None, :])
        result = tl.dot(w, x).to(out.dtype.element_ty)
        head = kv_head * GROUP + receiver
        place = out + (token + tl.load(line + 4)).to(tl.int64) * stride_out_row + head[:, None] * stride_out_head
        tl.store(place + lane[None, :], result, mask=(receiver < GROUP)[:, None])
