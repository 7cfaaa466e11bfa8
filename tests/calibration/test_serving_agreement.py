"""What evaluation simulates is what the kernels that serve requests compute, from the stored form of the maps on."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from mapflow.calibration.attention import AttentionCall  # noqa: E402
from mapflow.calibration.reuse import LayerRecord, ReuseAttention, block_masses  # noqa: E402
from mapflow.connector.plan import LayerPlan, Mode, ModelSpec, Plan  # noqa: E402
from mapflow.kernels.attention_map import AttentionMap  # noqa: E402
from mapflow.kernels.blob import read_blob  # noqa: E402
from mapflow.kernels.blob_writer import blob_num_bytes, write_blob  # noqa: E402
from mapflow.kernels.compress_reference import assemble_chunk, compress_rows  # noqa: E402
from mapflow.kernels.guide_reference import guide_attention  # noqa: E402
from mapflow.kernels.mask import guide_mask, mask_density, stack_masses  # noqa: E402
from mapflow.kernels.paged import PagedKV  # noqa: E402
from mapflow.kernels.row_segment import RowSegment  # noqa: E402
from mapflow.kernels.translate_reference import translate_attention  # noqa: E402

BLOCK, CHUNK, NUM_ROWS, PAGE = 64, 128, 384, 16
HEADS, KV_HEADS, SENDER_HEADS, DIM = 6, 3, 4, 8
TOP_P = 0.6


def call(heads: int, kv_heads: int, seed: int) -> AttentionCall:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"query": heads, "key": kv_heads, "value": kv_heads}
    tensors = {name: 2 * torch.randn(count, NUM_ROWS, DIM, generator=generator) for name, count in shapes.items()}
    return AttentionCall(layer=0, scaling=DIM**-0.5, **tensors)


def published(sender: AttentionCall, top_p: float | None) -> list[AttentionMap]:
    """The sender's chunks as they arrive at a receiver, through their serialised form."""
    query, key = sender.query.transpose(0, 1).contiguous(), sender.key.transpose(0, 1).contiguous()
    rows = compress_rows(query, key, first_row=0, block=BLOCK, scale=sender.scaling, top_p=top_p)
    maps = []
    for chunk in range(NUM_ROWS // CHUNK):
        made = assemble_chunk([rows], chunk_index=chunk, chunk_tokens=CHUNK, block=BLOCK, num_heads=SENDER_HEADS)
        blob = bytearray(blob_num_bytes(made))
        write_blob(made, blob)
        maps.append(read_blob(blob))
    return maps


def paged(one: AttentionCall) -> tuple[PagedKV, RowSegment]:
    """Keys and values in pages that lie in reverse order."""
    pages = NUM_ROWS // PAGE
    caches = [
        tensor.reshape(KV_HEADS, pages, PAGE, DIM).transpose(0, 1).flip(0).contiguous()
        for tensor in (one.key, one.value)
    ]
    table = torch.arange(pages - 1, -1, -1, dtype=torch.int32)
    segment = RowSegment(row_begin=0, row_end=NUM_ROWS, out_begin=0, block_table=table)
    return PagedKV(key_cache=caches[0], value_cache=caches[1]), segment


def plan(layer: LayerPlan, **tensors: dict[int, torch.Tensor]) -> Plan:
    return Plan(
        name="p",
        tokenizer_fingerprint="f",
        chunk_tokens=CHUNK,
        block=BLOCK,
        sender=ModelSpec(name="s", revision="1", num_layers=1, num_heads=SENDER_HEADS, num_kv_heads=2, head_dim=DIM),
        receiver=ModelSpec(name="r", revision="1", num_layers=1, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM),
        layers=(layer,),
        **tensors,
    )


@pytest.fixture(scope="module")
def sender() -> LayerRecord:
    one = call(SENDER_HEADS, 2, seed=1)
    return LayerRecord(call=one, mass=block_masses(one, num_rows=NUM_ROWS, block=BLOCK))


def test_guide(sender: LayerRecord) -> None:
    head_map = torch.rand(HEADS, SENDER_HEADS, generator=torch.Generator().manual_seed(2)) - 0.3
    layer = LayerPlan(mode=Mode.GUIDE, sender_layer=0, top_p=TOP_P, sink_blocks=1, local_blocks=2)
    one = call(HEADS, KV_HEADS, seed=3)
    reuse = ReuseAttention(plan(layer, head_map={0: head_map}), {0: sender}, num_rows=NUM_ROWS)
    simulated = reuse.attend(one)

    masses = stack_masses(published(sender.call, None))
    mask = guide_mask(masses, head_map, TOP_P, first_block_row=0, sink_blocks=1, local_blocks=2)
    kv, segment = paged(one)
    served = torch.full((NUM_ROWS, HEADS, DIM), torch.nan)
    query = one.query.transpose(0, 1).contiguous()
    guide_attention(query, kv, [segment], [mask], block=BLOCK, scale=one.scaling, out=served)
    assert reuse.densities == {0: mask_density(mask, first_block_row=0)}
    assert reuse.densities[0] < 1.0
    torch.testing.assert_close(simulated, served.transpose(0, 1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("count", [1, 3])
def test_translate(sender: LayerRecord, count: int) -> None:
    generator = torch.Generator().manual_seed(4)
    index = torch.stack([torch.randperm(SENDER_HEADS, generator=generator)[:count] for _ in range(HEADS)]).int()
    weight = torch.randn(HEADS, count, generator=generator)
    layer = LayerPlan(mode=Mode.TRANSLATE, sender_layer=0, top_p=TOP_P)
    one = call(HEADS, KV_HEADS, seed=5)
    translated = plan(layer, head_index={0: index}, head_weight={0: weight})
    simulated = ReuseAttention(translated, {0: sender}, num_rows=NUM_ROWS).attend(one)

    kv, segment = paged(one)
    served = torch.full((NUM_ROWS, HEADS, DIM), torch.nan)
    maps = published(sender.call, TOP_P)
    translate_attention(kv, [segment], [maps], head_index=index, head_weight=weight, out=served)
    torch.testing.assert_close(simulated, served.transpose(0, 1), rtol=1e-3, atol=1e-3)  # a rounding step may differ
