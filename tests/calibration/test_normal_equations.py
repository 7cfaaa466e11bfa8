"""The sums against direct ones over whole maps, and the heads they lead to when the truth is known."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from mapflow.calibration.attention import AttentionCall  # noqa: E402
from mapflow.calibration.document_pass import sample_rows  # noqa: E402
from mapflow.calibration.layer_map import fit_layers  # noqa: E402
from mapflow.calibration.normal_equations import (  # noqa: E402
    NormalEquations,
    ReceiverSide,
    add_energy,
    add_sender_layer,
    load_checkpoint,
    save_checkpoint,
)

SENDER_HEADS, HEADS, KV_HEADS, DIM = 4, 6, 3, 5
SENDER_LAYERS, RECEIVER_LAYERS = (0, 2, 3), (1, 2)


def empty() -> NormalEquations:
    return NormalEquations.zeros(
        receiver_layers=RECEIVER_LAYERS,
        sender_layers=SENDER_LAYERS,
        receiver_heads=HEADS,
        receiver_kv_heads=KV_HEADS,
        sender_heads=SENDER_HEADS,
    )


def calls(num_tokens: int, seed: int) -> list[AttentionCall]:
    generator = torch.Generator().manual_seed(seed)
    return [
        AttentionCall(
            layer=layer,
            query=2 * torch.randn(SENDER_HEADS, num_tokens, 8, generator=generator),
            key=2 * torch.randn(2, num_tokens, 8, generator=generator),
            value=torch.randn(2, num_tokens, 8, generator=generator),
            scaling=8**-0.5,
        )
        for layer in SENDER_LAYERS
    ]


def random_values(num_tokens: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + seed)
    return [torch.randn(KV_HEADS, num_tokens, DIM, generator=generator) for _ in RECEIVER_LAYERS]


def random_outputs(num_tokens: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(200 + seed)
    return [torch.randn(HEADS, num_tokens, DIM, generator=generator) for _ in RECEIVER_LAYERS]


def add(equations: NormalEquations, side: ReceiverSide, sender: list[AttentionCall], rows_at_once: int = 16) -> None:
    add_energy(equations, side)
    for call in sender:
        add_sender_layer(equations, side, call, rows_at_once=rows_at_once)


@pytest.mark.parametrize(("fraction", "rows_at_once"), [(1.0, 16), (1.0, 1000), (0.3, 7)])
def test_sums_equal_direct_ones(fraction: float, rows_at_once: int) -> None:
    num_tokens = 53
    values, outputs, sender = random_values(num_tokens, 0), random_outputs(num_tokens, 0), calls(num_tokens, 0)
    rows = sample_rows(num_tokens, fraction, seed=3)
    equations = empty()
    add(equations, ReceiverSide.from_calls(values, outputs, rows), sender, rows_at_once)
    for j in range(len(RECEIVER_LAYERS)):
        own = outputs[j][:, rows].double()
        torch.testing.assert_close(equations.energy[j], own.square().sum((1, 2)))
        for m, call in enumerate(sender):
            maps = call.probabilities(torch.arange(num_tokens)).double()[:, rows]  # [S, rows, num_tokens]
            for head in range(HEADS):
                features = (maps @ values[j][head // 2].double()).flatten(1)  # [S, rows * DIM]
                torch.testing.assert_close(equations.head_gram(j)[m, head], features @ features.T, rtol=1e-5, atol=1e-4)
                torch.testing.assert_close(
                    equations.moment[j, m, head], features @ own[head].flatten(), rtol=1e-4, atol=1e-4
                )


def mixed_outputs(values: list[torch.Tensor], sender: list[AttentionCall], noise: float) -> list[torch.Tensor]:
    """Receiver layer 1 mixes heads of sender layer 3, receiver layer 2 those of sender layer 0."""
    outputs = []
    for j, m in enumerate((2, 0)):
        maps = sender[m].probabilities(torch.arange(sender[m].num_tokens))
        per_head = [
            (0.75 * maps[head % 4] + 0.25 * maps[(head + 1) % 4]) @ values[j][head // 2] for head in range(HEADS)
        ]
        generator = torch.Generator().manual_seed(j)
        clean = torch.stack(per_head)
        outputs.append(clean + noise * torch.randn(clean.shape, generator=generator))
    return outputs


def mixed_equations(noise: float = 1e-3) -> NormalEquations:
    equations = empty()
    for seed, num_tokens in enumerate((90, 61, 120)):
        values, sender = random_values(num_tokens, seed), calls(num_tokens, seed)
        side = ReceiverSide.from_calls(values, mixed_outputs(values, sender, noise), torch.arange(num_tokens))
        add(equations, side, sender)
    return equations


def test_dense_fit_recovers_mixtures() -> None:
    fits = fit_layers(mixed_equations(), heads_per_head=None)
    assert {layer: fit.sender_layer for layer, fit in fits.items()} == {1: 3, 2: 0}
    expected = torch.zeros(HEADS, SENDER_HEADS)
    for head in range(HEADS):
        expected[head, head % 4], expected[head, (head + 1) % 4] = 0.75, 0.25
    for fit in fits.values():
        torch.testing.assert_close(fit.weight, expected, rtol=0, atol=5e-3)
        assert fit.error < 0.02
        assert fit.candidate_errors.sort().values[1] > 5 * fit.error


def test_sparse_fit_takes_the_right_heads() -> None:
    equations = mixed_equations()
    two, one = fit_layers(equations, heads_per_head=2), fit_layers(equations, heads_per_head=1)
    for layer, sender_layer in ((1, 3), (2, 0)):
        assert two[layer].sender_layer == one[layer].sender_layer == sender_layer
        assert [set(heads) for heads in two[layer].index.tolist()] == [{h % 4, (h + 1) % 4} for h in range(HEADS)]
        assert one[layer].index.flatten().tolist() == [h % 4 for h in range(HEADS)]
        assert two[layer].error < one[layer].error
        assert two[layer].index.dtype == torch.int32


def test_merge_of_documents_equals_streaming_them() -> None:
    streamed, merged = empty(), empty()
    for seed, num_tokens in enumerate((40, 75)):
        side = ReceiverSide.from_calls(
            random_values(num_tokens, seed), random_outputs(num_tokens, seed), torch.arange(num_tokens)
        )
        alone = empty()
        for target in (streamed, alone):
            add(target, side, calls(num_tokens, seed))
        merged.merge(alone)
    for name in ("gram", "moment", "energy"):
        torch.testing.assert_close(getattr(streamed, name), getattr(merged, name), rtol=1e-14, atol=0)


def test_checkpoint_round_trip_and_refusals(tmp_path: Path) -> None:
    equations, path = mixed_equations(), tmp_path / "run.partial.safetensors"
    save_checkpoint(path, equations, digest="abc", documents_done=3)
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
    loaded = load_checkpoint(path, empty(), digest="abc")
    assert loaded is not None and loaded[1] == 3
    for name in ("gram", "moment", "energy"):
        assert torch.equal(getattr(loaded[0], name), getattr(equations, name))
    assert load_checkpoint(path, empty(), digest="other") is None
    path.write_bytes(path.read_bytes()[:100])
    assert load_checkpoint(path, empty(), digest="abc") is None


def test_sampled_rows_are_ascending_seeded_and_of_the_size_asked_for() -> None:
    rows = sample_rows(200, 0.25, seed=1)
    assert len(rows) == 50 and (rows.diff() > 0).all()
    assert torch.equal(rows, sample_rows(200, 0.25, seed=1))
    assert not torch.equal(rows, sample_rows(200, 0.25, seed=2))
    assert torch.equal(sample_rows(5, 1.0, seed=0), torch.arange(5))
    assert len(sample_rows(5, 0.01, seed=0)) == 1
