"""What publishing costs a sender: `python benchmarks/publishing.py`, one command, real vLLM engines and a real daemon.

A sender and two engines of plain vLLM answer in turn, in an order that changes, prompts that nobody has read, each when
all is still: what a GPU did just before tells in its clocks. The second plain engine shows how far two engines of one
kind differ. The sender publishes for nobody, for a receiver that is guided, or for one that translates; a receiver here
is its registered interest. Prints a table and writes `benchmarks/results/publishing-<gpu>.json` with every sample.
Weights are random and attention almost even, so the share of blocks that tiles are kept of is close to the top-p that
the interest names.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))  # PYTHONSAFEPATH, which this project runs with, leaves it out

from engines import CHUNK_TOKENS, Engine, add_options, engine_options, header, started
from processes import connected, daemon, settled
from ttft_setup import SHAPES, make_model, make_plan, make_prompt

from kernels import write_report
from mapflow.connector.client import Client
from mapflow.connector.messages import Want
from mapflow.connector.plan import Mode, Plan
from mapflow.connector.wants import interest_of

RESULTS = Path(__file__).parent / "results"


PLAIN, AGAIN = "plain", "plain again"


def settings(model: Path, endpoint: str, block: int, arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Of the engines."""
    extra = {"endpoint": endpoint, "block": block, "chunk_tokens": CHUNK_TOKENS, "publish_queue": 4096}
    transfer = {"kv_connector": "mapflow", "kv_role": "kv_producer", "kv_connector_extra_config": extra}
    common = {"model": str(model), "engine": engine_options(arguments), "online_density": None}
    plain = {**common, "transfer": None}
    return {PLAIN: plain, AGAIN: plain, "sender": {**common, "transfer": transfer}}


@dataclass
class Samples:
    """Of one mode at one context: prefills, and what became of each prompt's maps."""

    ms: list[float] = field(default_factory=list)
    published: list[float] = field(default_factory=list)
    reusable: list[float] = field(default_factory=list)
    num_bytes: list[int] = field(default_factory=list)


def measure(
    running: dict[str, Engine],
    client: Client,
    plans: dict[str, Plan | None],
    context: int,
    seeds: random.Random,
    arguments: argparse.Namespace,
) -> list[dict[str, Any]]:
    """Plain vLLM, twice, and the sender in each mode, in turn; one round does not count."""
    samples = {mode: Samples() for mode in (PLAIN, AGAIN, *plans)}
    for repeat in range(arguments.repeats + 1):
        for mode in seeds.sample(sorted(samples), len(samples)):
            plan, prompt = plans.get(mode), make_prompt(context, seeds.randrange(1 << 30))
            client.set_interests([interest_of(plan, plan.namespace())] if plan is not None else [])
            settled(client.config.endpoint)
            ms = running[mode if mode in running else "sender"].ask(prompt, None)["ms"]
            settled(client.config.endpoint)
            if repeat:
                samples[mode].ms.append(ms)
                if plan is not None:
                    found(client, plan, prompt, samples[mode])
    cases = [_case(context, mode, samples) for mode in samples if mode != PLAIN]
    for case in cases:
        print(
            f"{case['mode']:11} {context:7} {case['prefill_ms']:9.2f} {case['change_percent']:+7.1f}% "
            f"{100 * case['published_share']:6.1f}% {100 * case['reusable_share']:6.1f}% "
            f"{case['published_mb']:9.1f} MB",
            flush=True,
        )
    return cases


def _case(context: int, mode: str, samples: dict[str, Samples]) -> dict[str, Any]:
    own, plain = samples[mode], samples[PLAIN].ms
    ms, full = statistics.median(own.ms), statistics.median(plain)
    return {
        "context": context,
        "mode": mode,
        "prefill_ms": round(ms, 2),
        "full_ms": round(full, 2),
        "change_percent": round(100 * (ms / full - 1), 2),
        "published_share": round(statistics.mean(own.published or [0.0]), 3),
        "reusable_share": round(statistics.mean(own.reusable or [0.0]), 3),
        "published_mb": round(statistics.mean(own.num_bytes or [0.0]) / 1e6, 1),
        "reusable_samples": own.reusable,
        "samples": [round(one, 2) for one in own.ms],
        "full_samples": [round(one, 2) for one in plain],
    }


def found(client: Client, plan: Plan, prompt: list[int], into: Samples) -> None:
    """Of a prompt's chunks: the share that lies there without a gap, layer by layer and in all layers; their bytes."""
    keys, model = plan.namespace().chunk_keys(prompt), plan.sender.model_id
    wants = [Want(model=model, layers=(layer,)) for layer in plan.map_layers]
    num_chunks = num_bytes = 0
    for want in wants:
        result = client.lookup(keys, [want], 1.0).result()
        for hit in result.hits:
            num_chunks += hit.num_chunks
            num_bytes += sum(extent.num_bytes for extents in hit.extents for extent in extents)
        client.release([result.lease] if result.lease is not None else [])
    together = client.lookup(keys, [Want(model=model, layers=plan.map_layers)], 0.0).result().hits
    into.published.append(num_chunks / (len(keys) * len(wants)))
    into.reusable.append(max((hit.num_chunks for hit in together), default=0) / len(keys))
    into.num_bytes.append(num_bytes)


def main() -> None:
    """Parse, set up, measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--sender", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--contexts", nargs="+", type=int, default=[4096, 8192, 16384])
    parser.add_argument("--top-p", type=float, default=0.05, help="of the tiles that are kept")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--arena", default="56GiB", help="of the daemon; tiles of 16k tokens take 8 GB a prompt")
    add_options(parser)
    arguments = parser.parse_args()
    report = {**header(arguments), "sender": arguments.sender, "top_p": arguments.top_p, "cases": []}
    output = arguments.output or RESULTS / f"publishing-{report['gpu'].replace(' ', '-').lower()}.json"
    block = 128 if torch.cuda.is_available() else 64
    with tempfile.TemporaryDirectory(prefix="mapflow-") as name, ExitStack() as stack:
        folder = Path(name)
        model = make_model(folder / "sender", arguments.sender)
        plans: dict[str, Plan | None] = {"nobody": None}
        for mode in (Mode.GUIDE, Mode.TRANSLATE):
            size: dict[str, Any] = {"first_layer": 3, "block": block, "chunk_tokens": CHUNK_TOKENS}
            plans[mode.value] = make_plan(model, model, name=mode.value, mode=mode, top_p=arguments.top_p, **size)
        endpoint = stack.enter_context(daemon(folder, arguments.arena, logs=arguments.logs))
        running = stack.enter_context(started(settings(model, endpoint, block, arguments), arguments.logs or folder))
        some = next(plan for plan in plans.values() if plan is not None)
        client = stack.enter_context(connected(endpoint, some.namespace(), None))
        print(f"{'for':11} {'context':>7} {'ms':>9} {'change':>8} published reusable")
        seeds = random.Random(1)
        for context in arguments.contexts:
            report["cases"] += measure(running, client, plans, context, seeds, arguments)
            write_report(report, output)
        print(f"written to {output}")


if __name__ == "__main__":
    main()
