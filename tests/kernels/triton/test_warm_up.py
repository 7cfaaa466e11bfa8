"""After the warm-up nothing compiles, whatever the sizes of a step."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import triton

from mapflow.kernels.block_rows import BlockIndex, BlockRows
from mapflow.kernels.checksum import section_checksums
from mapflow.kernels.compress import block_masses
from mapflow.kernels.guide import guide_attention
from mapflow.kernels.head_sections import MeasuredRows, SectionTable, lay_out_sections
from mapflow.kernels.mass_tasks import MassTasks
from mapflow.kernels.select import select_by_mass, select_static
from mapflow.kernels.warm_up import Warmer

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16


@pytest.fixture
def compiled() -> Iterator[list[str]]:
    """Names of kernels, as they are compiled."""
    names: list[str] = []

    def note(**details: Any) -> None:
        names.append(details["fn"].name)

    triton.knobs.runtime.jit_post_compile_hook = note
    yield names
    triton.knobs.runtime.jit_post_compile_hook = None


def lay_out(index: BlockIndex, rows: BlockRows, tasks: MassTasks, chunk_rows: int) -> None:
    """As a sender, each block row as a part of its own."""
    parts, slot = [], 0
    for segment in rows.segments:
        for row in segment.block_rows(rows.block):
            place = {"chunk_index": row // chunk_rows, "row": row % chunk_rows}
            parts.append(MeasuredRows(**place, num_rows=1, slot=slot))
            slot += 1
    mass = torch.zeros(slot, 6, rows.num_columns, device=rows.device)
    finite = torch.ones(slot, dtype=torch.uint8, device=rows.device)
    ends = torch.zeros(slot, 6, dtype=torch.int64, device=rows.device)
    arena = torch.zeros(1 << 20, dtype=torch.uint8, device=rows.device)
    factors = torch.ones(6, device=rows.device)
    for tiled in (False, True):
        sizes: dict[str, Any] = {"num_heads": 6, "chunk_rows": chunk_rows, "tiled": tiled}
        table = SectionTable.build(parts, rows.lines[:, 6], **sizes)
        sizes = {"tile_bytes": rows.block**2 if tiled else 0, "finite": finite, "ends": ends, "arena": arena}
        lay_out_sections(table, mass, factors, index if tiled else None, **sizes)
        section_checksums(arena, ends)


@pytest.mark.parametrize(("block", "head_dim"), [(64, 64), (128, 128)] if torch.cuda.is_available() else [(64, 64)])
def test_nothing_compiles_after_the_warm_up(
    make_batch: Callable[..., Any], device: torch.device, compiled: list[str], block: int, head_dim: int
) -> None:
    group, longest = 3, 40 * block
    batch = make_batch((0, 70), group=group, kv_heads=2, head_dim=head_dim)
    warmer = Warmer(kv=batch.kv, num_heads=6, block=block, chunk_tokens=4 * block, max_tokens=longest)
    warmer.warm_receiver((E4M3, BF16), all_heads=True)
    warmer.warm_sender((E4M3, BF16), row_strides=(1, 4))
    if device.type == "cuda":
        assert compiled, "the first run has to compile, or nothing is counted"
    compiled.clear()
    chance = random.Random(block)
    lengths = [block + 1, longest - 3] + [
        chance.randrange(1, longest) for _ in range(6 if device.type == "cuda" else 0)
    ]
    for length in lengths:
        begin = max(0, length - chance.randrange(1, 2 * block))
        batch = make_batch((begin, length), (0, 5), group=group, kv_heads=2, head_dim=head_dim)
        rows = batch.rows(block)
        index = select_static(rows, 6, sink_blocks=1, local_blocks=2)
        out = batch.poisoned()
        guide_attention(batch.query, batch.kv, rows, index, scale=0.1, out=out)
        tasks = MassTasks.build(rows, group=group, row_stride=chance.choice((1, 4)))
        mass = torch.zeros(tasks.measured.shape[0], 6, rows.num_columns, device=device)
        lse = torch.zeros(6, batch.num_rows, device=device)
        for is_lse_known in (False, True):
            options: dict[str, Any] = {"scale": 0.1, "mass": mass, "row_lse": lse, "is_lse_known": is_lse_known}
            block_masses(batch.query, batch.kv, tasks, **options)
        lay_out(select_by_mass(mass, rows, 0.9), rows, tasks, 4)
        assert not compiled


@pytest.mark.parametrize(("tokens", "widths"), [(1, 1), (16 * 64, 1), (16 * 64 + 1, 2), (1 << 16, 7)])
def test_every_width_of_a_selection_is_met(make_batch: Callable[..., Any], tokens: int, widths: int) -> None:
    batch = make_batch((0, 5))
    warmer = Warmer(kv=batch.kv, num_heads=4, block=64, chunk_tokens=256, max_tokens=tokens)
    lengths = warmer._lengths()
    assert len(lengths) == widths and lengths[-1] == tokens
