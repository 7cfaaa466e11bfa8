"""What the benchmarks that run vLLM share: engines as processes that answer in turn, a daemon, and its client."""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch

from kernels import git_commit, versions
from mapflow.cli.demo.processes import Services, daemon_command, wait_ready
from mapflow.cli.status import fetch_stats
from mapflow.connector.client import Client
from mapflow.connector.client_config import ClientConfig
from mapflow.connector.messages import Producer
from mapflow.connector.namespace import Namespace
from mapflow.v1.cache_pb2 import StatsResponse

CHUNK_TOKENS = 512
_T = TypeVar("_T")


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

    def ask(
        self, prompt: Sequence[int], mapflow: dict[str, Any] | None, max_tokens: int = 1, *, trace: bool = False
    ) -> dict[str, Any]:
        """One request: {"ms", "report"}, and "trace" if one is wanted."""
        assert self._process.stdin is not None
        request = {"prompt": list(prompt), "mapflow": mapflow, "max_tokens": max_tokens, "trace": trace}
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


@contextmanager
def daemon(folder: Path, arguments: argparse.Namespace, *options: str) -> Iterator[str]:
    """One daemon; its endpoint."""
    endpoint = f"unix://{folder / 'mapflow.sock'}"
    services = Services(logs=arguments.logs or folder)
    try:
        command = [*daemon_command(endpoint, arguments.arena), *options]
        one = services.start("daemon", command, endpoint=endpoint)
        while wait_ready([one], time.monotonic() + 120.0):
            time.sleep(0.1)
        yield endpoint
    finally:
        services.stop()


def settled(endpoint: str, still_s: float = 0.5) -> StatsResponse:
    """Wait until nothing is published or copied to a GPU any more; what the daemon then says of itself."""
    before, since = (), time.monotonic()
    while True:
        stats = fetch_stats(endpoint)
        now = (stats.num_entries, *(one.promoted_entries for one in stats.device_arenas))
        if now != before:
            before, since = now, time.monotonic()
        elif time.monotonic() - since > still_s:
            return stats
        time.sleep(0.05)


def orders(items: Sequence[_T], repeats: int, chance: random.Random) -> Iterator[list[_T]]:
    """One for each repeat, the second of two the first one backwards: what a GPU did before tells in its clocks."""
    order: list[_T] = []
    for repeat in range(repeats):
        order = order[::-1] if repeat % 2 else chance.sample(items, len(items))
        yield order


@contextmanager
def connected(endpoint: str, namespace: Namespace, producer: Producer | None) -> Iterator[Client]:
    """A client with a session."""
    config = ClientConfig(
        endpoint=endpoint,
        client_name="benchmark",
        namespace=namespace,
        producer=producer,
        transfer_deadline_s=60.0,
    )
    client = Client(config)
    client.start()
    try:
        if not client.wait_connected(30.0):
            raise RuntimeError(f"no session with the daemon at {endpoint} within 30 s")
        yield client
    finally:
        client.close()


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
