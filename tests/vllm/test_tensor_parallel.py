"""Tensor parallelism: sender and receiver with two ranks or one, in every combination that reads across.

A sender of two ranks publishes its heads as two producers; whoever reads joins them. All answers must be those of one
rank on either side: heads that were mistaken for others would show. On GPUs it takes two.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from mapflow.cli.demo.openai import Completion, Server  # noqa: E402
from mapflow.cli.demo.processes import Services, daemon_command, free_port, server_command, wait_ready  # noqa: E402
from mapflow.cli.demo.quality import kl_divergence  # noqa: E402
from mapflow.cli.status import fetch_stats  # noqa: E402
from mapflow.connector.plan import load_plan, with_top_p  # noqa: E402

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1200)]

EXAMPLES = Path(__file__).parents[2] / "examples"
PAIR = EXAMPLES / "pair"
LENGTH = 700
REUSED = 640
ON_GPU = torch.cuda.is_available()
PLANS = ("whole", "sparse", "lossy")
ACROSS = [(2, 1), (1, 2), (2, 2)]
OPTIONS = ("--max-model-len", "2048", "--no-enable-prefix-caching")
GPU_OPTIONS = ("--gpu-memory-utilization", "0.1", "--dtype", "float16", "--block-size", "16")
TOLERANCE = 0.03 if ON_GPU else 2e-3

if ON_GPU and torch.cuda.device_count() < 2:
    pytestmark.append(pytest.mark.skip(reason="needs two GPUs"))


class Engines:
    """A daemon; a sender and a receiver of one rank, and a sender and a receiver of two."""

    def __init__(self, services: Services, folder: Path) -> None:
        self._services, self._folder = services, folder
        self._endpoint = f"unix://{folder / 'mapflow.sock'}"
        self.servers: dict[str, Server] = {}

    def start(self) -> None:
        """All of them; returns when they serve."""
        plans = []
        guide, translate = (load_plan(PAIR / "plans" / f"{mode}.safetensors") for mode in ("guide", "translate"))
        for plan, stem in zip((with_top_p(guide, 1.0), guide, translate), PLANS):
            plan.save(self._folder / f"{stem}.safetensors")
            plans.append(str(self._folder / f"{stem}.safetensors"))
        command = daemon_command(self._endpoint, "256MiB")
        started = [self._services.start("daemon", command, endpoint=self._endpoint)]
        for model, role in (("sender", "kv_producer"), ("receiver", "kv_consumer")):
            for ranks in (1, 2):
                port = free_port()
                extra = {"endpoint": self._endpoint, "plan": plans, "lookup_deadline_s": 5.0, "cost_model": False}
                options = ("--tensor-parallel-size", str(ranks), *OPTIONS, *(GPU_OPTIONS if ON_GPU else ()))
                command = server_command(PAIR / model, port, role, extra, options)
                name, url = f"{model}-{ranks}", f"http://127.0.0.1:{port}"
                started.append(self._services.start(name, command, url=url))
                self.servers[name] = Server(url, model, timeout_s=300.0)
        deadline = time.monotonic() + 900.0
        while wait_ready(started, deadline):
            time.sleep(0.5)

    def publish(self, ranks: int, prompt: list[int]) -> None:
        """Let the sender of so many ranks read a prompt, and wait until its maps are there."""
        before = fetch_stats(self._endpoint).num_entries
        self.servers[f"sender-{ranks}"].complete(prompt, max_tokens=1)
        until = time.monotonic() + 60.0
        while time.monotonic() < until:
            now = fetch_stats(self._endpoint)
            time.sleep(0.5)
            if fetch_stats(self._endpoint).num_entries == now.num_entries > before and not now.num_reservations:
                return
        raise AssertionError("nothing was published")

    def ask(self, ranks: int, prompt: list[int], plan: str | None) -> Completion:
        """The receiver of so many ranks; without a plan: exactly."""
        mapflow = {"reuse": False} if plan is None else {"plan": plan, "report": True}
        return self.servers[f"receiver-{ranks}"].complete(prompt, max_tokens=8, mapflow=mapflow, logprobs=True)

    def log(self, server: str) -> str:
        """What it has logged."""
        return (self._folder / f"{server}.log").read_text(errors="replace")

    def close(self) -> None:
        """Stop them."""
        for server in self.servers.values():
            server.close()
        self._services.stop()


@dataclass(kw_only=True)
class Outcome:
    """Answers by (ranks of the sender, ranks of the receiver, plan), and logs by server."""

    answers: dict[tuple[int, int, str], Completion]
    exact: Completion
    logs: dict[str, str]


@pytest.fixture(scope="module")
def outcome() -> Iterator[Outcome]:
    """First only the sender of two ranks has read the prompt, then the other one too, which is then preferred."""
    with tempfile.TemporaryDirectory(prefix="mapflow-") as name, pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # ranks want NUMA nodes of their own else
        engines = Engines(Services(logs=Path(name)), Path(name))
        try:
            engines.start()
            lines = (EXAMPLES / "calibration.jsonl").read_text().splitlines()
            texts = (engines.servers["receiver-1"].tokenize_text(json.loads(line)["text"]) for line in lines)
            prompt = next(ids[:LENGTH] for ids in texts if len(ids) >= LENGTH)
            answers = {}
            for sender in (2, 1):
                engines.publish(sender, prompt)
                for receiver in (1, 2):
                    for plan in PLANS:
                        answers[sender, receiver, plan] = engines.ask(receiver, prompt, plan)
            exact = engines.ask(1, prompt, None)
            yield Outcome(answers=answers, exact=exact, logs={one: engines.log(one) for one in engines.servers})
        finally:
            engines.close()


@pytest.mark.parametrize(("sender", "receiver"), ACROSS)
def test_guide_at_p_1_gives_plain_tokens(outcome: Outcome, sender: int, receiver: int) -> None:
    whole = outcome.answers[sender, receiver, "whole"]
    assert whole.report["density"] == 1.0
    assert whole.token_ids == outcome.exact.token_ids
    assert whole.logprobs == pytest.approx(outcome.exact.logprobs, abs=TOLERANCE)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize(("sender", "receiver"), ACROSS)
def test_answers_are_those_of_one_rank(outcome: Outcome, sender: int, receiver: int, plan: str) -> None:
    found, alone = outcome.answers[sender, receiver, plan], outcome.answers[1, 1, plan]
    for one in (found, alone):
        assert one.report["reasons"] == {} and one.report["reused_tokens"] == REUSED
    assert found.logprobs == pytest.approx(alone.logprobs, abs=TOLERANCE)


def test_approximation_shows(outcome: Outcome) -> None:
    """Or the tests above would pass without any map."""
    assert kl_divergence(outcome.exact.logprobs, outcome.answers[1, 1, "lossy"].logprobs) > 1e-3


def test_nothing_went_wrong(outcome: Outcome) -> None:
    for log in outcome.logs.values():
        assert "runs without reuse" not in log and "internal error" not in log
