"""Where a prefill's GPU time goes, with and without reuse: `python benchmarks/prefill_trace.py`, on a GPU with vLLM.

One prompt at a time through plain vLLM, through a receiver that opts out or finds maps in pinned memory (guide,
translate), and through a sender that publishes for nobody, masses, or tiles. The sender has a daemon of its own, where
nobody but this benchmark says what is wanted. Prints a table and writes
`benchmarks/results/trace-<gpu>.json`: milliseconds by kind of work and by kernel, of the trace with the median busy
time. Tracing slows the host down, so these say nothing about time to first token; `ttft.py` does.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))  # PYTHONSAFEPATH, which this project runs with, leaves it out

from engines import CHUNK_TOKENS, add_options, header, receiver_settings, started
from processes import connected, daemon, settled
from publishing import AGAIN
from publishing import settings as sender_settings
from ttft_setup import SHAPES, make_model, make_plan, make_prompt, publish

from kernels import write_report
from mapflow.connector.messages import Producer
from mapflow.connector.plan import Mode, Plan
from mapflow.connector.wants import interest_of

RESULTS = Path(__file__).parent / "results"


def median_trace(traces: list[dict[str, Any]]) -> dict[str, Any]:
    """The one with the median busy time."""
    return sorted(traces, key=lambda one: one["busy_ms"])[len(traces) // 2]


def main() -> None:
    """Parse, set up, trace, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", choices=SHAPES, default="qwen3-8b", help="of sender and receiver")
    parser.add_argument("--contexts", nargs="+", type=int, default=[4096, 8192, 16384])
    parser.add_argument("--guide-density", type=float, default=0.1)
    parser.add_argument("--translate-density", type=float, default=0.05)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--arena", default="32GiB", help="of each of the two daemons; tiles of 16k tokens take 10 GB a prompt"
    )
    add_options(parser)
    arguments = parser.parse_args()
    report: dict[str, Any] = {**header(arguments), "model": arguments.model, "cases": []}
    output = arguments.output or RESULTS / f"trace-{report['gpu'].replace(' ', '-').lower()}.json"
    block = 128 if torch.cuda.is_available() else 64
    with tempfile.TemporaryDirectory(prefix="mapflow-") as name, ExitStack() as stack:
        folder = Path(name)
        model = make_model(folder / arguments.model, arguments.model)
        plans: dict[str, Plan] = {}
        files: list[Path] = []
        for mode in (Mode.GUIDE, Mode.TRANSLATE):
            size: dict[str, Any] = {"first_layer": 3, "block": block, "chunk_tokens": CHUNK_TOKENS}
            plans[mode.value] = make_plan(model, model, name=mode.value, mode=mode, **size)
            files.append(folder / f"{mode.value}.safetensors")
            plans[mode.value].save(files[-1])
        densities = {"guide": arguments.guide_density, "translate": arguments.translate_density}
        ends = {}
        for role in ("receiver", "sender"):
            (folder / role).mkdir()
            ends[role] = stack.enter_context(daemon(folder / role, arguments.arena, logs=arguments.logs))
        engines = sender_settings(model, ends["sender"], block, arguments)
        del engines[AGAIN]
        engines["receiver"] = receiver_settings(model, ends["receiver"], files, arguments)
        running = stack.enter_context(started(engines, arguments.logs or folder))
        namespace = plans["guide"].namespace()
        producer = Producer.of(plans["guide"].sender.model_id, "bfloat16")
        publisher = stack.enter_context(connected(ends["receiver"], namespace, producer))
        wanting = stack.enter_context(connected(ends["sender"], namespace, producer))

        def trace(engine: str, prompt: list[int], mapflow: dict[str, Any] | None) -> dict[str, Any]:
            settled(ends.get(engine, ends["sender"]))
            return running[engine].ask(prompt, mapflow, trace=True)["trace"]

        for context in arguments.contexts:
            rounds = range(arguments.repeats + 1)
            found = {"plain": [trace("plain", make_prompt(context, n), None) for n in rounds]}
            found["opts out"] = [trace("receiver", make_prompt(context, n), {"reuse": False}) for n in rounds]
            for number, (mode, plan) in enumerate(plans.items()):
                prompt = make_prompt(context, 100 + number)
                publish(publisher, namespace, producer, plan, prompt, densities[mode])
                found[mode] = [trace("receiver", prompt, {"plan": mode}) for _ in rounds]
            for number, (mode, wanted) in enumerate({"nobody": None, **plans}.items()):
                wanting.set_interests([interest_of(wanted, namespace)] if wanted is not None else [])
                prompts = [make_prompt(context, 1000 * (number + 1) + n) for n in rounds]
                found[f"publish: {mode}"] = [trace("sender", prompt, None) for prompt in prompts]
            for mode, traces in found.items():
                case = {"context": context, "mode": mode, **median_trace(traces[1:])}
                report["cases"].append(case)
                print(f"{context:7} {mode:20} busy {case['busy_ms']:8.1f} of {case['span_ms']:8.1f} {case['kinds']}")
            write_report(report, output)
        print(f"written to {output}")


if __name__ == "__main__":
    main()
