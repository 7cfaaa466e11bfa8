"""The demo's course: start, play, measure, report, stop.

Recorded assistant messages are put into the conversation whatever the tiny models say, so that every run plays the same
prompts. Even turns go to the sender, odd ones to the receiver, which answers each once without reuse and once per plan.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from mapflow.cli.demo.openai import Server
from mapflow.cli.demo.processes import (
    Service,
    Services,
    daemon_command,
    free_port,
    server_command,
    wait_ready,
)
from mapflow.cli.demo.quality import kl_divergence, top_token
from mapflow.cli.demo.report import EXACT, QualityRow, RequestRow, print_report, summarise, write_report
from mapflow.cli.status import StatusError, fetch_stats

_START_S = 300.0
_POSITIONS = 4  # of each reply, at which distributions are compared
_STRIDE = 8  # tokens between them
_PUBLISHED_S = 5.0
_LOOKUP_S = 1.0  # five processes share what may be two cores: the daemon can wait long for its turn


class DemoError(RuntimeError):
    """The demo cannot run, or showed no reuse; one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One assistant message: the messages before it, and what was recorded."""

    conversation: str
    number: int
    messages: list[dict[str, Any]]
    reply: str


def read_turns(path: Path, max_conversations: int, max_turns: int) -> list[Turn]:
    """The turns to play, conversation by conversation.

    Raises:
        DemoError: the file is missing or holds no conversation.
    """
    if not path.is_file():
        raise DemoError(f"{path} does not exist; run the demo from the repository, or name a file with --conversations")
    turns: list[Turn] = []
    for line in path.read_text().splitlines()[:max_conversations]:
        record = json.loads(line)
        messages = [{"role": m["role"], "content": m.get("content") or ""} for m in record["messages"]]
        replies = [place for place, message in enumerate(messages) if message["role"] == "assistant"][:max_turns]
        for number, place in enumerate(replies):
            before, reply = messages[:place], messages[place]["content"]
            turns.append(Turn(conversation=record["id"], number=number, messages=before, reply=reply))
    if not turns:
        raise DemoError(f"{path} holds no conversation with an assistant message")
    return turns


class Play:
    """Plays turns and keeps what was measured."""

    def __init__(self, sender: Server, receiver: Server, plans: Sequence[str], endpoint: str) -> None:
        self.rows: list[RequestRow] = []
        self.quality: list[QualityRow] = []
        self._sender = sender
        self._receiver = receiver
        self._plans = plans
        self._endpoint = endpoint
        self._sent: list[int] = []

    def turn(self, turn: Turn) -> None:
        """Play one turn on the model whose turn it is."""
        if turn.number == 0:
            self._sent = []
        if turn.number % 2 == 0:
            prompt = self._sender.tokenize(turn.messages)
            self._request(self._sender, turn, prompt, "publish", {"report": True})
            self._sent = prompt
            self._wait_published()
            return
        prompt = self._receiver.tokenize(turn.messages)
        reply = self._receiver.tokenize_text(turn.reply)
        points = [prompt + reply[:cut] for cut in range(0, _POSITIONS * _STRIDE, _STRIDE) if cut <= len(reply)]
        self._request(self._receiver, turn, prompt, EXACT, {"reuse": False, "report": True})
        exact = [self._distribution(point, {"reuse": False}) for point in points]
        for plan in self._plans:
            self._request(self._receiver, turn, prompt, plan, {"plan": plan, "report": True})
            for point, expected in zip(points, exact):
                found = self._distribution(point, {"plan": plan})
                self.quality.append(
                    QualityRow(
                        conversation=turn.conversation,
                        turn=turn.number,
                        mode=plan,
                        kl=kl_divergence(expected, found),
                        top1_equal=top_token(expected) == top_token(found),
                    )
                )

    def _distribution(self, prompt: Sequence[int], mapflow: dict[str, Any]) -> dict[int, float]:
        return self._receiver.complete(prompt, max_tokens=1, mapflow=mapflow, logprobs=True).logprobs

    def _request(self, server: Server, turn: Turn, prompt: list[int], mode: str, mapflow: dict[str, Any]) -> None:
        before = server.ttft_sum()
        answer = server.complete(prompt, max_tokens=4, mapflow=mapflow)
        shared = next(
            (place for place, pair in enumerate(zip(prompt, self._sent)) if pair[0] != pair[1]),
            min(len(prompt), len(self._sent)),
        )
        self.rows.append(
            RequestRow(
                conversation=turn.conversation,
                turn=turn.number,
                model=server.model,
                mode=mode,
                prompt_tokens=answer.prompt_tokens,
                shared_tokens=shared,
                cached_tokens=answer.cached_tokens,
                reused_tokens=answer.report.get("reused_tokens", 0),
                layers=answer.report.get("layers", {}),
                density=answer.report.get("density"),
                ttft_s=server.ttft_sum() - before,
            )
        )

    def _wait_published(self) -> None:
        """Wait until the daemon's number of entries stands still; the sender publishes behind its answer."""
        deadline, last = time.monotonic() + _PUBLISHED_S, -1
        while time.monotonic() < deadline:
            try:
                stats = fetch_stats(self._endpoint)
            except StatusError:
                return
            if stats.num_entries == last and stats.num_reservations == 0:
                return
            last = stats.num_entries
            time.sleep(0.1)


def run_demo(pair: Path, conversations: Path, out: Path, logs: Path, *, max_conversations: int, max_turns: int) -> None:
    """Run the whole demo.

    Raises:
        DemoError: something is missing, a server failed, or nothing was reused.
    """
    plans = sorted((pair / "plans").glob("*.safetensors"))
    for needed in (pair / "sender", pair / "receiver"):
        if not needed.is_dir():
            raise DemoError(f"{needed} does not exist; run the demo from the repository, or name a pair with --pair")
    if not plans:
        raise DemoError(f"{pair / 'plans'} holds no plan; make one with `mapflow calibrate`")
    turns = read_turns(conversations, max_conversations, max_turns)
    logs.mkdir(parents=True, exist_ok=True)
    console = Console()
    console.width = max(console.width, 120)
    services = Services(logs=logs.resolve())
    endpoint = f"unix://{services.logs / 'mapflow.sock'}"
    try:
        sender, receiver = _start(services, pair.resolve(), [plan.resolve() for plan in plans], endpoint, console)
        play = Play(sender, receiver, [plan.stem for plan in plans], endpoint)
        with closing(sender), closing(receiver):
            _play(play, turns, console)
        daemon = _hit_rate(endpoint)
        ended = services.ended()
    except (RuntimeError, httpx.HTTPError) as error:
        raise DemoError(f"{error}; logs are in {services.logs}") from error
    finally:
        services.stop()
    summary = summarise(play.rows, play.quality, daemon)
    write_report(out, play.rows, play.quality, summary)
    print_report(console, play.rows, summary)
    console.print(f"wrote {out}")
    if ended:
        raise DemoError(f"{', '.join(ended)} did not live to the end; logs are in {services.logs}")
    idle = [mode for mode, values in summary["modes"].items() if not values["reused_tokens"]]
    if idle or not summary["modes"]:
        raise DemoError(f"nothing was reused in mode {', '.join(idle) or 'any'}; logs are in {services.logs}")


def _hit_rate(endpoint: str) -> dict[str, float] | None:
    """The daemon's counts of chunks looked up and hit; None when it does not answer."""
    try:
        stats = fetch_stats(endpoint)
    except StatusError:
        return None
    rate = stats.hit_chunks / max(stats.lookup_chunks, 1)
    return {"lookup_chunks": stats.lookup_chunks, "hit_chunks": stats.hit_chunks, "hit_rate": rate}


def _start(
    services: Services, pair: Path, plans: Sequence[Path], endpoint: str, console: Console
) -> tuple[Server, Server]:
    """Start daemon and servers, with a display of what is still missing."""
    daemon = services.start("daemon", daemon_command(endpoint, "256MiB"), endpoint=endpoint)
    started: list[Service] = [daemon]
    servers = []
    for name, role in (("sender", "kv_producer"), ("receiver", "kv_consumer")):
        port = free_port()
        extra: dict[str, object] = {
            "endpoint": endpoint,
            "plan": [str(plan) for plan in plans],
            "lookup_deadline_s": _LOOKUP_S,
        }
        command = server_command(pair / name, port, role, extra)
        started.append(services.start(name, command, url=f"http://127.0.0.1:{port}"))
        servers.append(Server(f"http://127.0.0.1:{port}", name))
    deadline = time.monotonic() + _START_S
    with Progress(SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=console) as bar:
        task = bar.add_task("starting", total=None)
        while waiting := wait_ready(started, deadline):
            bar.update(task, description=f"starting: waiting for {', '.join(waiting)}")
            time.sleep(0.5)
        bar.update(task, description="daemon, sender and receiver are ready")
    return servers[0], servers[1]


def _play(play: Play, turns: Sequence[Turn], console: Console) -> None:
    with Progress(SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=console) as bar:
        task = bar.add_task("playing", total=len(turns))
        for number, turn in enumerate(turns, start=1):
            bar.update(task, description=f"playing turn {number} of {len(turns)}: {turn.conversation}")
            play.turn(turn)
            bar.advance(task)
        bar.update(task, description=f"played {len(turns)} turns")
