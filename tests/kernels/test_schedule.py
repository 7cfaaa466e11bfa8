"""The division of labour of persistent kernels."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from mapflow.kernels.schedule import Schedules, balance  # noqa: E402


@pytest.mark.parametrize("num_items", [1, 7, 131, 132, 133, 5000])
@pytest.mark.parametrize("num_programs", [1, 3, 132])
def test_each_item_once_and_in_its_lap(num_items: int, num_programs: int) -> None:
    costs = np.random.default_rng(num_items).random(num_items) + 0.1
    table = balance(costs, num_programs)
    assert table.shape == (-(-num_items // num_programs), num_programs)
    for lap, row in enumerate(table):
        wanted = range(lap * num_programs, min((lap + 1) * num_programs, num_items))
        assert sorted(row[row >= 0]) == list(wanted)
    assert (table[:-1] >= 0).all()


@pytest.mark.parametrize("tokens", [4096, 8192, 16384, 65536])
@pytest.mark.parametrize(("kv_heads", "group"), [(8, 4), (8, 2), (4, 8), (2, 4), (1, 8)])
def test_no_program_has_much_more_to_do(tokens: int, kv_heads: int, group: int) -> None:
    """132 programs over whole prompts, long rows first; dealt out in turn some of these are over 1.7."""
    blocks = np.arange(tokens // 128, 0, -1)
    table = Schedules(blocks.tolist(), torch.device("cpu")).table(copies=kv_heads, group=group, num_programs=132)
    costs = np.tile(np.repeat(blocks, group), kv_heads)
    numbers = table.numpy()
    loads = np.where(numbers >= 0, costs[numbers], 0).sum(0)
    assert loads.max() <= 1.1 * loads.mean()


def test_tables_are_made_once_and_never_larger_than_the_work() -> None:
    schedules = Schedules([3, 2, 1], torch.device("cpu"))
    table = schedules.table(copies=2, group=2, num_programs=132)
    assert table.shape == (1, 12) and table.dtype == torch.int32
    assert schedules.table(copies=2, group=2, num_programs=132) is table
    assert schedules.table(copies=2, group=2, num_programs=5).shape == (3, 5)
