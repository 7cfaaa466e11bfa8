"""The tile kernel for Hopper, in Gluon: a producer warp, and one or two pairs of consumer
warpgroups of 64 rows each, as in `guide_hopper.py`. Two pairs take turns: one multiplies while the other stores.

Two things make it fast. A thread of the tensor cores' result layout holds columns 8j + 2q and 8j + 2q + 1 of a row
(q = its place among 4 threads, j < 16); with the block's tokens dealt out accordingly (`pack(interleaved=True)`), those
are twice 16 neighbours, 4 threads 64, so tiles go to memory in full 16-byte stores and never through shared memory.
And e4m3 is rounded with integer arithmetic from fp16, whose bits moved right by 7 it is (`tile_codec.py`): the
conversion instruction shares its unit with exp2, which limits the kernel.

There is one place with a product. With a second one behind the loop, for the diagonal block, ptxas 12.8 computed a part
of the query tile's descriptor only where the loop is entered, and lines without a turn in it multiplied garbage.
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
    tile_bits,
)
from mapflow.kernels.pack import Packed
from mapflow.kernels.tuning import launch_config

_REGISTERS = {1: 200, 2: 112}  # of a consumer's thread, by pairs of consumers


def tiles_hopper(
    query: torch.Tensor,
    keys: Packed,
    rows: BlockRows,
    index: BlockIndex,
    row_lse: torch.Tensor,
    qk_scale: float,
    arena: torch.Tensor,
    offsets: torch.Tensor,
    group: int,
) -> None:
    """As `tiles.store_tiles`, arguments checked there; e4m3, blocks of 128, interleaved keys."""
    num_heads, head_dim = query.shape[1:]
    config = launch_config("tiles_hopper", 128, head_dim, query.device)
    if config["stages"] % config["pairs"]:  # a buffer belongs to one pair, or its barriers' parity would not tell turns
        raise ValueError(f"tiles_hopper: expected stages to be a multiple of pairs, got {config}")
    schedule = rows.schedules.table(
        copies=num_heads // group, group=group, num_programs=num_multiprocessors(query.device)
    )
    tiles_hopper_kernel[(schedule.shape[1],)](
        query_tiles(query),
        packed_tiles(keys),
        row_lse,
        arena,
        offsets,
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
        row_lse.stride(0),
        GROUP=group,
        HEAD_DIM=head_dim,
        STAGES=config["stages"],
        PAIRS=config["pairs"],
        REGISTERS=_REGISTERS[config["pairs"]],
        num_warps=4,
    )


@gluon.jit
def _num_tiles(counts, offsets, slot):
    """Kept blocks of a line and head; 0 if nobody wants their tiles."""
    return gl.where(gl.load(offsets + slot) < 0, 0, gl.load(counts + slot))


@gluon.jit
def _produce(descriptors, smem, rings, work, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, STAGES: gl.constexpr):
    queries, keys = descriptors
    q_smem, k_smem = smem
    q_ready, q_free, k_ready, k_free = rings
    schedule, num_laps, offsets, lines, columns, counts, num_lines, num_heads, num_packed_tokens, max_columns = work
    turn = 0
    tile = 0
    for lap in range(num_laps):
        head, at_line, slot, exists = item(schedule, lap, num_lines, num_heads, GROUP)
        if exists:
            line = lines + at_line * 8
            count = _num_tiles(counts, offsets, slot)
            column = columns + slot.to(gl.int64) * max_columns
            kv_row = (head // GROUP) * num_packed_tokens + gl.load(line + 5)
            batch_row = gl.load(line + 1) * 128 + gl.load(line + 4)
            if count > 0:
                place = turn % 2
                mbarrier.wait(q_free.index(place), (turn // 2 & 1) ^ 1)
                mbarrier.expect(q_ready.index(place), 2 * 64 * HEAD_DIM * 2)
                for half in gl.static_range(2):
                    async_load(
                        queries,
                        [batch_row + half * 64, head * HEAD_DIM],
                        q_ready.index(place),
                        q_smem.index(2 * place + half),
                    )
                for i in range(count):
                    at = kv_row + gl.load(column + i) * 128
                    fetch(keys, at, 0, k_smem, k_ready, k_free, tile, 128 * HEAD_DIM * 2, STAGES)
                    tile += 1
                turn += 1


@gluon.jit
def _store(at, scores, lse, qk_scale, row, token, DIAGONAL: gl.constexpr):
    """Scores to probabilities, e4m3, and memory."""
    dealt = gl.reshape(gl.permute(gl.reshape(scores, [64, 2, 8, 4, 2]), [0, 1, 3, 2, 4]), [64, 128])
    dealt = gl.convert_layout(dealt, row.type.layout.parent, assert_trivial=True)
    if DIAGONAL:
        dealt = gl.where(row[:, None] >= token[None, :], dealt, float("-inf"))
    p = gl.exp2(dealt * qk_scale - lse[:, None])
    gl.store(at + (row[:, None] * 128 + token[None, :]), tile_bits(p))


@gluon.jit
def _consume(
    of_tiles,
    WHICH: gl.constexpr,
    PAIR: gl.constexpr,
    PAIRS: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Rows [64 * WHICH, 64 * WHICH + 64) of the tiles of this pair of warpgroups, every PAIRS-th."""
    arena, row_lse, smem, rings, work, qk_scale, stride_lse = of_tiles
    q_smem, k_smem = smem
    q_ready, q_free, k_ready, k_free = rings
    schedule, num_laps, offsets, lines, columns, counts, num_lines, num_heads, num_packed_tokens, max_columns = work
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    STORED: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [0, 8], [0, 64], [8, 0]],
        lane_bases=[[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 128],
    )
    nothing = gl.zeros([64, 128], gl.float32, SCORES)
    row = 64 * WHICH + gl.arange(0, 64, gl.SliceLayout(1, STORED))
    token = gl.arange(0, 128, gl.SliceLayout(0, STORED))
    turn = 0
    tile = 0
    for lap in range(num_laps):
        head, at_line, slot, exists = item(schedule, lap, num_lines, num_heads, GROUP)
        count = _num_tiles(counts, offsets, slot)
        if exists & (count > 0):
            line = lines + at_line * 8
            batch_row = gl.load(line + 1) * 128 + gl.load(line + 4) + row
            lse = gl.load(row_lse + head.to(gl.int64) * stride_lse + batch_row)
            base = arena + gl.multiple_of(gl.load(offsets + slot), 64)
            place = turn % 2
            q = q_smem.index(2 * place + WHICH)
            mbarrier.wait(q_ready.index(place), turn // 2 & 1)
            for i in range((tile + PAIR) % PAIRS, count, PAIRS):
                number = tile + i
                stage = number % STAGES
                mbarrier.wait(k_ready.index(stage), number // STAGES & 1)
                started = warpgroup_mma(q, k_smem.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
                scores = warpgroup_mma_wait(0, deps=[started])
                mbarrier.arrive(k_free.index(stage))
                at = base + i * (128 * 128)
                # the diagonal block is the last; only what follows the product is there twice (see the module)
                if i == count - 1:
                    _store(at, scores, lse, qk_scale, row, token, True)
                else:
                    _store(at, scores, lse, qk_scale, row, token, False)
            mbarrier.arrive(q_free.index(place))
            tile += count
            turn += 1


@gluon.jit
def _consume_upper_0(of_tiles, PAIRS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, STAGES: gl.constexpr):
    _consume(of_tiles, 0, 0, PAIRS, GROUP, HEAD_DIM, STAGES)


@gluon.jit
def _consume_lower_0(of_tiles, PAIRS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, STAGES: gl.constexpr):
    _consume(of_tiles, 1, 0, PAIRS, GROUP, HEAD_DIM, STAGES)


@gluon.jit
def _consume_upper_1(of_tiles, PAIRS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, STAGES: gl.constexpr):
    _consume(of_tiles, 0, 1, PAIRS, GROUP, HEAD_DIM, STAGES)


@gluon.jit
def _consume_lower_1(of_tiles, PAIRS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, STAGES: gl.constexpr):
    _consume(of_tiles, 1, 1, PAIRS, GROUP, HEAD_DIM, STAGES)


@gluon.jit(do_not_specialize=["num_laps", "num_lines", "num_heads", "num_packed_tokens", "max_columns", "stride_lse"])
def tiles_hopper_kernel(
    queries,
    keys,
    row_lse,
    arena,
    offsets,
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
    stride_lse,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    STAGES: gl.constexpr,
    PAIRS: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    q_smem = gl.allocate_shared_memory(queries.dtype, [4, 64, HEAD_DIM], queries.layout)
    k_smem = gl.allocate_shared_memory(keys.dtype, [STAGES, 128, HEAD_DIM], keys.layout)
    q_ready, q_free = ring(2, 2 * PAIRS)
    k_ready, k_free = ring(STAGES, 2)
    fence_async_shared()
    barrier()
    smem = (q_smem, k_smem)
    rings = (q_ready, q_free, k_ready, k_free)
    work = (schedule, num_laps, offsets, lines, columns, counts, num_lines, num_heads, num_packed_tokens, max_columns)
    of_tiles = (arena, row_lse, smem, rings, work, qk_scale, stride_lse)
    if PAIRS == 2:
        gl.warp_specialize(
            [
                (_consume_upper_0, (of_tiles, PAIRS, GROUP, HEAD_DIM, STAGES)),
                (_consume_lower_0, (of_tiles, PAIRS, GROUP, HEAD_DIM, STAGES)),
                (_consume_upper_1, (of_tiles, PAIRS, GROUP, HEAD_DIM, STAGES)),
                (_consume_lower_1, (of_tiles, PAIRS, GROUP, HEAD_DIM, STAGES)),
                (_produce, ((queries, keys), smem, rings, work, GROUP, HEAD_DIM, STAGES)),
            ],
            [4, 4, 4, 1],
            [REGISTERS, REGISTERS, REGISTERS, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_consume_upper_0, (of_tiles, PAIRS, GROUP, HEAD_DIM, STAGES)),
                (_consume_lower_0, (of_tiles, PAIRS, GROUP, HEAD_DIM, STAGES)),
                (_produce, ((queries, keys), smem, rings, work, GROUP, HEAD_DIM, STAGES)),
            ],
            [4, 1],
            [REGISTERS, 24],
        )
