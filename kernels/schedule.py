"""Which program of a persistent kernel does which items, so that all of them end at about the same time.

A grid of as many programs as the GPU holds at a time walks through the items in laps. The order of the items is given
(it decides what is in L2 together); within a lap the costliest item goes to the program that has done least so far. Of
a step with 2,048 items of cost 1 to 64 on 132 programs, the busiest then does 2 % more than the average; 66 % more if
items were dealt out in turn. Costs are what is known before the step: block columns up to the diagonal.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from mapflow.kernels.upload import upload

_OVERHEAD = 1.0  # of an item, in block columns


def balance(costs: npt.NDArray[np.float64], num_programs: int) -> npt.NDArray[np.int32]:
    """Item numbers [laps, num_programs], -1 for nothing; each item once, in its lap."""
    num_laps = -(-len(costs) // num_programs)
    table = np.full((num_laps, num_programs), -1, dtype=np.int32)
    load = np.zeros(num_programs)
    for lap in range(num_laps):
        items = np.arange(lap * num_programs, min((lap + 1) * num_programs, len(costs)))
        items = items[np.argsort(-costs[items], kind="stable")]
        programs = np.argsort(load, kind="stable")[: len(items)]
        table[lap, programs] = items
        load[programs] += costs[items]
    return table


class Schedules:
    """The tables of one step, made when a kernel first asks, then kept for its other layers.

    Items are numbered (copy * len(costs) + place) * group + member: KV head by KV head, so that what runs together
    shares K and V, and the heads of a group next to each other.
    """

    def __init__(self, costs: Sequence[int], device: torch.device) -> None:
        """costs: of each line of a step's table, in its order."""
        self._costs = np.asarray(costs, dtype=np.float64) + _OVERHEAD
        self._device = device
        self._tables: dict[tuple[int, int, int], torch.Tensor] = {}

    def table(self, *, copies: int, group: int, num_programs: int) -> torch.Tensor:
        """i32 [laps, programs] on the device; `num_programs` at most, fewer if there are fewer items."""
        wanted = (copies, group, min(num_programs, copies * group * len(self._costs)))
        if wanted not in self._tables:
            costs = np.tile(np.repeat(self._costs, group), copies)
            self._tables[wanted] = upload(torch.from_numpy(balance(costs, wanted[2])), self._device)
        return self._tables[wanted]
