"""Tensor parallelism: which heads a rank has, of a sender that publishes its share and of a receiver that reads all.

vLLM gives rank i of n the i-th n-th of a model's query heads. Each rank of a sender publishes maps of its own heads, as
a producer of its own; a receiver reads the maps of all of them, joined in order, and each of its ranks recombines them
to its own heads. So the degrees of the two need not agree.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from mapflow.connector.messages import Hit
from mapflow.connector.plan import Plan
from mapflow.connector.wants import LayerWant

_PRODUCER = re.compile(r"(.+)/tp(\d+)of(\d+)")


def plan_of_rank(plan: Plan, rank: int, size: int) -> Plan:
    """The plan for one rank's receiver heads; its name stays, its digest does not."""
    if size == 1:
        return plan
    heads = plan.receiver.num_heads // size
    own = slice(rank * heads, (rank + 1) * heads)
    kv_heads = max(plan.receiver.num_kv_heads // size, 1)
    return replace(
        plan,
        receiver=replace(plan.receiver, num_heads=heads, num_kv_heads=kv_heads),
        head_map={layer: tensor[own] for layer, tensor in plan.head_map.items()},
        head_index={layer: tensor[own] for layer, tensor in plan.head_index.items()},
        head_weight={layer: tensor[own] for layer, tensor in plan.head_weight.items()},
    )


def wants_of_rank(wants: Mapping[int, LayerWant], rank: int, size: int, num_heads: int) -> dict[int, LayerWant]:
    """What is wanted of one rank's sender heads, numbered from its first; of some layers that may be no head."""
    heads = num_heads // size
    own = range(rank * heads, (rank + 1) * heads)

    def share(want: LayerWant) -> LayerWant:
        if want.heads is None or size == 1:
            return want
        return replace(want, heads=tuple(head - own.start for head in want.heads if head in own))

    return {layer: share(want) for layer, want in wants.items()}


def longest_run(hits: Sequence[Hit]) -> tuple[int, list[Hit]]:
    """Of the producers that hold all of a model's heads together: the longest run of chunks, and their hits by rank.

    Of runs as long as each other, that of fewer ranks; (0, []) where no set of ranks is complete.
    """
    found: dict[tuple[str, int], dict[int, Hit]] = defaultdict(dict)
    for hit in hits:
        parts = _PRODUCER.fullmatch(hit.producer)
        if parts is not None:
            found[parts[1], int(parts[3])][int(parts[2])] = hit
    runs = [
        (min(hit.num_chunks for hit in ranks.values()), [ranks[rank] for rank in range(size)])
        for (_, size), ranks in found.items()
        if sorted(ranks) == list(range(size))
    ]
    return max(runs, key=lambda run: (run[0], -len(run[1])), default=(0, []))
