"""What the Hopper kernels share: rings of shared memory, the order of their work, and Gluon's names across versions.

Written for Triton 3.6, which vLLM 0.26 pins; compiled with 3.9 too.
"""

import functools

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from mapflow.kernels.pack import Packed

# names before and since Triton 3.7
barrier = getattr(gl, "thread_barrier", None) or gl.barrier
async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


@functools.cache
def is_hopper(device: torch.device) -> bool:
    """Whether the kernels of `*_hopper.py` run there."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """Of a GPU; 1 elsewhere."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 1


def query_tiles(query: torch.Tensor) -> TensorDescriptor:
    """Of queries [N, num_heads, head_dim]: 64 rows of a head at [row, head * head_dim]."""
    num_rows, num_heads, head_dim = query.shape
    flat = query.as_strided((num_rows, num_heads * head_dim), (query.stride(0), 1))
    return TensorDescriptor.from_tensor(flat, [64, head_dim], gl.NVMMASharedLayout(128, 16))


def packed_tiles(packed: Packed) -> TensorDescriptor:
    """Of packed keys or values: 128 tokens at [head * tokens + token, 0]."""
    head_dim = packed.data.shape[2]
    return TensorDescriptor.from_tensor(packed.data.view(-1, head_dim), [128, head_dim], gl.NVMMASharedLayout(128, 16))


@gluon.jit
def item(schedule, lap, num_lines, num_heads, GROUP: gl.constexpr):
    """What this program does in a lap: head, line, its place in a BlockIndex, and whether there is anything to do."""
    number = gl.load(schedule + lap * gl.num_programs(0) + gl.program_id(0))
    exists = number >= 0
    number = gl.maximum(number, 0)
    of_kv_head = number % (num_lines * GROUP)
    head = number // (num_lines * GROUP) * GROUP + of_kv_head % GROUP
    line = of_kv_head // GROUP
    return head, line, line * num_heads + head, exists


@gluon.jit
def ring(STAGES: gl.constexpr, readers: gl.constexpr):
    """Barriers of a ring of buffers: `ready` once filled, `free` once all readers are done."""
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=readers)
    return ready, free


@gluon.jit
def fetch(descriptor, row, column, smem, ready, free, turn, NUM_BYTES: gl.constexpr, STAGES: gl.constexpr):
    """Fetch one tile into the ring's next buffer, once its readers have left it."""
    stage = turn % STAGES
    mbarrier.wait(free.index(stage), (turn // STAGES & 1) ^ 1)
    mbarrier.expect(ready.index(stage), NUM_BYTES)
    async_load(descriptor, [row, column], ready.index(stage), smem.index(stage))


@gluon.jit
def tile_bits(p):
    """Probabilities (f32, at least 0, cut at 1) as the bits of e4m3 of 256 p: those of their fp16 without the last 7.

    Four neighbours of a thread at a time, on the integer units; to nearest, ties up. Doubling moves the 8 bits that are
    kept into the upper byte of each half, in the same addition that rounds.
    """
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 low, high, one;
        mov.b32 one, 0x3c003c00;
        cvt.rn.f16x2.f32 low, $2, $1;
        cvt.rn.f16x2.f32 high, $4, $3;
        min.f16x2 low, low, one;
        min.f16x2 high, high, one;
        add.u32 low, low, low;
        add.u32 high, high, high;
        add.u32 low, low, 0x00800080;
        add.u32 high, high, 0x00800080;
        prmt.b32 $0, low, high, 0x7531;
        }""",
        "=r,f,f,f,f",
        [p],
        dtype=gl.uint8,
        is_pure=True,
        pack=4,
    )
