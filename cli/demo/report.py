"""What the demo measured: rows, their sums, the table for a person and the file for a program."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

EXACT = "exact"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRow:
    """One request.

    Attributes:
        conversation, turn: what was played; the sender takes the even turns.
        model: server that answered.
        mode: "publish" on the sender; on the receiver "exact" without reuse, or the plan's name.
        prompt_tokens: length of the prompt.
        shared_tokens: leading prompt tokens that the sender had prefilled before.
        cached_tokens: of the prompt, in the server's own KV cache.
        reused_tokens: prompt tokens whose maps were reused.
        layers: mode -> receiver layers that ran in it.
        density: blocks attended of those that full attention attends, in reused rows.
        ttft_s: time to first token by vLLM's metric, in seconds.
    """

    conversation: str
    turn: int
    model: str
    mode: str
    prompt_tokens: int
    shared_tokens: int
    cached_tokens: int
    reused_tokens: int
    layers: dict[str, int]
    density: float | None
    ttft_s: float

    @property
    def reusable_tokens(self) -> int:
        """Shared tokens that the receiver had to prefill."""
        return max(self.shared_tokens - self.cached_tokens, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityRow:
    """The receiver's next-token distribution at one position, under a plan, against its own without reuse."""

    conversation: str
    turn: int
    mode: str
    kl: float
    top1_equal: bool


def summarise(
    rows: Sequence[RequestRow], quality: Sequence[QualityRow], daemon: dict[str, float] | None
) -> dict[str, Any]:
    """Sums over a demo: per mode, and the daemon's hit rate; None where it could not be asked."""
    modes = sorted({row.mode for row in quality})
    exact_ttft = {(row.conversation, row.turn): row.ttft_s for row in rows if row.mode == EXACT}
    summary: dict[str, Any] = {"daemon": daemon, "modes": {}}
    for mode in modes:
        mine = [row for row in rows if row.mode == mode]
        measured = [row for row in quality if row.mode == mode]
        reusable = sum(row.reusable_tokens for row in mine)
        summary["modes"][mode] = {
            "requests": len(mine),
            "reused_tokens": sum(row.reused_tokens for row in mine),
            "reusable_tokens": reusable,
            "reused_fraction": sum(row.reused_tokens for row in mine) / reusable if reusable else 0.0,
            "density": _mean(row.density for row in mine if row.density is not None),
            "kl": _mean(row.kl for row in measured),
            "max_kl": max((row.kl for row in measured), default=None),
            "top1_agreement": _mean(float(row.top1_equal) for row in measured),
            "positions": len(measured),
            "ttft_s": _mean(row.ttft_s for row in mine),
            "ttft_exact_s": _mean(exact_ttft[row.conversation, row.turn] for row in mine),
        }
    return summary


def _mean(values: Iterable[float]) -> float | None:
    collected = list(values)
    return fmean(collected) if collected else None


def write_report(
    path: Path, rows: Sequence[RequestRow], quality: Sequence[QualityRow], summary: dict[str, Any]
) -> None:
    """Write everything as JSON; the file appears whole or not at all."""
    document = {
        "summary": summary,
        "requests": [asdict(row) for row in rows],
        "quality": [asdict(row) for row in quality],
    }
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(document, indent=2) + "\n")
    partial.replace(path)


def print_report(console: Console, rows: Sequence[RequestRow], summary: dict[str, Any]) -> None:
    """Two tables: every request, and the summary."""
    table = Table(title="requests")
    for name in ("conversation", "turn", "model", "mode", "prompt", "shared", "cached", "reused"):
        table.add_column(name, justify="left" if name in ("conversation", "model", "mode") else "right")
    for name in ("layers", "density", "TTFT ms"):
        table.add_column(name, justify="right")
    for row in rows:
        layers = ", ".join(f"{count} {mode}" for mode, count in sorted(row.layers.items())) or "–"
        density = "–" if row.density is None else f"{row.density:.2f}"
        numbers = (row.prompt_tokens, row.shared_tokens, row.cached_tokens, row.reused_tokens)
        cells = (
            row.conversation.split("/", 1)[-1].removeprefix("multi_turn_"),
            str(row.turn),
            row.model,
            row.mode,
            *map(str, numbers),
            layers,
            density,
        )
        table.add_row(*cells, f"{1000 * row.ttft_s:.0f}")
    console.print(table)
    daemon = summary["daemon"]
    hits = "the daemon is gone"
    if daemon is not None:
        hits = f"{daemon['hit_chunks']:.0f} of {daemon['lookup_chunks']:.0f} chunks hit ({daemon['hit_rate']:.1%})"
    table = Table(title=f"summary: {hits}")
    for name in ("mode", "reused of reusable", "density", "KL (nats)", "top-1 agreement", "TTFT ms", "exact TTFT ms"):
        table.add_column(name, justify="left" if name == "mode" else "right")
    for mode, values in summary["modes"].items():
        reused = f"{values['reused_tokens']} of {values['reusable_tokens']} ({values['reused_fraction']:.1%})"
        density = "–" if values["density"] is None else f"{values['density']:.2f}"
        times = (f"{1000 * values[name]:.0f}" for name in ("ttft_s", "ttft_exact_s"))
        table.add_row(mode, reused, density, f"{values['kl']:.4f}", f"{values['top1_agreement']:.1%}", *times)
    console.print(table)
    console.print("Times on a CPU show that the path works, not that it is fast: kernels there are plain torch.")
