"""Selection against `mask.py` and `top_p.py`, which sort where the kernel searches a threshold."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from mapflow.kernels.map_table import MapTable
from mapflow.kernels.mask import guide_mask, stack_masses, static_mask
from mapflow.kernels.select import select_blocks, select_by_mass, select_static
from mapflow.kernels.top_p import select_top_p

ON_GPU = torch.cuda.is_available()
ROUNDING = 1e-5  # of the row's mass


def check_masks(got: torch.Tensor, wanted: torch.Tensor, mass: torch.Tensor, p: float, first_block_row: int) -> None:
    """Equal, but for rows where two sums, or two masses at the threshold, differ by rounding; few of those.

    mass: float64 [heads, R, C].
    """
    differing = (got != wanted).any(-1).nonzero().tolist()
    for head, row in differing:
        own = mass[head, row, : first_block_row + row + 1]
        total = float(own.sum())
        ordered = own.sort(descending=True).values
        near_sum = bool(((ordered.cumsum(0) - p * total).abs() < ROUNDING * total).any())
        kept_masses = [float(own[mask[head, row, : len(own)]].sum()) for mask in (got, wanted)]
        near_tie = abs(kept_masses[0] - kept_masses[1]) < ROUNDING * total
        assert near_tie or (near_sum and int((got[head, row] != wanted[head, row]).sum()) == 1), (head, row)
    assert len(differing) <= 0.05 * got.shape[0] * got.shape[1]


def own_rows(mask: torch.Tensor, segment: Any, block: int, first_block_row: int) -> torch.Tensor:
    """The block rows of a segment from a mask that begins at `first_block_row`."""
    rows = segment.block_rows(block)
    return mask[:, rows.start - first_block_row : rows.stop - first_block_row, : rows.stop]


def check_guided(
    batch: Any, maps: Sequence[Any], head_map: torch.Tensor, p: float, sink_blocks: int, local_blocks: int
) -> None:
    table = MapTable.from_maps(maps, batch.device)
    rows = batch.rows(table.block, chunk_blocks=table.chunk_blocks, spans=table.spans)
    floor = {"sink_blocks": sink_blocks, "local_blocks": local_blocks}
    index = select_blocks(table, rows, head_map.to(batch.device), p, **floor)
    for got, segment, chunks in zip(batch.masks(rows, index), batch.segments, maps):
        mass, first = stack_masses(chunks), chunks[0].first_block_row
        wanted = own_rows(guide_mask(mass, head_map, p, first_block_row=first, **floor), segment, table.block, first)
        translated = torch.einsum("is,src->irc", head_map.double(), mass.double()).clamp_min(0)
        exact = own_rows(translated.sqrt(), segment, table.block, first)
        check_masks(got, wanted, exact, p, segment.block_rows(table.block).start)


@pytest.mark.parametrize(
    ("block", "p", "sink_blocks", "local_blocks"),
    [(64, 0.7, 1, 2), (64, 0.0, 0, 0), (128, 0.9, 0, 1), (64, 7.5, 0, 0)],
)
def test_guided_selection(
    make_batch: Callable[..., Any],
    make_maps: Callable[..., Any],
    block: int,
    p: float,
    sink_blocks: int,
    local_blocks: int,
) -> None:
    """Two requests; the second has only chunks from 1 on. Some weights are negative."""
    spans = ((30, 5 * block + 7), (2 * block + 1, 4 * block))
    batch = make_batch(*spans, group=4, kv_heads=1)
    maps = [make_maps(end_chunk=3, block=block), make_maps(end_chunk=2, first_chunk=1, block=block, seed=3)]
    head_map = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
    if p == 0.0:  # for a row without mass it is nothing to `top_p.py`, everything to the kernel
        head_map.abs_()
    check_guided(batch, maps, head_map, p, sink_blocks, local_blocks)


def test_masses_only_will_do(make_batch: Callable[..., Any], make_maps: Callable[..., Any]) -> None:
    batch = make_batch((0, 256), group=3, kv_heads=1)
    head_map = torch.rand(3, 5, generator=torch.Generator().manual_seed(2))
    check_guided(batch, [make_maps(end_chunk=2, heads=5, tile_dtype=None)], head_map, 0.8, 1, 1)


def test_a_row_without_mass_keeps_everything(make_batch: Callable[..., Any], make_maps: Callable[..., Any]) -> None:
    batch = make_batch((0, 256), group=2, kv_heads=1)
    maps, head_map = [make_maps(end_chunk=2)], torch.tensor([[0.0, 0.0, 0.0], [-1.0, -0.5, -2.0]])
    table = MapTable.from_maps(maps, batch.device)
    rows = batch.rows(64, chunk_blocks=2, spans=table.spans)
    index = select_blocks(table, rows, head_map.to(batch.device), 0.5, sink_blocks=0, local_blocks=0)
    assert bool((batch.masks(rows, index)[0] == torch.ones(4, 4).tril().bool()).all())


def test_ties_go_to_the_smaller_column(make_batch: Callable[..., Any]) -> None:
    """Masses whose squares are exact in float32, many of them equal: no rounding, so bit for bit."""
    batch = make_batch((0, 64 * 6), group=2, kv_heads=1, page_size=128)
    rows = batch.rows(64)
    mass = torch.randint(0, 4, (6, 2, 6), generator=torch.Generator().manual_seed(3)).float()
    for p in (0.25, 0.5):
        (got,) = batch.masks(rows, select_by_mass(mass.square().to(batch.device), rows, p))
        wanted = torch.zeros_like(got)
        for row in range(6):
            for head in range(2):
                own = mass[row, head, : row + 1].tolist()
                kept, total = 0.0, sum(own)
                for column in sorted(range(row + 1), key=lambda c: (-own[c], c)):
                    if total == 0 or kept < p * total:
                        wanted[head, row, column] = True
                    kept += own[column]
                wanted[head, row, row] = True
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("p", [0.0, 0.7, 1.0])
def test_selection_by_mass(make_batch: Callable[..., Any], p: float) -> None:
    """Wider than needed, any sum, NaN above the diagonal and behind the columns; three segments."""
    batch = make_batch((70, 64 * 9), (0, 1), (128, 257), group=2, kv_heads=1, page_size=128)
    rows = batch.rows(64)
    block_rows = [segment.block_rows(64) for segment in batch.segments]
    num_rows = sum(len(one) for one in block_rows)
    mass = torch.rand(num_rows, 2, 12, generator=torch.Generator().manual_seed(4)).pow(4) * 37
    start, by_segment = 0, []
    for own in block_rows:
        part = mass[start : start + len(own)]
        for row, block_row in enumerate(own):
            part[row, :, block_row + 1 :] = torch.nan
        by_segment.append(part.transpose(0, 1)[..., : own.stop].nan_to_num(0.0).contiguous())
        start += len(own)
    index = select_by_mass(mass.square().to(batch.device), rows, p)
    for got, own, part in zip(batch.masks(rows, index), block_rows, by_segment):
        wanted = select_top_p(part, p, first_block_row=own.start)
        check_masks(got, wanted, part.double(), p, own.start)


@pytest.mark.parametrize(("sink_blocks", "local_blocks"), [(0, 0), (1, 2), (3, 0), (0, 99)])
def test_static_selection(make_batch: Callable[..., Any], sink_blocks: int, local_blocks: int) -> None:
    batch = make_batch((70, 520), (0, 64))
    rows = batch.rows(64)
    floor = {"sink_blocks": sink_blocks, "local_blocks": local_blocks}
    index = select_static(rows, 5, **floor)
    for got, segment in zip(batch.masks(rows, index), batch.segments):
        own = segment.block_rows(64)
        assert torch.equal(got, static_mask(num_heads=5, first_block_row=own.start, num_block_rows=len(own), **floor))


@pytest.mark.parametrize("seed", range(16 if ON_GPU else 2))
def test_random_shapes(
    make_batch: Callable[..., Any], make_maps: Callable[..., Any], random_shape: Callable[[int], Any], seed: int
) -> None:
    shape = random_shape(seed + 1000)
    batch = make_batch(*shape.spans, **shape.options)
    chunk = 2 * shape.block
    maps = [
        make_maps(end_chunk=-(-end // chunk), first_chunk=begin // chunk, block=shape.block, seed=seed, tile_dtype=None)
        for begin, end in shape.spans
    ]
    generator = torch.Generator().manual_seed(seed)
    head_map = torch.randn(batch.query.shape[1], 3, generator=generator)
    check_guided(batch, maps, head_map, 0.3 + 0.6 * shape.density, seed % 2, seed % 3)
