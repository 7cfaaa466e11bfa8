"""Heads of ranks: shares of plans and wants, and runs of which every rank has maps."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from mapflow.connector.messages import Hit  # noqa: E402
from mapflow.connector.plan import LayerPlan, Mode, ModelSpec, Plan  # noqa: E402
from mapflow.connector.vllm.shards import longest_run, plan_of_rank, wants_of_rank  # noqa: E402
from mapflow.connector.wants import LayerWant, plan_wants  # noqa: E402

HEADS = 4


def plan() -> Plan:
    spec = {"revision": "r", "num_layers": 2, "head_dim": 64}
    index = torch.tensor([[5], [0], [1], [4]], dtype=torch.int32)
    return Plan(
        name="p",
        tokenizer_fingerprint="0" * 32,
        chunk_tokens=128,
        block=64,
        sender=ModelSpec(name="s", num_heads=6, num_kv_heads=2, **spec),
        receiver=ModelSpec(name="r", num_heads=HEADS, num_kv_heads=1, **spec),
        layers=(
            LayerPlan(mode=Mode.GUIDE, sender_layer=1, top_p=0.5),
            LayerPlan(mode=Mode.TRANSLATE, sender_layer=0, top_p=0.5),
        ),
        head_map={0: torch.eye(HEADS, 6)},
        head_index={1: index},
        head_weight={1: torch.ones(HEADS, 1)},
    )


def test_each_rank_has_its_receiver_heads() -> None:
    whole = plan()
    parts = [plan_of_rank(whole, rank, 2) for rank in (0, 1)]
    assert [part.receiver.num_heads for part in parts] == [2, 2]
    assert torch.equal(torch.cat([part.head_map[0] for part in parts]), whole.head_map[0])
    assert torch.equal(torch.cat([part.head_index[1] for part in parts]), whole.head_index[1])
    assert plan_wants(parts[0])[0].heads == (0, 5) and plan_wants(parts[1])[0].heads == (1, 4)
    assert plan_of_rank(whole, 0, 1) is whole


def test_each_rank_is_asked_for_its_sender_heads() -> None:
    wants = {0: LayerWant(heads=(0, 2, 5), tile_top_p=0.5), 1: LayerWant(), 2: LayerWant(heads=(4,))}
    first, second = (wants_of_rank(wants, rank, 2, 6) for rank in (0, 1))
    assert (first[0].heads, second[0].heads) == ((0, 2), (2,)) and first[0].tile_top_p == 0.5
    assert (first[1].heads, second[1].heads) == (None, None)
    assert (first[2].heads, second[2].heads) == ((), (1,)), "measured all the same: readers want every rank's map"
    assert wants_of_rank(wants, 0, 1, 6) == wants


def hit(producer: str, num_chunks: int) -> Hit:
    return Hit(want=0, producer=producer, num_chunks=num_chunks, extents=())


def test_a_run_is_as_long_as_its_shortest_rank() -> None:
    ranks = [hit("m@1/bfloat16/tp1of2", 5), hit("m@1/bfloat16/tp0of2", 3)]
    length, hits = longest_run([*ranks, hit("m@1/bfloat16/tp0of4", 9)])
    assert (length, [one.producer for one in hits]) == (3, ["m@1/bfloat16/tp0of2", "m@1/bfloat16/tp1of2"])
    length, hits = longest_run([*ranks, hit("m@1/bfloat16/tp0of1", 4)])
    assert (length, [one.producer for one in hits]) == (4, ["m@1/bfloat16/tp0of1"])


def test_ranks_of_other_precisions_do_not_complete_each_other() -> None:
    assert longest_run([hit("m@1/bfloat16/tp0of2", 3), hit("m@1/float16/tp1of2", 3)]) == (0, [])
    assert longest_run([hit("nonsense", 3)]) == (0, []) and longest_run([]) == (0, [])
