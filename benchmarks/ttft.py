"""TTFT with and without reuse: `python benchmarks/ttft.py`, one command, real vLLM engines and a real daemon.

Engines live side by side on one GPU and answer in turn, so that what changes over time hits all alike: plain vLLM, vLLM
with the plugin (a miss, guide, translate), and a receiver that estimates its blocks itself (FlexPrefill's way). Then
plain vLLM again beside an engine that reads from the daemon's arena on the GPU. Prints a table and writes
`benchmarks/results/ttft-<gpu>.json` with every sample. Weights are random and maps synthetic, of a stated density
(`ttft_setup.py`).
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))  # PYTHONSAFEPATH, which this project runs with, leaves it out

from engines import CHUNK_TOKENS, Engine, add_options, header, receiver_settings, started
from processes import connected, daemon, orders, settled
from ttft_setup import SHAPES, make_model, make_plan, make_prompt, publish

from kernels import write_report
from mapflow.connector.client import Client
from mapflow.connector.messages import Producer
from mapflow.connector.plan import Mode, Plan

RESULTS = Path(__file__).parent / "results"
MODES = ("guide", "online", "translate")


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One line of the table for each context."""

    mode: str  # as in the results
    engine: str  # which of the engines answers
    tier: str = ""
    plan: str = ""  # of the engine's plans; empty for none
    r: int = 0
    density: float = 1.0
    k: int = 0


def first_layers(layers: int) -> list[int]:
    """Of a receiver with so many layers, the first that reuse anything: r = 3, and a third of them."""
    return sorted({min(3, layers - 1), layers // 3})


def variants(layers: int, tier: str, arguments: argparse.Namespace) -> list[Variant]:
    """What is measured with maps in that tier, plain vLLM first."""
    found = [Variant(mode="plain", engine="plain")]
    if tier == "pinned":
        found += [Variant(mode="exact", engine="pinned"), Variant(mode="miss", engine="pinned")]
    for r in first_layers(layers):
        guide = {"r": r, "density": arguments.guide_density}
        found.append(Variant(mode="guide", engine=tier, tier=tier, plan=f"guide-{r}", **guide))
        if tier == "pinned" and torch.cuda.is_available():
            found.append(Variant(mode="online", engine="online", plan=f"static-{r}", **guide))
        translate = {"r": r, "density": arguments.translate_density, "k": 1}
        found.append(Variant(mode="translate", engine=tier, tier=tier, plan=f"translate-{r}", **translate))
    return [one for one in found if one.mode not in MODES or one.mode in arguments.modes]


def engines(
    names: Collection[str],
    folder: Path,
    receiver: Path,
    plans: dict[str, Plan],
    endpoint: str,
    arguments: argparse.Namespace,
) -> AbstractContextManager[dict[str, Engine]]:
    """Those of the variants, started together: "plain", "online", and one that is named like the tier it reads."""

    def settings(name: str) -> dict[str, Any]:
        is_online = name == "online"
        own = [folder / f"{plan}.safetensors" for plan in plans if plan.startswith("static") == is_online]
        found = receiver_settings(receiver, endpoint, own, arguments, gpu_tier=name == "gpu")
        if name == "plain":
            return {**found, "transfer": None}
        if is_online:  # what it costs is shown where it does not pay, too
            found["transfer"]["kv_connector_extra_config"]["cost_model"] = False
            found["online_density"] = arguments.guide_density
        return found

    return started({name: settings(name) for name in names}, arguments.logs or folder)


def measure(
    running: dict[str, Engine],
    wanted: Sequence[Variant],
    context: int,
    prompts: dict[str, list[int]],
    repeats: int,
    endpoint: str,
) -> list[dict[str, Any]]:
    """Repeats of every variant, in an order that changes, at one context, between two rounds that do not count."""

    def ask(one: Variant, number: int, *, report: bool) -> dict[str, Any]:
        prompt, mapflow = prompts.get(one.plan, prompts["exact"]), None
        if one.mode == "exact":
            mapflow = {"reuse": False}
        elif one.mode == "miss":
            prompt, mapflow = make_prompt(context, 10_000 + number), {"report": report}
        elif one.plan:
            mapflow = {"plan": one.plan, "report": report}
        # a report of the last prefill step comes with the step after it
        return running[one.engine].ask(prompt, mapflow, max_tokens=2 if report else 1)

    for one in wanted:
        reports = [ask(one, 0, report=True)["report"]]
        if one.tier == "gpu":
            settled(endpoint)  # what was read has copies now
            reports.append(ask(one, 1, report=True)["report"])
        _check(one, context, reports)
    samples: dict[Variant, list[float]] = {one: [] for one in wanted}
    chance = random.Random(context)
    for repeat, order in enumerate(orders(wanted, repeats, chance)):
        for one in order:
            samples[one].append(ask(one, 100 + repeat, report=False)["ms"])
    full = statistics.median(samples[wanted[0]])
    return [_case(one, context, samples[one], full, ask(one, 1000, report=True)["report"]) for one in wanted]


def _check(variant: Variant, context: int, reports: Sequence[dict[str, Any] | None]) -> None:
    """That the rounds before the measured ones did what the variant's name says: the first reused, the last in place.

    A few layers may be given up whose maps come late, and later rounds altogether where they gain nothing.
    """
    report = reports[0]
    if variant.mode == "miss" and (report is None or report["reused_tokens"]):
        raise RuntimeError(f"a prompt that nobody read was not a miss: {report}")
    if not variant.plan:
        return
    if report is None or report["reused_tokens"] < context - 2 * CHUNK_TOKENS or set(report["reasons"]) - {"late"}:
        raise RuntimeError(f"{variant.plan} at {context} tokens reused less than it should: {report}")
    last = reports[-1]
    if variant.tier == "gpu" and last is not None and last["layers_in_place"] < sum(last["layers"].values()):
        raise RuntimeError(
            f"{variant.plan} at {context} tokens was not read in place: {last}; is --gpu-arena too small?"
        )


def _case(
    variant: Variant, context: int, samples: list[float], full: float, report: dict[str, Any] | None
) -> dict[str, Any]:
    ms = statistics.median(samples)
    reused = {} if not variant.plan or report is None else {name: report[name] for name in ("layers", "reasons")}
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
        **reused,
        "samples": [round(one, 2) for one in samples],
    }


def decode(running: dict[str, Engine], context: int, repeats: int) -> dict[str, float]:
    """Milliseconds of a decoded token, with and without the plugin."""
    found: dict[str, list[float]] = {"plain": [], "pinned": []}
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
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), help="of reuse")
    parser.add_argument("--contexts", nargs="+", type=int, default=[4096, 8192, 16384, 32768])
    parser.add_argument("--guide-density", type=float, default=0.1)
    parser.add_argument("--translate-density", type=float, default=0.05)
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--arena", default="48GiB", help="of the daemon; translate at 32k tokens needs 30 GB")
    parser.add_argument("--gpu-arena", default="40GiB", help="of the daemon on the GPU; empty for none")
    add_options(parser)
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
        tiers = ["pinned"]
        options = []
        if torch.cuda.is_available() and arguments.gpu_arena:
            tiers.append("gpu")
            options = ["--gpu-arena", f"0:{arguments.gpu_arena}"]
        endpoint = stack.enter_context(daemon(folder, arguments.arena, *options, logs=arguments.logs))
        some = next(iter(plans.values()))
        producer = Producer.of(some.sender.model_id, "bfloat16")
        client = stack.enter_context(connected(endpoint, some.namespace(), producer))
        prompts: dict[int, dict[str, list[int]]] = {}
        print(f"{'mode':10} {'tier':6} {'context':>7} {'r':>3} {'density':>7} {'ms':>9} {'change':>8}")
        for tier in tiers:
            wanted = variants(SHAPES[arguments.receiver].layers, tier, arguments)
            names = {one.engine for one in wanted}
            with engines(names, folder, receiver, plans, endpoint, arguments) as running:
                for context in arguments.contexts:
                    if context not in prompts:
                        prompts[context] = _publish_all(client, producer, plans, context, arguments)
                    cases = measure(running, wanted, context, prompts[context], arguments.repeats, endpoint)
                    report["cases"] += cases
                    _show(cases)
                    write_report(report, output)
                if tier == "pinned":
                    one = min(8192, max(arguments.contexts))
                    report["decode_ms_per_token"] = decode(running, one, arguments.repeats)
                    write_report(report, output)
        print(f"decode, ms a token: {report['decode_ms_per_token']}; written to {output}")


def _show(cases: Sequence[dict[str, Any]]) -> None:
    for case in cases:
        print(
            f"{case['mode']:10} {case['tier']:6} {case['context']:7} {case['r']:3} {case['density']:7.2f} "
            f"{case['ttft_ms']:9.2f} {case['change_percent']:+7.1f}%  {case.get('layers', '')} "
            f"{case.get('reasons', '')}",
            flush=True,
        )


def _plans(sender: Path, receiver: Path, arguments: argparse.Namespace) -> dict[str, Plan]:
    layers = SHAPES[arguments.receiver].layers
    block = 128 if torch.cuda.is_available() else 64
    found = {}
    for r in first_layers(layers):
        for wanted, mode in (("guide", Mode.GUIDE), ("translate", Mode.TRANSLATE), ("online", Mode.STATIC)):
            if wanted not in arguments.modes:
                continue
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
        if not of_mode:
            continue
        publish(client, of_mode[0].namespace(), producer, of_mode[0], prompt, density)
        prompts |= {plan.name: prompt for plan in of_mode}
    return prompts


if __name__ == "__main__":
    main()
