"""The Hopper kernels on few multiprocessors, so that each program takes many items, against the plain ones.

`make sanitize` runs this file under compute-sanitizer.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from mapflow.kernels import guide_hopper, tiles_hopper
from mapflow.kernels.guide import LOG2_E, _guide, guide_attention
from mapflow.kernels.pack import pack
from mapflow.kernels.tiles import store_tiles

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
    ),
]


@pytest.fixture(params=[1, 3, 132])
def processors(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    for module in (guide_hopper, tiles_hopper):
        monkeypatch.setattr(module, "num_multiprocessors", lambda device: request.param)
    return int(request.param)


@pytest.mark.parametrize(("group", "head_dim", "dtype"), [(3, 128, torch.bfloat16), (1, 64, torch.float16)])
def test_guide(
    make_batch: Callable[..., Any],
    error_of: Callable[..., float],
    processors: int,
    group: int,
    head_dim: int,
    dtype: torch.dtype,
) -> None:
    batch = make_batch((100, 700), (0, 33), (256, 384), group=group, head_dim=head_dim, dtype=dtype)
    rows = batch.rows(128)
    index = batch.index(rows, batch.random_masks(128, 0.5))
    out, plain = batch.poisoned(), batch.poisoned()
    guide_attention(batch.query, batch.kv, rows, index, scale=batch.scale, out=out)
    keys, values = pack(batch.kv.key_cache, rows), pack(batch.kv.value_cache, rows)
    _guide(batch.query, keys, values, rows, index, batch.scale * LOG2_E, plain, group)
    assert torch.equal(out.isnan(), plain.isnan())
    assert error_of(out.nan_to_num(), plain.nan_to_num()) < 5e-3


def test_tiles_some_of_which_nobody_wants(make_batch: Callable[..., Any], processors: int) -> None:
    """e4m3 tiles within one step of e4m3 of bf16 ones; the room of unwanted heads stays as it is."""
    batch = make_batch((128, 768), (0, 128), group=4, kv_heads=1, head_dim=128)
    rows = batch.rows(128)
    index = batch.index(rows, batch.random_masks(128, 0.5))
    lse = torch.full((4, batch.num_rows), 9.0, device=batch.device)
    counts = index.counts.long()
    before = (counts.view(-1).cumsum(0) - counts.view(-1)).view_as(counts)
    found = {}
    for dtype in (torch.float8_e4m3fn, torch.bfloat16):
        size = 128 * 128 * dtype.itemsize
        arena = torch.full((int(counts.sum()) * size,), 0x77, dtype=torch.uint8, device=batch.device)
        offsets = before * size
        offsets[:, 1] = -1
        store_tiles(
            batch.query, batch.kv, rows, index, lse, scale=batch.scale, tile_dtype=dtype, arena=arena, offsets=offsets
        )
        found[dtype] = arena.view(dtype).float().view(-1, 128, 128)
    owners = torch.repeat_interleave(
        torch.arange(4, device=batch.device).expand_as(counts).reshape(-1), counts.view(-1)
    )
    wanted = owners != 1
    e4m3, bf16 = found[torch.float8_e4m3fn][wanted] / 256, found[torch.bfloat16][wanted]
    assert bool(bf16.isfinite().all()) and float(bf16.max()) > 0.01
    assert bool(((e4m3 - bf16).abs() <= bf16 * 2**-3 + 2**-17).all())
    assert bool((found[torch.float8_e4m3fn][~wanted] == found[torch.float8_e4m3fn][~wanted].view(-1)[0]).all())
