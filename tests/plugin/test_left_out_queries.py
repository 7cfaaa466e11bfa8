"""Rows without queries are noted, and translated all the same when reuse fails."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from mapflow.connector.plan import LayerPlan, Mode, ModelSpec, Plan  # noqa: E402
from mapflow.connector.vllm.batch import BatchRow  # noqa: E402
from mapflow.connector.vllm.left_out_queries import LeftOutQueries  # noqa: E402
from mapflow.connector.vllm.messages import RequestStep, ReuseOrder  # noqa: E402
from mapflow.connector.vllm.reuse import EntryReuse, StepReuse  # noqa: E402
from mapflow.kernels.attention_map import AttentionMap  # noqa: E402
from mapflow.kernels.compress_reference import assemble_chunk, compress_rows  # noqa: E402
from mapflow.kernels.paged import PagedKV  # noqa: E402

HEADS, CHUNK, BLOCK, DIM = 2, 128, 64, 16
SPEC: dict[str, Any] = {"revision": "r", "num_layers": 2, "num_heads": HEADS, "num_kv_heads": 1, "head_dim": DIM}


@pytest.fixture
def maps() -> list[AttentionMap]:
    generator = torch.Generator().manual_seed(1)
    query, keys = (torch.randn(2 * CHUNK, HEADS, DIM, generator=generator) for _ in range(2))
    part = compress_rows(query, keys, first_row=0, block=BLOCK, scale=0.5, top_p=0.8)
    return [assemble_chunk([part], chunk_index=c, chunk_tokens=CHUNK, block=BLOCK, num_heads=HEADS) for c in (0, 1)]


@pytest.fixture
def entry(maps: list[AttentionMap]) -> EntryReuse:
    """Rows 0 to 256 of a prompt at rows 10 to 266 of the batch; those below 192 are reused."""
    plan = Plan(
        name="p",
        tokenizer_fingerprint="0" * 32,
        chunk_tokens=CHUNK,
        block=BLOCK,
        sender=ModelSpec(name="s", **SPEC),
        receiver=ModelSpec(name="r", **SPEC),
        layers=(LayerPlan(mode=Mode.GUIDE, sender_layer=0), LayerPlan(mode=Mode.TRANSLATE, sender_layer=1)),
        head_map={0: torch.ones(HEADS, HEADS)},
        head_index={1: torch.tensor([[0], [1]], dtype=torch.int32)},
        head_weight={1: torch.tensor([[0.5], [1.0]])},
    )
    order = ReuseOrder(plan=0, row_begin=0, row_end=192)
    step = RequestStep(request_id="r", row_begin=0, row_end=256, num_prompt=256, last_page=0, reuse=order)
    table = torch.arange(16, dtype=torch.int32)
    row = BatchRow(step=step, query_begin=10, row_begin=0, row_end=256, block_table=table)
    return EntryReuse(entry=0, row=row, plan=plan, maps={0: maps, 1: maps}, ranges=[(0, 192)])


def test_only_translated_rows_of_layers_that_were_seen(entry: EntryReuse) -> None:
    queries = LeftOutQueries(SimpleNamespace())
    reuse = StepReuse([entry])
    assert queries.needed(reuse, 1, 300) is None, "not seen yet"
    queries.eligible.update((0, 1))
    assert queries.needed(reuse, 0, 300) is None, "guide reads queries"
    assert queries.needed(reuse, 1, 300) == [(0, 10), (202, 300)]
    assert queries.lacks(1) and not queries.lacks(0)
    queries.begin_step()
    assert not queries.lacks(1)


def test_translated_all_the_same(entry: EntryReuse, maps: list[AttentionMap]) -> None:
    """Though the layer's ranges were dropped meanwhile, as happens when reuse fails."""
    asked = []

    def read(order: ReuseOrder, layer: int) -> list[AttentionMap]:
        asked.append(layer)
        return maps

    generator = torch.Generator().manual_seed(2)
    cache = torch.randn(16, 1, 16, DIM, generator=generator)
    kv = PagedKV(key_cache=cache, value_cache=cache)
    query = torch.full((300, HEADS, DIM), torch.nan)
    wanted, out = torch.zeros_like(query), torch.zeros_like(query)
    StepReuse([entry]).attend(1, query, kv, 0.5, wanted)
    queries = LeftOutQueries(SimpleNamespace(maps=read))
    queries.eligible.add(1)
    queries.needed(StepReuse([entry]), 1, 300)
    entry.ranges.clear()
    queries.attend(1, query, kv, 0.5, out)
    assert asked == [1]
    assert torch.equal(out, wanted) and bool((out[10:202] != 0).any()) and not bool(out[202:].any())
