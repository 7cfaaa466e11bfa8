"""Simulated reuse against whole maps in float64: masks, combined tiles, and the rows that must stay exact."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from mapflow.calibration.attention import AttentionCall  # noqa: E402
from mapflow.calibration.reuse import LayerRecord, ReuseAttention, block_masses, pooled_masses  # noqa: E402
from mapflow.connector.plan import LayerPlan, Mode, ModelSpec, Plan  # noqa: E402
from mapflow.kernels.attention_map import decode_mass, encode_mass  # noqa: E402

BLOCK, NUM_ROWS, NUM_TOKENS = 64, 256, 300
HEADS, KV_HEADS, SENDER_HEADS = 6, 3, 4


def call(heads: int, kv_heads: int, seed: int) -> AttentionCall:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"query": heads, "key": kv_heads, "value": kv_heads}
    tensors = {name: 2 * torch.randn(count, NUM_TOKENS, 8, generator=generator) for name, count in shapes.items()}
    return AttentionCall(layer=0, scaling=8**-0.5, **tensors)


def whole_map(one: AttentionCall) -> torch.Tensor:
    """f64 [heads, NUM_TOKENS, NUM_TOKENS]."""
    key = one.key.double().repeat_interleave(one.group, 0)
    scores = one.query.double() @ key.transpose(1, 2) * one.scaling
    future = torch.ones(NUM_TOKENS, NUM_TOKENS, dtype=torch.bool).triu(1)
    return scores.masked_fill(future, -torch.inf).softmax(-1)


def times_values(maps: torch.Tensor, one: AttentionCall) -> torch.Tensor:
    return maps @ one.value.double().repeat_interleave(one.group, 0)


def whole_masses(maps: torch.Tensor) -> torch.Tensor:
    """f64 [heads, blocks, blocks] of the reused rows."""
    size = NUM_ROWS // BLOCK
    return maps[:, :NUM_ROWS, :NUM_ROWS].reshape(-1, size, BLOCK, size, BLOCK).sum(4).square().mean(2).sqrt()


def top_p(masses: torch.Tensor, p: float) -> torch.Tensor:
    """The rule in plain Python: bool like `masses`."""
    kept = torch.zeros_like(masses, dtype=torch.bool)
    for head, row in torch.cartesian_prod(torch.arange(masses.shape[0]), torch.arange(masses.shape[1])).tolist():
        share = masses[head, row, : row + 1] / masses[head, row, : row + 1].sum()
        before = 0.0
        for column in share.argsort(descending=True).tolist():
            kept[head, row, column] = before < p
            before += float(share[column])
        kept[head, row, row] = True
    return kept


def tokens(mask: torch.Tensor) -> torch.Tensor:
    return mask.repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)


def plan(layer: LayerPlan, **tensors: dict[int, torch.Tensor]) -> Plan:
    return Plan(
        name="p",
        tokenizer_fingerprint="f",
        chunk_tokens=BLOCK,
        block=BLOCK,
        sender=ModelSpec(name="s", revision="1", num_layers=1, num_heads=SENDER_HEADS, num_kv_heads=2, head_dim=8),
        receiver=ModelSpec(name="r", revision="1", num_layers=1, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=8),
        layers=(layer,),
        tile_dtype="bf16",
        **tensors,
    )


@pytest.fixture(scope="module")
def sender() -> LayerRecord:
    one = call(SENDER_HEADS, 2, seed=1)
    return LayerRecord(call=one, mass=block_masses(one, num_rows=NUM_ROWS, block=BLOCK))


def test_block_masses_equal_those_of_the_whole_map(sender: LayerRecord) -> None:
    torch.testing.assert_close(sender.mass.double(), whole_masses(whole_map(sender.call)), rtol=1e-5, atol=1e-7)


def test_guide_attends_exactly_inside_top_p_of_root_masses_and_floor(sender: LayerRecord) -> None:
    head_map = torch.rand(HEADS, SENDER_HEADS, generator=torch.Generator().manual_seed(2)) - 0.3
    layer = LayerPlan(mode=Mode.GUIDE, sender_layer=0, top_p=0.3, sink_blocks=0, local_blocks=1)
    reuse = ReuseAttention(plan(layer, head_map={0: head_map}), {0: sender}, num_rows=NUM_ROWS)
    one = call(HEADS, KV_HEADS, seed=3)
    output = reuse.attend(one)
    sent = decode_mass(encode_mass(whole_masses(whole_map(sender.call)).float())).double()  # shares of roots are close
    masses = torch.einsum("is,src->irc", head_map.double(), sent).clamp_min(0)
    masses += 1e-12 * (masses.sum(-1, keepdim=True) == 0)  # an empty row keeps every block
    kept = top_p(masses.sqrt(), 0.3)
    for head, row in (masses.amax(-1) <= 1e-12).nonzero().tolist():
        kept[head, row, : row + 1] = True
    maps = whole_map(one)[:, :NUM_ROWS, :NUM_ROWS] * tokens(kept)
    expected = times_values(maps / maps.sum(-1, keepdim=True), _head(one))
    torch.testing.assert_close(output[:, :NUM_ROWS].double(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(output[:, NUM_ROWS:], one.output()[:, NUM_ROWS:], rtol=0, atol=0)
    size = NUM_ROWS // BLOCK
    assert reuse.densities == {0: pytest.approx(int(kept.sum()) / (HEADS * size * (size + 1) / 2))}
    assert reuse.densities[0] < 0.9


def _head(one: AttentionCall) -> AttentionCall:
    """The call without the tokens after the reused rows."""
    cut = {name: getattr(one, name)[:, :NUM_ROWS] for name in ("query", "key", "value")}
    return AttentionCall(layer=0, scaling=one.scaling, **cut)


def test_oracle_takes_the_receivers_own_masses(sender: LayerRecord) -> None:
    one = call(HEADS, KV_HEADS, seed=4)
    own = LayerRecord(call=one, mass=block_masses(one, num_rows=NUM_ROWS, block=BLOCK))
    layer = LayerPlan(mode=Mode.GUIDE, sender_layer=0, top_p=0.5, sink_blocks=0, local_blocks=1)
    guided = plan(layer, head_map={0: torch.ones(HEADS, SENDER_HEADS)})
    output = ReuseAttention(guided, {0: sender}, num_rows=NUM_ROWS, own={0: own}).attend(one)
    maps = whole_map(one)[:, :NUM_ROWS, :NUM_ROWS] * tokens(top_p(whole_masses(whole_map(one)).sqrt(), 0.5))
    expected = times_values(maps / maps.sum(-1, keepdim=True), _head(one))
    torch.testing.assert_close(output[:, :NUM_ROWS].double(), expected, rtol=1e-4, atol=1e-5)


def test_online_takes_masses_of_mean_queries_and_keys(sender: LayerRecord) -> None:
    """At no less than the density asked for, and with the top-p a little lower at less."""
    one = call(HEADS, KV_HEADS, seed=4)
    found = pooled_masses(one, num_rows=NUM_ROWS, block=BLOCK)
    for head in range(HEADS):
        query, key = one.query[head, :NUM_ROWS], one.key[head // (HEADS // KV_HEADS), :NUM_ROWS]
        for row in range(NUM_ROWS // BLOCK):
            mean = query[row * BLOCK : (row + 1) * BLOCK].mean(0)
            scores = torch.stack([mean @ key[c * BLOCK : (c + 1) * BLOCK].mean(0) for c in range(row + 1)])
            torch.testing.assert_close(found[head, row, : row + 1], (scores * one.scaling).softmax(0))
            assert not found[head, row, row + 1 :].any()
    layer = LayerPlan(mode=Mode.GUIDE, sender_layer=0, top_p=0.5, sink_blocks=0, local_blocks=1)
    guided = plan(layer, head_map={0: torch.ones(HEADS, SENDER_HEADS)})
    for wanted in (0.6, 0.8):
        reuse = ReuseAttention(guided, {0: sender}, num_rows=NUM_ROWS, online={0: wanted})
        reuse.attend(one)
        assert wanted <= reuse.densities[0] < wanted + 0.1


def test_static_attends_to_sink_and_window(sender: LayerRecord) -> None:
    one = call(HEADS, KV_HEADS, seed=5)
    reuse = ReuseAttention(plan(LayerPlan(mode=Mode.STATIC, sink_blocks=1, local_blocks=2)), {}, num_rows=NUM_ROWS)
    output = reuse.attend(one)
    age = torch.arange(NUM_ROWS)[:, None] // BLOCK - torch.arange(NUM_ROWS) // BLOCK
    maps = whole_map(one)[:, :NUM_ROWS, :NUM_ROWS] * ((age < 2) | (torch.arange(NUM_ROWS) < BLOCK))
    expected = times_values(maps / maps.sum(-1, keepdim=True), _head(one))
    torch.testing.assert_close(output[:, :NUM_ROWS].double(), expected, rtol=1e-4, atol=1e-5)
    assert reuse.densities == {0: 9 / 10}  # of four block rows only (3, 1) is dropped


@pytest.mark.parametrize("p", [0.5, 1.0])
def test_translate_multiplies_combined_tiles_by_the_values(sender: LayerRecord, p: float) -> None:
    generator = torch.Generator().manual_seed(6)
    index = torch.stack([torch.randperm(SENDER_HEADS, generator=generator)[:2] for _ in range(HEADS)]).int()
    weight = torch.randn(HEADS, 2, generator=generator)
    layer = LayerPlan(mode=Mode.TRANSLATE, sender_layer=0, top_p=p)
    translated = plan(layer, head_index={0: index}, head_weight={0: weight})
    one = call(HEADS, KV_HEADS, seed=7)
    output = ReuseAttention(translated, {0: sender}, num_rows=NUM_ROWS).attend(one)
    theirs = whole_map(sender.call)[:, :NUM_ROWS, :NUM_ROWS]
    if p < 1.0:
        theirs = theirs * tokens(top_p(whole_masses(whole_map(sender.call)), p))
    combined = torch.stack(
        [sum(w * theirs[s] for s, w in zip(index[head].tolist(), weight[head].double())) for head in range(HEADS)]
    )
    expected = times_values(combined, _head(one))
    torch.testing.assert_close(output[:, :NUM_ROWS].double(), expected, rtol=0.02, atol=0.02)  # tiles are bf16
    torch.testing.assert_close(output[:, NUM_ROWS:], one.output()[:, NUM_ROWS:], rtol=0, atol=0)


def test_compute_is_the_exact_output(sender: LayerRecord) -> None:
    one = call(HEADS, KV_HEADS, seed=8)
    reuse = ReuseAttention(plan(LayerPlan(mode=Mode.COMPUTE)), {}, num_rows=NUM_ROWS)
    assert torch.equal(reuse.attend(one), one.output())
    assert reuse.densities == {}
