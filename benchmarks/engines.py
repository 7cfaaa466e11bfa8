"""What the benchmarks that run vLLM share: engines as processes that answer in turn."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from processes import Child

from kernels import git_commit, versions

CHUNK_TOKENS = 512


class Engine:
    """A process of `ttft_engine.py`."""

    def __init__(self, settings: dict[str, Any], log: Path) -> None:
        environment = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
        script = str(Path(__file__).with_name("ttft_engine.py"))
        self._process = Child([sys.executable, script, json.dumps(settings)], log, environment)

    def wait(self) -> None:
        """Until it serves."""
        self._process.answer()

    def ask(
        self, prompt: Sequence[int], mapflow: dict[str, Any] | None, max_tokens: int = 1, *, trace: bool = False
    ) -> dict[str, Any]:
        """One request: {"ms", "report"}, and "trace" if one is wanted."""
        return self._process.ask({"prompt": list(prompt), "mapflow": mapflow, "max_tokens": max_tokens, "trace": trace})

    def stop(self) -> None:
        """End it."""
        self._process.stop()


@contextmanager
def started(settings: Mapping[str, dict[str, Any]], logs: Path) -> Iterator[dict[str, Engine]]:
    """Engines by name, started together and ready; stopped at the end."""
    running = {name: Engine(one, logs / f"{name}.log") for name, one in settings.items()}
    try:
        for one in running.values():
            one.wait()
        yield running
    finally:
        for one in running.values():
            one.stop()


def engine_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of `vllm.LLM`: prompts in one step, so that TTFT is one prefill.

    Prefix caching is on, as it is by default, so that all engines pay for the hashes; engines empty the cache before
    every request.
    """
    longest = max(arguments.contexts) + 64
    options: dict[str, Any] = {
        "max_model_len": longest,
        "max_num_batched_tokens": longest,
        "max_num_seqs": 4,
        "enforce_eager": arguments.eager,
    }
    if torch.cuda.is_available():
        return options | {"gpu_memory_utilization": 0.25, "kv_cache_memory_bytes": 6 << 30, "dtype": "bfloat16"}
    return options | {
        "gpu_memory_utilization": 0.2,
        "kv_cache_memory_bytes": 1 << 30,
        "dtype": "float32",
        "block_size": 32,
    }


def receiver_settings(
    model: Path, endpoint: str, plans: Sequence[Path], arguments: argparse.Namespace, *, gpu_tier: bool = False
) -> dict[str, Any]:
    """Of an engine that reuses maps under these plans, from pinned memory or in place."""
    own = [str(plan) for plan in plans]
    extra = {"endpoint": endpoint, "plan": own, "lookup_deadline_s": 1.0, "gpu_tier": gpu_tier}
    transfer = {"kv_connector": "mapflow", "kv_role": "kv_consumer", "kv_connector_extra_config": extra}
    return {"model": str(model), "engine": engine_options(arguments), "online_density": None, "transfer": transfer}


def add_options(parser: argparse.ArgumentParser) -> None:
    """What these benchmarks have in common."""
    parser.add_argument("--eager", action="store_true", help="no torch.compile and no CUDA graphs")
    parser.add_argument("--commit", default=None, help="the commit that is measured, where git cannot be asked")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--logs", type=Path, help="an existing folder where the logs of daemon and engines stay")


def header(arguments: argparse.Namespace) -> dict[str, Any]:
    """What every results file begins with."""
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "date": time.strftime("%Y-%m-%d"),
        "commit": arguments.commit or git_commit(),
        "versions": versions(),
        "eager": arguments.eager,
    }
