"""Starts and stops the demo's three processes; each writes a log of its own."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import httpx

_STOP_S = 20.0


class ProcessError(RuntimeError):
    """A process did not start or died; one line that names its log."""


@dataclass(slots=True, kw_only=True)
class Service:
    """A process and where it answers; `url` is empty for the daemon."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    handle: IO[bytes]
    url: str = ""
    endpoint: str = ""

    def check(self) -> None:
        """Raise ProcessError when the process has ended."""
        if (code := self.process.poll()) is not None:
            raise ProcessError(f"the {self.name} ended with status {code}: {self.last_error()}; see {self.log}")

    def last_error(self) -> str:
        """The last line of its log that names an error, or the last line at all."""
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()] or ["no output"]
        return next((line for line in reversed(lines) if "Error" in line), lines[-1]).strip()[-300:]

    def is_ready(self) -> bool:
        """Whether it answers."""
        if not self.url:
            return Path(self.endpoint.removeprefix("unix://")).exists()
        try:
            return httpx.get(f"{self.url}/health", timeout=2.0).status_code == httpx.codes.OK
        except httpx.TransportError:
            return False

    def stop(self) -> None:
        """Ask it to end, then make it."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.handle.close()


@dataclass(slots=True, kw_only=True)
class Services:
    """Everything that was started, to be stopped in reverse order."""

    logs: Path
    running: list[Service] = field(default_factory=list)

    def start(self, name: str, command: Sequence[str], *, url: str = "", endpoint: str = "") -> Service:
        """Start one process; it is not ready yet when this returns."""
        log = self.logs / f"{name}.log"
        handle = log.open("wb")
        environment = {
            **os.environ,
            "PYTHONSAFEPATH": "1",
            "VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1"),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        process = subprocess.Popen(
            list(command), stdout=handle, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        service = Service(name=name, process=process, log=log, handle=handle, url=url, endpoint=endpoint)
        self.running.append(service)
        return service

    def ended(self) -> list[str]:
        """Names of those that have ended by themselves."""
        return [service.name for service in self.running if service.process.poll() is not None]

    def stop(self) -> None:
        """Stop all, last started first."""
        while self.running:
            self.running.pop().stop()


def daemon_command(endpoint: str, arena: str) -> list[str]:
    """The daemon, as `mapflow serve` runs it."""
    return [sys.executable, "-P", "-m", "mapflow.cli.main", "serve", "--endpoint", endpoint, "--arena", arena]


def server_command(
    model: Path, port: int, role: str, extra: dict[str, object], options: Sequence[str] = ()
) -> list[str]:
    """A vLLM OpenAI server on loopback with the mapflow connector."""
    transfer = {"kv_connector": "mapflow", "kv_role": role, "kv_connector_extra_config": extra}
    return [
        *(sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(model), "--served-model-name", model.name, "--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", "float32", "--enforce-eager", "--max-num-seqs", "8", "--max-num-batched-tokens", "2048"),
        *("--block-size", "32", "--max-logprobs", "-1", "--enable-prompt-tokens-details"),
        *("--kv-transfer-config", json.dumps(transfer), *options),
    ]


def free_port() -> int:
    """A TCP port of loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def wait_ready(services: Sequence[Service], deadline_s: float) -> list[str]:
    """One poll: names of the services that are not ready yet.

    Raises:
        ProcessError: one of them died, or `deadline_s` (of `time.monotonic`) has passed.
    """
    waiting = []
    for service in services:
        service.check()
        if not service.is_ready():
            waiting.append(service.name)
    if waiting and time.monotonic() > deadline_s:
        raise ProcessError(f"{', '.join(waiting)} did not get ready in time; see the logs beside {services[0].log}")
    return waiting
