"""TTFT with and without reuse: `python benchmarks/ttft.py`, one command, real vLLM engines and a real daemon.

Engines live side by side on one GPU and answer in turn, so that what changes over time hits all alike: plain vLLM, vLLM
with the plugin (a miss, guide, translate), and a receiver that estimates its blocks itself (FlexPrefill's way). Prints
a table and writes `benchmarks/results/ttft-<gpu>.json` with every sample. Weights are random and maps synthetic, of a
stated density (`ttft_setup.py`).
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))  # PYTHONSAFEPATH, which this project runs with, leaves it out

from engines import CHUNK_TOKENS, Engine, connected, daemon, engine_options, header
from ttft_setup import SHAPES, make_model, make_plan, make_prompt, publish

from kernels import write_report
from mapflow.connector.client import Client
from mapflow.connector.messages import Producer
from mapflow.connector.plan import Mode, Plan

RESULTS = Path(__file__).parent / "results"


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


def first_layers(layers: int) -> list[int]:
    """Of a receiver with so many layers, the first that reuse anything: r = 3, and a third of them."""
    return sorted({min(3, layers - 1), layers // 3})


def variants(layers: int, arguments: argparse.Namespace) -> list[Variant]:
    """What is measured, plain vLLM first."""
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

    common = {"model": str(receiver), "engine": engine_options(arguments)}
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
    """Repeats of every variant, in an order that changes, at one context, after one round that does not count."""
    samples: dict[Variant, list[float]] = {one: [] for one in wanted}
    chance = random.Random(context)
    for repeat in range(repeats + 1):
        for one in chance.sample(wanted, len(wanted)):  # what a GPU did before tells in its clocks
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
    report: dict[str, Any] = {
        **header(arguments),
        "sender": arguments.sender,
        "receiver": arguments.receiver,
        "decode_ms_per_token": {},
        "cases": [],
    }
    output = arguments.output or RESULTS / f"ttft-{report['gpu'].replace(' ', '-').lower()}.json"
    with tempfile.TemporaryDirectory(prefix="mapflow-") as name, ExitStack() as stack:
        folder = Path(name)
        sender = make_model(folder / "sender", arguments.sender)
        receiver = make_model(folder / "receiver", arguments.receiver)
        plans = _plans(sender, receiver, arguments)
        for plan in plans.values():
            plan.save(folder / f"{plan.name}.safetensors")
        endpoint = stack.enter_context(daemon(folder, arguments))
        running = stack.enter_context(engines(folder, receiver, plans, endpoint, arguments))
        some = next(iter(plans.values()))
        producer = Producer.of(some.sender.model_id, "bfloat16")
        client = stack.enter_context(connected(endpoint, some.namespace(), producer))
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
