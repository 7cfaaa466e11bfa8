"""A plan by the kernels, inside a receiver: as the simulation says, but for rounding."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import ON_GPU  # before any kernel is imported

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from mapflow.calibration.attention import ObservedModel  # noqa: E402
from mapflow.calibration.kernel_attention import KernelAttention, gpu_timer  # noqa: E402
from mapflow.calibration.models import load_model, read_facts  # noqa: E402
from mapflow.calibration.reuse import Recorder, ReuseAttention  # noqa: E402
from mapflow.calibration.sensitivity import with_layers  # noqa: E402
from mapflow.connector.plan import LayerPlan, Mode, Plan, load_plan  # noqa: E402

PAIR = Path(__file__).parents[3] / "examples" / "pair"
DEVICE = "cuda" if ON_GPU else "cpu"
NUM_ROWS, NUM_TOKENS = 256, 280


def _once(call: Callable[[], object]) -> float:
    call()
    return 1.0


@pytest.fixture(scope="module")
def models() -> tuple[ObservedModel, ObservedModel]:
    facts = (read_facts(PAIR / name) for name in ("sender", "receiver"))
    sender, receiver = (ObservedModel(load_model(one, device=DEVICE, dtype="float32")) for one in facts)
    return sender, receiver


def _plan(mode: Mode) -> Plan:
    name = "translate" if mode is Mode.TRANSLATE else "guide"
    plan = load_plan(PAIR / "plans" / f"{name}.safetensors")
    number = next(number for number, layer in enumerate(plan.layers) if layer.needs_map)
    if mode is Mode.STATIC:
        return with_layers(plan, {number: LayerPlan(mode=mode, sink_blocks=1, local_blocks=2)})
    return with_layers(plan, {number: plan.layers[number]})


@pytest.mark.parametrize("mode", [Mode.GUIDE, Mode.TRANSLATE, Mode.STATIC])
def test_as_simulated(models: tuple[ObservedModel, ObservedModel], mode: Mode) -> None:
    plan = _plan(mode)
    ids = torch.randint(20, 4000, (NUM_TOKENS,), generator=torch.Generator().manual_seed(1)).tolist()
    recorder = Recorder(frozenset(plan.map_layers), num_rows=NUM_ROWS, block=plan.block)
    models[0].run(ids, recorder)
    kernels = KernelAttention(plan, recorder.records, num_rows=NUM_ROWS, timer=gpu_timer if ON_GPU else _once)
    found = models[1].run(ids, kernels, logits_from=64).log_softmax(-1)
    wanted = models[1].run(ids, ReuseAttention(plan, recorder.records, num_rows=NUM_ROWS), logits_from=64)
    wanted = wanted.log_softmax(-1)
    exact = models[1].run(ids, Recorder(frozenset(), num_rows=0, block=1), logits_from=64).log_softmax(-1)

    def divergence(log_p: torch.Tensor, log_q: torch.Tensor) -> float:
        return float((log_p.exp() * (log_p - log_q)).sum(-1).mean())

    assert divergence(wanted, found) < 0.1 * divergence(wanted, exact) + 1e-4
    assert set(kernels.reuse_ms) == set(kernels.full_ms) == set(plan.reusing_layers)
    assert all(ms > 0 for ms in (*kernels.reuse_ms.values(), *kernels.full_ms.values()))


@pytest.mark.skipif(not ON_GPU, reason="evaluate times kernels on a GPU only")
def test_evaluate_measures() -> None:
    from mapflow.calibration.evaluate import evaluate
    from mapflow.calibration.evaluation_config import EvaluationConfig

    texts = PAIR.parent / "calibration.jsonl"
    config = EvaluationConfig(
        sender=PAIR / "sender", receiver=PAIR / "receiver", texts=texts, max_documents=1, device="cuda"
    )
    (judged,) = evaluate(config, [load_plan(PAIR / "plans" / "guide.safetensors")])
    assert judged.measured_ms is not None and all(ms > 0 for ms in judged.measured_ms)
