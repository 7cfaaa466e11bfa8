"""Tables of what the daemon does under load, for `tables.py`: `service.json` and `hit-rate.json`."""

from __future__ import annotations

from typing import Any

Case = dict[str, Any]
Table = tuple[list[str], list[list[str]]]
_SYSTEMS = {
    "bare stream": "bare gRPC, a message of a stream",
    "bare unary": "bare gRPC, a call",
    "mapflow": "MapFlow",
    "lmcache": "LMCache",
}


def latencies(report: dict[str, Any]) -> Table:
    """Closed loops, one call at a time."""
    rows = []
    for case in (one for one in report["cases"] if one["loop"] == "closed"):
        times = [f"{case[name]:.2f}" for name in ("p50_ms", "p99_ms")]
        ratio = "" if case["ratio_to_bare"] is None else f"{case['ratio_to_bare']:.2f}"
        rows.append([case["operation"], _SYSTEMS[case["system"]], *times, ratio])
    order = list(dict.fromkeys(row[0] for row in rows))
    rows.sort(key=lambda row: order.index(row[0]))
    return ["operation", "", "p50, ms", "p99, ms", "p50 to the bare stream"], rows


def load(report: dict[str, Any]) -> Table:
    """Look-ups of 64 chunks: the most that a system answers, and open loops."""
    rows = []
    for case in (one for one in report["cases"] if one["loop"] != "closed"):
        name = "as many as it can" if case["rate"] is None else f"{case['rate']:,.0f} a second"
        times = [f"{case[name]:.1f}" for name in ("p50_ms", "p99_ms")]
        rows.append([name, _SYSTEMS[case["system"]], f"{case['throughput']:,.0f}", *times])
    return ["arrivals", "", "answered a second", "p50, ms", "p99, ms"], rows


def hit_rates(report: dict[str, Any]) -> Table:
    """Of arena sizes, by order of eviction."""
    names = list(report["cases"][0]["variants"])[1:]
    rows = [
        [
            f"{case['share']:.0%}",
            f"{case['mapflow']:.1%}",
            *(f"{case['variants'][name]:.1%}" for name in names),
            f"{case['belady']:.1%}",
        ]
        for case in report["cases"]
    ]
    return ["room for, of all chunks", "MapFlow (least recently used)", *names, "Belady's bound"], rows
