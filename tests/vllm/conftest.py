"""Real vLLM servers on the tiny pair, and a real daemon. Started once, together, for all tests of a module."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("torch")

from mapflow.cli.demo.openai import Server
from mapflow.cli.demo.processes import Service, Services, daemon_command, free_port, server_command, wait_ready
from mapflow.cli.status import StatusError, fetch_stats
from mapflow.connector.plan import LayerPlan, Mode, Plan, load_plan, with_top_p

EXAMPLES = Path(__file__).parents[2] / "examples"
PAIR = EXAMPLES / "pair"
START_S = 600.0
CHUNKED = ("--max-num-batched-tokens", "512")
# KV blocks of 32 tokens, not enough for three long requests at once
CRAMPED = ("--max-model-len", "4096", "--num-gpu-blocks-override", "212")


@dataclass(kw_only=True)
class Cluster:
    """Everything that runs.

    Attributes:
        plain: the receiver model without any connector.
        cramped: a receiver whose KV cache is too small for what the tests ask of it.
    """

    services: Services
    endpoint: str
    daemon: Service
    plain: Server
    sender: Server
    receiver: Server
    second: Server
    cramped: Server

    def restart_daemon(self) -> None:
        """Start the daemon again on the same socket."""
        self.daemon = self.services.start(
            "daemon-again", daemon_command(self.endpoint, "256MiB"), endpoint=self.endpoint
        )

    def publish(self, prompt: Sequence[int]) -> None:
        """Let the sender read a prompt, and wait until its maps are there."""
        self.sender.complete(prompt, max_tokens=1)
        self.until(lambda: self.entries_stand_still(), "the sender's maps")

    def entries_stand_still(self) -> bool:
        """Whether nothing was published for a moment."""
        before = fetch_stats(self.endpoint)
        time.sleep(0.4)
        after = fetch_stats(self.endpoint)
        return after.num_entries == before.num_entries > 0 and after.num_reservations == 0

    @staticmethod
    def until(condition: Callable[[], bool], what: str, timeout_s: float = 30.0) -> None:
        """Wait for a condition."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            try:
                if condition():
                    return
            except StatusError:
                pass
            time.sleep(0.1)
        raise AssertionError(f"waited {timeout_s} s in vain for {what}")

    def log(self, name: str) -> str:
        """What a service has logged."""
        return (self.services.logs / f"{name}.log").read_text(errors="replace")


def save_as(plan: Plan, folder: Path, name: str) -> str:
    """Save a plan under a name; returns its path."""
    path = folder / f"{name}.safetensors"
    plan.save(path)
    return str(path)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A daemon, a sender, three receivers and a plain server."""
    with tempfile.TemporaryDirectory(prefix="mapflow-") as name:
        folder = Path(name)
        services = Services(logs=folder)
        guide, translate = (load_plan(PAIR / "plans" / f"{mode}.safetensors") for mode in ("guide", "translate"))
        compute = Plan(
            name="compute",
            tokenizer_fingerprint=guide.tokenizer_fingerprint,
            chunk_tokens=guide.chunk_tokens,
            block=guide.block,
            sender=guide.sender,
            receiver=guide.receiver,
            layers=tuple(LayerPlan(mode=Mode.COMPUTE) for _ in guide.layers),
        )
        whole = save_as(with_top_p(guide, 1.0), folder, "whole")
        lossy = save_as(translate, folder, "lossy")
        sparse = save_as(guide, folder, "sparse")
        plans = [whole, lossy, sparse, save_as(compute, folder, "compute")]
        endpoint = f"unix://{folder / 'mapflow.sock'}"
        settings = {
            "plain": ("receiver", None, [], CHUNKED),
            "sender": ("sender", "kv_producer", [whole, lossy], CHUNKED),
            "receiver": ("receiver", "kv_consumer", plans, CHUNKED),
            "second": ("receiver", "kv_consumer", [sparse, lossy], ()),
            "cramped": ("receiver", "kv_consumer", [whole], (*CHUNKED, *CRAMPED)),
        }
        servers: dict[str, Server] = {}
        try:
            started = [services.start("daemon", daemon_command(endpoint, "256MiB"), endpoint=endpoint)]
            for server, (model, role, used, options) in settings.items():
                port = free_port()
                # a look-up may wait for a core of this small machine: the deadline is not what is tested here
                extra: dict[str, object] = {"endpoint": endpoint, "plan": used, "lookup_deadline_s": 2.0}
                extra["skip_queries"] = server != "second"
                command = server_command(PAIR / model, port, role or "kv_both", extra, options)
                if role is None:
                    place = command.index("--kv-transfer-config")
                    del command[place : place + 2]
                started.append(services.start(server, command, url=f"http://127.0.0.1:{port}"))
                servers[server] = Server(f"http://127.0.0.1:{port}", model)
            deadline = time.monotonic() + START_S
            while wait_ready(started, deadline):
                time.sleep(0.5)
            yield Cluster(services=services, endpoint=endpoint, daemon=started[0], **servers)
        finally:
            for opened in servers.values():
                opened.close()
            services.stop()


@pytest.fixture(scope="module")
def texts(cluster: Cluster) -> list[list[int]]:
    """Token ids of long texts."""
    lines = (EXAMPLES / "calibration.jsonl").read_text().splitlines()
    tokens = [cluster.plain.tokenize_text(json.loads(line)["text"]) for line in lines]
    return [ids for ids in tokens if len(ids) >= 3600]
