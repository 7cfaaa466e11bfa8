"""The guide kernel for Hopper, in Gluon: one persistent program a multiprocessor, three roles of warps.

    producer (1 warp)     fetches a query tile, then K and V of each kept block, by the copy engine into rings
    consumer 0, 1         64 rows each: scores of the next block and the product with V of this one are in flight
    (a warpgroup each)    together; while one computes its softmax, the other has the tensor cores

The same schedule as FlashAttention 3 (Shah et al., 2024), over a list of blocks. Measured on an H200, it is what the
plain kernel of `guide.py` lacks: see `docs/performance.md`. Not for Triton's interpreter.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from mapflow.kernels.block_rows import BlockIndex, BlockRows
from mapflow.kernels.hopper import (
    async_load,
    barrier,
    fetch,
    item,
    num_multiprocessors,
    packed_tiles,
    query_tiles,
    ring,
)
from mapflow.kernels.pack import Packed

_STAGES = 2  # blocks of K and of V in shared memory
_CONSUMER_REGISTERS = 240


def guide_hopper(
    query: torch.Tensor,
    keys: Packed,
    values: Packed,
    rows: BlockRows,
    index: BlockIndex,
    qk_scale: float,
    out: torch.Tensor,
    group: int,
) -> None:
    """As `guide.guide_attention`, arguments checked there; blocks of 128."""
    num_heads, head_dim = query.shape[1:]
    schedule = rows.schedules.table(
        copies=num_heads // group, group=group, num_programs=num_multiprocessors(query.device)
    )
    guide_hopper_kernel[(schedule.shape[1],)](
        query_tiles(query),
        packed_tiles(keys),
        packed_tiles(values),
        out,
        schedule,
        rows.lines,
        index.columns,
        index.counts,
        qk_scale,
        schedule.shape[0],
        rows.num_lines,
        num_heads,
        rows.num_packed_tokens,
        rows.num_columns,
        out.stride(0),
        out.stride(1),
        GROUP=group,
        HEAD_DIM=head_dim,
        STAGES=_STAGES,
        REGISTERS=_CONSUMER_REGISTERS,
        num_warps=4,
    )


@gluon.jit
def _produce(descriptors, smem, rings, work, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, STAGES: gl.constexpr):
    queries, keys, values = descriptors
    q_smem, k_smem, v_smem = smem
    q_ready, q_free, k_ready, k_free, v_ready, v_free = rings
    schedule, num_laps, lines, columns, counts, num_lines, num_heads, num_packed_tokens, max_columns = work
    QUERY_BYTES: gl.constexpr = 2 * 64 * HEAD_DIM * 2
    TILE_BYTES: gl.constexpr = 128 * HEAD_DIM * 2
    tile = 0
    for lap in range(num_laps):
        head, at_line, slot, exists = item(schedule, lap, num_lines, num_heads, GROUP)
        if exists:
            line = lines + at_line * 8
            count = gl.load(counts + slot)
            column = columns + slot.to(gl.int64) * max_columns
            kv_row = (head // GROUP) * num_packed_tokens + gl.load(line + 5)
            batch_row = gl.load(line + 1) * 128 + gl.load(line + 4)
            place = lap % 2
            mbarrier.wait(q_free.index(place), (lap // 2 & 1) ^ 1)
            mbarrier.expect(q_ready.index(place), QUERY_BYTES)
            for half in gl.static_range(2):
                async_load(
                    queries,
                    [batch_row + half * 64, head * HEAD_DIM],
                    q_ready.index(place),
                    q_smem.index(2 * place + half),
                )
            for i in range(count):  # the diagonal block, the last of the list, is fetched first
                at = kv_row + gl.load(column + count - 1 - i) * 128
                fetch(keys, at, 0, k_smem, k_ready, k_free, tile, TILE_BYTES, STAGES)
                fetch(values, at, 0, v_smem, v_ready, v_free, tile, TILE_BYTES, STAGES)
                tile += 1


@gluon.jit
def _consume(of_rows, WHICH: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, STAGES: gl.constexpr):
    """Rows [64 * WHICH, 64 * WHICH + 64) of each item.

    The last product of an item and its way to memory overlap with the first scores of the next item.
    """
    out, smem, rings, work, qk_scale, stride_out_row, stride_out_head = of_rows
    q_smem, k_smem, v_smem = smem
    q_ready, q_free, k_ready, k_free, v_ready, v_free = rings
    schedule, num_laps, lines, columns, counts, num_lines, num_heads, num_packed_tokens, max_columns = work
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, RESULT, 2)
    ROWS: gl.constexpr = gl.SliceLayout(1, RESULT)
    nothing = gl.zeros([64, 128], gl.float32, SCORES)
    in_block = 64 * WHICH + gl.arange(0, 64, gl.SliceLayout(1, SCORES))
    past = in_block[:, None] >= gl.arange(0, 128, gl.SliceLayout(0, SCORES))[None, :]
    lane = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, RESULT))[None, :]

    mbarrier.wait(q_ready.index(0), 0)
    mbarrier.wait(k_ready.index(0), 0)
    started = warpgroup_mma(q_smem.index(WHICH), k_smem.index(0).permute((1, 0)), nothing, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[started])
    mbarrier.arrive(k_free.index(0))
    scores = gl.where(past, scores, float("-inf"))
    largest = gl.max(scores, 1) * qk_scale
    p = gl.exp2(scores * qk_scale - largest[:, None])
    total = gl.sum(p, 1)
    operand = gl.convert_layout(p.to(out.dtype.element_ty), OPERAND)
    acc = gl.zeros([64, HEAD_DIM], gl.float32, RESULT)
    tile = 0
    for lap in range(num_laps):
        head, at_line, slot, exists = item(schedule, lap, num_lines, num_heads, GROUP)
        if exists:
            line = lines + at_line * 8
            block_row = gl.load(line + 1)
            row_begin = gl.load(line + 2)
            row_end = gl.load(line + 3)
            shift = gl.load(line + 4)
            place = lap % 2
            q = q_smem.index(2 * place + WHICH)
            for _ in range(1, gl.load(counts + slot)):
                v_stage = tile % STAGES
                v_phase = tile // STAGES & 1
                tile += 1
                stage = tile % STAGES
                mbarrier.wait(k_ready.index(stage), tile // STAGES & 1)
                started = warpgroup_mma(q, k_smem.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
                mbarrier.wait(v_ready.index(v_stage), v_phase)
                added = warpgroup_mma(operand, v_smem.index(v_stage), acc, is_async=True)
                scores = warpgroup_mma_wait(1, deps=[started])
                mbarrier.arrive(k_free.index(stage))
                new_largest = gl.maximum(largest, gl.max(scores, 1) * qk_scale)
                p = gl.exp2(scores * qk_scale - new_largest[:, None])
                rescale = gl.exp2(largest - new_largest)
                largest = new_largest
                total = total * rescale + gl.sum(p, 1)
                acc = warpgroup_mma_wait(0, deps=[added])
                mbarrier.arrive(v_free.index(v_stage))
                acc = acc * gl.convert_layout(rescale, ROWS)[:, None]
                operand = gl.convert_layout(p.to(out.dtype.element_ty), OPERAND)
            mbarrier.arrive(q_free.index(place))
            v_stage = tile % STAGES
            v_phase = tile // STAGES & 1
            tile += 1
            ending = total
            next_lap = gl.minimum(lap + 1, num_laps - 1)
            _, _, _, goes_on = item(schedule, next_lap, num_lines, num_heads, GROUP)
            goes_on = goes_on & (lap + 1 < num_laps)
            if goes_on:
                stage = tile % STAGES
                mbarrier.wait(q_ready.index(1 - place), (lap + 1) // 2 & 1)
                mbarrier.wait(k_ready.index(stage), tile // STAGES & 1)
                q = q_smem.index(2 * (1 - place) + WHICH)
                started = warpgroup_mma(q, k_smem.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
                mbarrier.wait(v_ready.index(v_stage), v_phase)
                added = warpgroup_mma(operand, v_smem.index(v_stage), acc, is_async=True)
                scores = warpgroup_mma_wait(1, deps=[started])
                mbarrier.arrive(k_free.index(stage))
                scores = gl.where(past, scores, float("-inf"))
                largest = gl.max(scores, 1) * qk_scale
                p = gl.exp2(scores * qk_scale - largest[:, None])
                total = gl.sum(p, 1)
                acc = warpgroup_mma_wait(0, deps=[added])
                mbarrier.arrive(v_free.index(v_stage))
                operand = gl.convert_layout(p.to(out.dtype.element_ty), OPERAND)
            else:
                mbarrier.wait(v_ready.index(v_stage), v_phase)
                added = warpgroup_mma(operand, v_smem.index(v_stage), acc, is_async=True)
                acc = warpgroup_mma_wait(0, deps=[added])
                mbarrier.arrive(v_free.index(v_stage))
            result = acc / gl.convert_layout(ending, ROWS)[:, None]
            token = block_row * 128 + 64 * WHICH + gl.arange(0, 64, ROWS)
            mine = (token >= row_begin) & (token < row_end)
            at = (token + shift).to(gl.int64)[:, None] * stride_out_row + head * stride_out_head
            gl.store(out + at + lane, result.to(out.dtype.element_ty), mask=mine[:, None])
            acc = gl.zeros([64, HEAD_DIM], gl.float32, RESULT)


@gluon.jit
def _consume_upper(of_rows, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, STAGES: gl.constexpr):
    _consume(of_rows, 0, GROUP, HEAD_DIM, STAGES)


@gluon.jit
def _consume_lower(of_rows, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, STAGES: gl.constexpr):
    _consume(of_rows, 1, GROUP, HEAD_DIM, STAGES)


@gluon.jit(do_not_specialize=["num_laps", "num_lines", "num_heads", "num_packed_tokens", "max_columns"])
def guide_hopper_kernel(
    queries,
    keys,
    values,
    out,
    schedule,
    lines,
    columns,
    counts,
    qk_scale,
    num_laps,
    num_lines,
    num_heads,
    num_packed_tokens,
    max_columns,
    stride_out_row,
    stride_out_head,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """One program a multiprocessor; `schedule.py` says which items it does."""
    q_smem = gl.allocate_shared_memory(queries.dtype, [4, 64, HEAD_DIM], queries.layout)
    k_smem = gl.allocate_shared_memory(keys.dtype, [STAGES, 128, HEAD_DIM], keys.layout)
    v_smem = gl.allocate_shared_memory(values.dtype, [STAGES, 128, HEAD_DIM], values.layout)
    q_ready, q_free = ring(2, 2)
    k_ready, k_free = ring(STAGES, 2)
    v_ready, v_free = ring(STAGES, 2)
    fence_async_shared()
    barrier()
    smem = (q_smem, k_smem, v_smem)
    rings = (q_ready, q_free, k_ready, k_free, v_ready, v_free)
    work = (schedule, num_laps, lines, columns, counts, num_lines, num_heads, num_packed_tokens, max_columns)
    of_rows = (out, smem, rings, work, qk_scale, stride_out_row, stride_out_head)
    gl.warp_specialize(
        [
            (_consume_upper, (of_rows, GROUP, HEAD_DIM, STAGES)),
            (_consume_lower, (of_rows, GROUP, HEAD_DIM, STAGES)),
            (_produce, ((queries, keys, values), smem, rings, work, GROUP, HEAD_DIM, STAGES)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )
