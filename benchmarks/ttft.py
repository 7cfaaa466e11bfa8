"""TTFT with and without reuse: `python benchmarks/ttft.py`, one command, real vLLM engines and a real daemon.

Engines live side by side on one GPU and answer in turn, so that what changes over time hits all alike: plain vLLM, vLLM
with the plugin (a miss, guide, translate), and a receiver that estimates its blocks itself (FlexPrefill's way). Prints
a table and writes `benchmarks/results/ttft-<gpu>.json` with every sample. Weights are random and maps synthetic, of a
stated density (`ttft_setup.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))  # PYTHONSAFEPATH, which this project runs with, leaves it out

from ttft_setup import SHAPES, make_model, make_plan, make_prompt, publish

from kernels import git_commit, versions, write_report
from mapflow.cli.demo.processes import Services, daemon_command, wait_ready
from mapflow.connector.client import Client
from mapflow.connector.client_config import ClientConfig
from mapflow.connector.messages import Producer
from mapflow.connector.plan import Mode, Plan

RESULTS = Path(__file__).parent / "results"
CHUNK_TOKENS = 512


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One line of the table for each context."""

    mode: str  # as in the results
    engine: str  # which of the engines answers
    tier: str
    plan: str = ""  # of the engine's plans; empty for none
    r: int = 0
    density: float = 1.0
    k: int = 0


class Engine:
    """A process of `ttft_engine.py`."""

    def __init__(self, settings: dict[str, Any], log: Path) -> None:
        environment = {
            **os.environ,
            "PYTHONSAFEPATH": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_USE_FLASHINFER_SAMPLER": "0",
        }
        command = [sys.executable, str(Path(__file__).with_name("ttft_engine.py")), json.dumps(settings)]
        with log.open("wb") as stderr:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, env=environment, text=True
            )
        self._log = log

    def wait(self) -> None:
        """Until it serves."""
        self._answer()

    def ask(self, prompt: Sequence[int], mapflow: dict[str, Any] | None, max_tokens: int = 1) -> dict[str, Any]:
        """One request: {"ms", "report"}."""
        assert self._process.stdin is not None
        request = {"prompt": list(prompt), "mapflow": mapflow, "max_tokens": max_tokens}
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return self._answer()

    def stop(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"an engine ended: {self._log.read_text(errors='replace')[-3000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def first_layers(layers: int) -> list[int]:
    """Of a receiver with so many layers, the first that reuse anything: r = 3, and a third of them."""
    return sorted({min(3, layers - 1), layers // 3})


def variants(layers: int, arguments: argparse.Namespace) -> list[Variant]:
    """What is measured, in this order within every repeat."""
    found = [
        Variant(mode="plain", engine="plain", tier=""),
        Variant(mode="exact", engine="mapflow", tier=""),
        Variant(mode="miss", engine="mapflow", tier=""),
    ]
    for r in first_layers(layers):
        guide = {"r": r, "density": arguments.guide_density}
        found.append(Variant(mode="guide", engine="mapflow", tier="pinned", plan=f"guide-{r}", **guide))
        found.append(Variant(mode="online", engine="online", tier="", plan=f"static-{r}", **guide))
        translate = {"r": r, "density": arguments.translate_density, "k": 1}
        found.append(Variant(mode="translate", engine="mapflow", tier="pinned", plan=f"translate-{r}", **translate))
    return found


@contextmanager
def engines(
    folder: Path, receiver: Path, plans: dict[str, Plan], endpoint: str, arguments: argparse.Namespace
) -> Iterator[dict[str, Engine]]:
    """All engines, started together."""

    def transfer(names: Sequence[str]) -> dict[str, Any]:
        paths = [str(folder / f"{name}.safetensors") for name in names]
        extra = {"endpoint": endpoint, "plan": paths, "lookup_deadline_s": 1.0}
        return {"kv_connector": "mapflow", "kv_role": "kv_consumer", "kv_connector_extra_config": extra}

    longest = max(arguments.contexts) + 64
    engine: dict[str, Any] = {
        "max_model_len": longest,
        "max_num_batched_tokens": longest,
        "max_num_seqs": 4,
        "enable_prefix_caching": False,
        "enforce_eager": arguments.eager,
    }
    if torch.cuda.is_available():
        engine |= {"gpu_memory_utilization": 0.25, "kv_cache_memory_bytes": 12 << 30, "dtype": "bfloat16"}
    else:
        engine |= {"dtype": "float32", "block_size": 32}
    common = {"model": str(receiver), "engine": engine}
    settings = {
        "plain": {**common, "transfer": None, "online_density": None},
        "mapflow": {
            **common,
            "transfer": transfer([name for name in plans if not name.startswith("static")]),
            "online_density": None,
        },
    }
    if torch.cuda.is_available():
        static = transfer([name for name in plans if name.startswith("static")])
        settings["online"] = {**common, "transfer": static, "online_density": arguments.guide_density}
    running = {name: Engine(one, (arguments.logs or folder) / f"{name}.log") for name, one in settings.items()}
    try:
        for one in running.values():
            one.wait()
        yield running
    finally:
        for one in running.values():
            one.stop()


def measure(
    running: dict[str, Engine], wanted: Sequence[Variant], context: int, prompts: dict[str, list[int]], repeats: int
) -> list[dict[str, Any]]:
    """Interleaved repeats of every variant at one context, after one round that does not count."""
    samples: dict[Variant, list[float]] = {one: [] for one in wanted}
    for repeat in range(repeats + 1):
        for one in wanted:
            mapflow: dict[str, Any] | None = None
            prompt = prompts.get(one.plan, prompts["exact"])
            if one.mode == "exact":
                mapflow = {"reuse": False}
            elif one.mode == "miss":
                prompt, mapflow = make_prompt(context, 10_000 + repeat), {"report": True}
            elif one.plan:
                mapflow = {"plan": one.plan, "report": repeat == 0}
            # a report of the last prefill step comes with the step after it
            answer = running[one.engine].ask(prompt, mapflow, max_tokens=1 if repeat else 2)
            if repeat == 0:
                _check(one, context, answer["report"])
            else:
                samples[one].append(answer["ms"])
    full = statistics.median(samples[wanted[0]])
    return [_case(one, context, samples[one], full) for one in wanted]


def _check(variant: Variant, context: int, report: dict[str, Any] | None) -> None:
    """That the round before the measured ones did what its name says."""
    if variant.plan and (report is None or report["reused_tokens"] < context - 2 * CHUNK_TOKENS or report["reasons"]):
        raise RuntimeError(f"{variant.plan} at {context} tokens reused less than it should: {report}")
    if variant.mode == "miss" and (report is None or report["reused_tokens"]):
        raise RuntimeError(f"a prompt that nobody read was not a miss: {report}")


def _case(variant: Variant, context: int, samples: list[float], full: float) -> dict[str, Any]:
    ms = statistics.median(samples)
    return {
        "context": context,
        "mode": variant.mode,
        "tier": variant.tier,
        "r": variant.r,
        "density": variant.density,
        "k": variant.k,
        "ttft_ms": round(ms, 2),
        "full_ms": round(full, 2),
        "change_percent": round(100 * (ms / full - 1), 2),
        "samples": [round(one, 2) for one in samples],
    }


def decode(running: dict[str, Engine], context: int, repeats: int) -> dict[str, float]:
    """Milliseconds of a decoded token, with and without the plugin."""
    found: dict[str, list[float]] = {"plain": [], "mapflow": []}
    prompt = make_prompt(context, 77)
    for repeat in range(repeats + 1):
        for name, into in found.items():
            one, many = (running[name].ask(prompt, None, tokens)["ms"] for tokens in (1, 65))
            if repeat:
                into.append((many - one) / 64)
    return {name: round(statistics.median(values), 4) for name, values in found.items()}


def main() -> None:
    """Parse, set up, measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--sender", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--receiver", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--contexts", nargs="+", type=int, default=[4096, 8192, 16384, 32768])
    parser.add_argument("--guide-density", type=float, default=0.1)
    parser.add_argument("--translate-density", type=float, default=0.05)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--arena", default="48GiB", help="of the daemon; translate at 32k tokens needs 30 GB")
    parser.add_argument("--eager", action="store_true", help="no torch.compile and no CUDA graphs")
    parser.add_argument("--commit", default=None, help="the commit that is measured, where git cannot be asked")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--logs", type=Path, help="an existing folder where the logs of daemon and engines stay")
    arguments = parser.parse_args()
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    output = arguments.output or RESULTS / f"ttft-{gpu.replace(' ', '-').lower()}.json"
    report: dict[str, Any] = {
        "gpu": gpu,
        "date": time.strftime("%Y-%m-%d"),
        "commit": arguments.commit or git_commit(),
        "versions": versions(),
        "sender": arguments.sender,
        "receiver": arguments.receiver,
        "eager": arguments.eager,
        "decode_ms_per_token": {},
        "cases": [],
    }
    with tempfile.TemporaryDirectory(prefix="mapflow-") as name, ExitStack() as stack:
        folder = Path(name)
        sender = make_model(folder / "sender", arguments.sender)
        receiver = make_model(folder / "receiver", arguments.receiver)
        plans = _plans(sender, receiver, arguments)
        for plan in plans.values():
            plan.save(folder / f"{plan.name}.safetensors")
        endpoint = f"unix://{folder / 'mapflow.sock'}"
        services = Services(logs=arguments.logs or folder)
        stack.callback(services.stop)
        daemon = services.start("daemon", daemon_command(endpoint, arguments.arena), endpoint=endpoint)
        while wait_ready([daemon], time.monotonic() + 120.0):
            time.sleep(0.1)
        running = stack.enter_context(engines(folder, receiver, plans, endpoint, arguments))
        client, producer = _publisher(endpoint, next(iter(plans.values())))
        stack.callback(client.close)
        wanted = [one for one in variants(SHAPES[arguments.receiver].layers, arguments) if one.engine in running]
        print(f"{'mode':10} {'context':>7} {'r':>3} {'density':>7} {'ms':>9} {'change':>8}")
        for context in arguments.contexts:
            prompts = _publish_all(client, producer, plans, context, arguments)
            for case in measure(running, wanted, context, prompts, arguments.repeats):
                report["cases"].append(case)
                print(
                    f"{case['mode']:10} {context:7} {case['r']:3} {case['density']:7.2f} {case['ttft_ms']:9.2f} "
                    f"{case['change_percent']:+7.1f}%",
                    flush=True,
                )
            write_report(report, output)
        report["decode_ms_per_token"] = decode(running, min(8192, max(arguments.contexts)), arguments.repeats)
        write_report(report, output)
        print(f"decode, ms a token: {report['decode_ms_per_token']}; written to {output}")


def _plans(sender: Path, receiver: Path, arguments: argparse.Namespace) -> dict[str, Plan]:
    layers = SHAPES[arguments.receiver].layers
    block = 128 if torch.cuda.is_available() else 64
    found = {}
    for r in first_layers(layers):
        for mode in (Mode.GUIDE, Mode.TRANSLATE, Mode.STATIC):
            name = f"{mode.value}-{r}"
            size: dict[str, Any] = {"first_layer": r, "block": block, "chunk_tokens": CHUNK_TOKENS}
            found[name] = make_plan(sender, receiver, name=name, mode=mode, **size)
    return found


def _publisher(endpoint: str, plan: Plan) -> tuple[Client, Producer]:
    producer = Producer.of(plan.sender.model_id, "bfloat16")
    config = ClientConfig(
        endpoint=endpoint,
        client_name="benchmark",
        namespace=plan.namespace(),
        producer=producer,
        transfer_deadline_s=60.0,
    )
    client = Client(config)
    client.start()
    if not client.wait_connected(30.0):
        raise RuntimeError(f"no session with the daemon at {endpoint} within 30 s")
    return client, producer


def _publish_all(
    client: Client, producer: Producer, plans: dict[str, Plan], context: int, arguments: argparse.Namespace
) -> dict[str, list[int]]:
    """A prompt of its own for guide and for translate, with maps for the lowest r, which serve the others."""
    prompts = {"exact": make_prompt(context, context)}
    densities = {"guide": arguments.guide_density, "translate": arguments.translate_density}
    for number, (mode, density) in enumerate(densities.items(), start=1):
        prompt = make_prompt(context, context + number)
        of_mode = [plan for name, plan in plans.items() if name.startswith(mode)]
        publish(client, of_mode[0].namespace(), producer, of_mode[0], prompt, density)
        prompts |= {plan.name: prompt for plan in of_mode}
    return prompts


if __name__ == "__main__":
    main()
