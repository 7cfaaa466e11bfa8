"""The compressor's first pass on the GPU: block masses straight from queries and paged keys, in one kernel.

As `compress_reference.block_masses`, for the rows of a step, cut block rows included, which adds up over a chunked
prefill. Also gives each row's log-sum-exp, which the second pass (`tiles.py`) needs.

Nothing is needed from the sender's own attention. A program takes 128 rows of one KV head, the heads of its group
stacked, so that keys are read once for all of them, and walks the block columns once. It notes each row's log-sum-exp
of each block in a scratch of its own (L2-resident: rows x columns of one program, not of the prompt), keeps the row's
total online, and turns the notes into masses at the end. e4m3 queries and keys (`key_dtype`) double the rate and halve
the bytes. Selections from such masses are as good as from exact ones (`docs/performance.md`), but the rows'
log-sum-exps are off by up to 0.1: where tiles will be stored, measure with exact keys.

`row_stride` s measures rows s - 1, 2s - 1, ... only: cheaper, and a worse guide the larger s is.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from mapflow.kernels.guide import LOG2_E, check_kernel_arguments
from mapflow.kernels.hopper import num_multiprocessors
from mapflow.kernels.mass_tasks import STACKED_ROWS, MassTasks
from mapflow.kernels.pack import E4M3_MAX, SMALLEST, pack, pack_e4m3
from mapflow.kernels.paged import PagedKV
from mapflow.kernels.tensor_check import check_tensor
from mapflow.kernels.tuning import launch_config

_COLUMNS_AT_ONCE = 32  # block columns of the notes that are turned into masses at a time
_PROGRAMS_PER_PROCESSOR = 2


def block_masses(
    query: torch.Tensor,
    kv: PagedKV,
    tasks: MassTasks,
    *,
    scale: float,
    mass: torch.Tensor,
    row_lse: torch.Tensor,
    key_dtype: torch.dtype | None = torch.float8_e4m3fn,
    is_lse_known: bool = False,
) -> None:
    """Add the squared block probabilities of the rows of `tasks` to `mass`, and write their log-sum-exp, unless known.

    query: bf16 or fp16 [N, Hq, head_dim], as in `guide.guide_attention`. kv: K of tokens [0, row_end) of each request
    (V is not read). mass: float32 [mass rows, Hq, C], C >= the block columns reached; its rows are the block rows of
    the segments, in order. A block's mass is the root of the mean over the measured rows. row_lse: float32 [Hq, N],
    log2 of the sum of exp(score), written, or read if `is_lse_known`; rows that are not measured stay as they are.
    key_dtype: float8_e4m3fn, or None for the cache's own, which tiles need.

    Raises ValueError for wrong shapes, dtypes or strides.
    """
    rows = tasks.rows
    group = check_kernel_arguments(query, kv, rows, scale)
    if group != tasks.group:
        raise ValueError(f"tasks: expected ones built for {group} query heads a KV head, got {tasks.group}")
    num_heads, head_dim = query.shape[1:]
    mass_shape = (tasks.measured.shape[0], num_heads, "C")
    check_tensor("mass", mass, shape=mass_shape, dtypes=(torch.float32,), device=kv.device)
    if mass.shape[2] < rows.num_columns or mass.stride(2) != 1:
        raise ValueError(f"mass: expected at least {rows.num_columns} contiguous columns, got {list(mass.shape)}")
    shape = (num_heads, query.shape[0])
    check_tensor("row_lse", row_lse, shape=shape, dtypes=(torch.float32,), device=kv.device)
    if key_dtype not in (None, torch.float8_e4m3fn, kv.key_cache.dtype):
        raise ValueError(f"key_dtype: expected float8_e4m3fn or {kv.key_cache.dtype}, got {key_dtype}")
    e4m3 = key_dtype == torch.float8_e4m3fn
    keys = pack_e4m3(kv.key_cache, rows) if e4m3 else pack(kv.key_cache, rows)
    schedule = tasks.schedules.table(
        copies=kv.num_kv_heads,
        group=1,
        num_programs=num_multiprocessors(kv.device) * _PROGRAMS_PER_PROCESSOR,
    )
    num_laps, num_programs = schedule.shape
    padded_group = triton.next_power_of_2(group)
    # a task may look past the last block row, as far as it reaches itself
    num_columns = rows.num_columns + STACKED_ROWS // padded_group * tasks.row_stride // rows.block
    notes = torch.empty(num_programs, num_columns, STACKED_ROWS, dtype=torch.float32, device=kv.device)
    config = launch_config("masses", rows.block, head_dim, kv.device)
    _masses_kernel[(num_programs,)](
        query,
        TensorDescriptor.from_tensor(keys.data.view(-1, head_dim), [rows.block, head_dim]),
        keys.scale,
        notes,
        mass,
        row_lse,
        tasks.table,
        schedule,
        num_laps,
        tasks.table.shape[0],
        num_columns,
        scale * LOG2_E,
        rows.num_packed_tokens,
        query.stride(0),
        query.stride(1),
        mass.stride(0),
        mass.stride(1),
        row_lse.stride(0),
        GROUP=group,
        PADDED_GROUP=padded_group,
        STACKED=STACKED_ROWS,
        ROW_STRIDE=tasks.row_stride,
        BLOCK=rows.block,
        HEAD_DIM=head_dim,
        E4M3=e4m3,
        KNOWN=is_lse_known,
        COLUMNS=_COLUMNS_AT_ONCE,
        STAGES=config["num_stages"],
        **config,
    )


@triton.jit
def _note(scores, scale, mine, column, seen, largest, total, STACKED: tl.constexpr, KNOWN: tl.constexpr):
    """Write down each row's log-sum-exp of one block, and add it to the running one. Unseen blocks count nothing.

    If the row's own is known, it is `largest`, and what is written down is the block's share of the row.
    """
    place = mine + column * STACKED + tl.arange(0, STACKED)
    if KNOWN:
        tl.store(place, tl.sum(tl.exp2(scores * scale - largest[:, None]), 1))
        new_largest = largest
    else:
        top = tl.where(seen, tl.max(scores, 1) * scale, 0.0)
        of_block = tl.sum(tl.exp2(scores * scale - top[:, None]), 1)
        tl.store(place, tl.where(seen, top + tl.log2(of_block), float("-inf")))
        new_largest = tl.where(seen, tl.maximum(largest, top), largest)
        total = total * tl.exp2(largest - new_largest) + tl.where(seen, of_block * tl.exp2(top - new_largest), 0.0)
    return new_largest, total


@triton.jit(
    do_not_specialize=[
        "num_laps",
        "num_tasks",
        "num_columns",
        "num_packed_tokens",
        "stride_mass_row",
        "stride_mass_head",
        "stride_lse",
    ]
)
def _masses_kernel(
    query,
    keys,
    key_scale,
    notes,
    mass,
    row_lse,
    tasks,
    schedule,
    num_laps,
    num_tasks,
    num_columns,
    qk_scale,
    num_packed_tokens,
    stride_query_row,
    stride_query_head,
    stride_mass_row,
    stride_mass_head,
    stride_lse,
    GROUP: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    STACKED: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    E4M3: tl.constexpr,
    KNOWN: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    NUM_ROWS: tl.constexpr = STACKED // PADDED_GROUP
    OF_BLOCK: tl.constexpr = BLOCK // ROW_STRIDE  # sampled rows of a block row
    OF_TASK: tl.constexpr = NUM_ROWS if NUM_ROWS < OF_BLOCK else OF_BLOCK  # of them, in one task
    BLOCK_ROWS: tl.constexpr = NUM_ROWS // OF_TASK
    mine = notes + tl.program_id(0).to(tl.int64) * num_columns * STACKED
    stacked = tl.arange(0, STACKED)
    for lap in range(num_laps):
        item = tl.load(schedule + lap * tl.num_programs(0) + tl.program_id(0))
        if item >= 0:
            kv_head = item // num_tasks
            task = tasks + (item % num_tasks) * 8
            first_row = tl.load(task) * ROW_STRIDE
            row_end = tl.load(task + 3)
            row_begin = tl.load(task + 2)
            token = first_row + (stacked % NUM_ROWS) * ROW_STRIDE + (ROW_STRIDE - 1)
            batch_row = (token + tl.load(task + 4)).to(tl.int64)
            head = kv_head * GROUP + stacked // NUM_ROWS
            measured = (token >= row_begin) & (token < row_end) & (stacked // NUM_ROWS < GROUP)
            at = batch_row * stride_query_row + head * stride_query_head
            lane = tl.arange(0, HEAD_DIM)[None, :]
            q = tl.load(query + at[:, None] + lane, mask=measured[:, None], other=0.0)
            scale = qk_scale
            if E4M3:
                largest_query = tl.maximum(tl.max(tl.max(tl.abs(q.to(tl.float32)), 1), 0), SMALLEST)
                q = (q.to(tl.float32) * (E4M3_MAX / largest_query)).to(tl.float8e4nv)
                scale = qk_scale * (largest_query / E4M3_MAX) * tl.load(key_scale + kv_head)
            kv_row = kv_head * num_packed_tokens + tl.load(task + 5)
            first_block = first_row // BLOCK
            place_of_lse = row_lse + head.to(tl.int64) * stride_lse + batch_row
            if KNOWN:
                largest = tl.load(place_of_lse, mask=measured, other=float("inf"))
            else:
                largest = tl.full([STACKED], float("-inf"), tl.float32)
            total = tl.zeros([STACKED], tl.float32)
            everywhere = stacked >= 0
            for column in tl.range(0, first_block, num_stages=STAGES):
                scores = tl.dot(q, keys.load([kv_row + column * BLOCK, 0]).T)
                largest, total = _note(scores, scale, mine, column, everywhere, largest, total, STACKED, KNOWN)
            for i in tl.static_range(BLOCK_ROWS):
                start = (first_block + i) * BLOCK
                scores = tl.dot(q, keys.load([kv_row + start, 0]).T)
                past = token[:, None] >= (start + tl.arange(0, BLOCK))[None, :]
                scores = tl.where(past, scores, float("-inf"))
                seen = token >= start
                largest, total = _note(scores, scale, mine, first_block + i, seen, largest, total, STACKED, KNOWN)
            lse = largest + tl.log2(total)
            if not KNOWN:
                tl.store(place_of_lse, lse, mask=measured)
            tl.debug_barrier()  # the notes were written by other threads of this program
            end_block = first_block + BLOCK_ROWS
            mass_head = (kv_head * GROUP + tl.arange(0, PADDED_GROUP)).to(tl.int64)[None, :, None]
            of_row = tl.arange(0, BLOCK_ROWS)[None, None, :]
            in_segment = ((first_block + of_row) * BLOCK < row_end) & ((first_block + of_row + 1) * BLOCK > row_begin)
            mass_row = (tl.load(task + 1) + of_row).to(tl.int64)
            for start in range(0, end_block, COLUMNS):
                columns = start + tl.arange(0, COLUMNS)
                noted = tl.load(
                    mine + columns[:, None] * STACKED + stacked[None, :],
                    mask=(columns < end_block)[:, None],
                    other=0.0 if KNOWN else float("-inf"),
                )
                p = noted if KNOWN else tl.exp2(noted - lse[None, :])
                p = tl.where(measured[None, :], p, 0.0)
                sums = tl.sum(tl.reshape(p * p, [COLUMNS, PADDED_GROUP, BLOCK_ROWS, OF_TASK]), 3)
                place = mass + mass_row * stride_mass_row + mass_head * stride_mass_head + columns[:, None, None]
                wanted = (columns[:, None, None] <= first_block + of_row) & (tl.arange(0, PADDED_GROUP) < GROUP)[
                    None, :, None
                ]
                tl.atomic_add(place, sums, mask=wanted & in_segment, sem="relaxed")
            tl.debug_barrier()  # before the next task overwrites the notes
