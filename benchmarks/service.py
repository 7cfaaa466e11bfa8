"""The daemon under load: `python benchmarks/service.py`, real processes on one machine, a few minutes.

Look-ups of a chain that is there, and reservations of chunks that are not, beside a gRPC server that echoes the same
messages (`service_bare.py`) and, with `--lmcache PYTHON`, LMCache's multi-process server (`service_lmcache.py`, in a
virtual environment of its own). The systems are asked in turn, in an order that changes; one process asks each. Closed
loops give latencies, a window of calls the most that a system can do, and open loops (arrivals wait for no answer) what
callers see under load. Prints a table and writes `benchmarks/results/service.json`.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # PYTHONSAFEPATH, which this project runs with, leaves it out

from processes import Child, daemon, orders

from kernels import git_commit, write_report

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "service.json"
BARE = "bare stream"  # what ratios are to
SYSTEMS = (BARE, "bare unary", "mapflow")
CLOSED = ("lookup 1", "lookup 64", "lookup 1024", "hash and lookup 64", "lookup and release 64", "reserve and commit")
LOADED = "lookup 64"  # what is asked in windows and open loops


def main() -> None:
    """Parse, start, measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=8, help="of every closed loop")
    parser.add_argument("--calls", type=int, default=200, help="of a closed loop")
    parser.add_argument("--window", type=int, default=32, help="calls on their way at saturation")
    parser.add_argument("--rates", nargs="+", type=float, default=[100.0, 500.0, 1000.0, 2000.0], help="calls a second")
    parser.add_argument("--seconds", type=float, default=3.0, help="of an open loop")
    parser.add_argument("--arena", default="256MiB")
    parser.add_argument("--lmcache", help="Python of a virtual environment with LMCache")
    parser.add_argument("--commit", default=None, help="the commit that is measured, where git cannot be asked")
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    report: dict[str, Any] = {
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "date": time.strftime("%Y-%m-%d"),
        "commit": arguments.commit or git_commit(),
        "versions": _versions(arguments.lmcache),
        "cases": [],
    }
    with tempfile.TemporaryDirectory(prefix="mapflow-") as name, systems(Path(name), arguments) as running:
        saturation = _saturation(running, arguments)
        most = {case["system"]: case["throughput"] for case in saturation}
        report["cases"] = [*_latencies(running, arguments), *saturation, *_open(running, arguments, most)]
    for case in report["cases"]:
        rate = "" if case["rate"] is None else f"{case['rate']:.0f}/s"
        ratio = "" if case["ratio_to_bare"] is None else f"{case['ratio_to_bare']:.2f}"
        print(
            f"{case['operation']:22} {case['system']:12} {case['loop']:7} {rate:>7} p50 {case['p50_ms']:8.3f} "
            f"p99 {case['p99_ms']:8.3f} ms {case['throughput']:7.0f}/s {ratio:>6} {case['errors'] or ''}"
        )
    write_report(report, arguments.output)


@contextmanager
def systems(folder: Path, arguments: argparse.Namespace) -> Iterator[dict[str, tuple[Child, Sequence[str]]]]:
    """By name, a process that asks each system, and the operations that it knows."""
    running: dict[str, Child] = {}
    servers = []
    try:
        with daemon(folder, arguments.arena) as endpoint:
            ends = {"mapflow": endpoint}
            for name in ("bare unary", BARE):
                ends[name] = f"unix://{folder / name.replace(' ', '-')}.sock"
                command = [sys.executable, str(HERE / "service_bare.py"), ends[name]]
                servers.append(Child(command, folder / f"{name} server.log"))
                servers[-1].line()
            for name in SYSTEMS:
                command = [sys.executable, str(HERE / "service_load.py"), name, ends[name]]
                running[name] = Child(command, folder / f"{name}.log")
            if arguments.lmcache:
                command = [arguments.lmcache, str(HERE / "service_lmcache.py"), str(folder)]
                running["lmcache"] = Child(command, folder / "lmcache.log")
            yield {name: (child, child.answer()["operations"]) for name, child in running.items()}
    finally:
        for child in running.values():
            child.stop(patience_s=10.0)  # one has a server of its own to end
        for server in servers:
            server.stop()


def _latencies(running: Mapping[str, tuple[Child, Sequence[str]]], arguments: argparse.Namespace) -> list[Any]:
    """Closed loops, one call at a time."""
    pairs = [(name, one) for name, (_, known) in running.items() for one in CLOSED if one in known]
    found: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for name, operation in pairs:  # connections, caches and branches warm up
        running[name][0].ask({"operation": operation, "loop": "closed", "calls": arguments.calls})
    for order in orders(pairs, arguments.rounds, random.Random(1)):
        for name, operation in order:
            command = {"operation": operation, "loop": "closed", "calls": arguments.calls}
            found[name, operation].append(running[name][0].ask(command))
    return _with_ratios([_case(name, operation, "closed", None, found[name, operation]) for name, operation in pairs])


def _saturation(running: Mapping[str, tuple[Child, Sequence[str]]], arguments: argparse.Namespace) -> list[Any]:
    """Closed loops with a window of calls on their way."""
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for order in orders(list(running), arguments.rounds, random.Random(2)):
        for name in order:
            command = {"operation": LOADED, "loop": "closed", "calls": 5 * arguments.calls, "window": arguments.window}
            found[name].append(running[name][0].ask(command))
    return _with_ratios([_case(name, LOADED, "window", None, found[name]) for name in running])


def _open(
    running: Mapping[str, tuple[Child, Sequence[str]]], arguments: argparse.Namespace, most: Mapping[str, float]
) -> list[Any]:
    """Open loops at every rate, of the systems that can do as many calls a second: others would only fall behind."""
    cases = []
    for rate in arguments.rates:
        able = [name for name in running if most[name] > rate]
        found: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for number, order in enumerate(orders(able, 5, random.Random(rate))):
            for name in order:
                command = {"operation": LOADED, "loop": "open", "rate": rate, "seconds": arguments.seconds}
                found[name].append(running[name][0].ask({**command, "seed": number}))
        cases += _with_ratios([_case(name, LOADED, "open", rate, found[name]) for name in able])
    return cases


def _case(
    system: str, operation: str, loop: str, rate: float | None, rounds: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """p50 and p99 are medians of the rounds' own: what the machine did besides falls on one of them."""
    answered = [sorted(outcome["latencies_ms"]) for outcome in rounds if outcome["latencies_ms"]]
    if not answered:
        raise RuntimeError(f"{system} answered no {operation}: {[outcome['errors'] for outcome in rounds]}")
    medians, tails = ([one[int(share * len(one))] for one in answered] for share in (0.5, 0.99))
    errors: dict[str, int] = defaultdict(int)
    for outcome in rounds:
        for kind, count in outcome["errors"].items():
            errors[kind] += count
        if outcome["unanswered"]:
            errors["unanswered"] += outcome["unanswered"]
    return {
        "operation": operation,
        "system": system,
        "loop": loop,
        "rate": rate,
        "p50_ms": round(statistics.median(medians), 4),
        "p99_ms": round(statistics.median(tails), 4),
        "throughput": round(sum(map(len, answered)) / sum(outcome["seconds"] for outcome in rounds), 1),
        "round_p50_ms": [round(one, 4) for one in medians],
        "round_p99_ms": [round(one, 4) for one in tails],
        "calls": sum(map(len, answered)),
        "errors": dict(errors),
    }


def _with_ratios(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The p50 of each to the bare stream's of the same operation; None where that has no such operation."""
    bare = {case["operation"]: case["p50_ms"] for case in cases if case["system"] == BARE}
    bare["lookup and release 64"] = bare.get("lookup 64")
    for case in cases:
        base = bare.get(case["operation"])
        case["ratio_to_bare"] = None if base is None else round(case["p50_ms"] / base, 3)
    return cases


def _versions(lmcache: str | None) -> dict[str, str]:
    from importlib.metadata import version

    return {"python": platform.python_version()} | {name: version(name) for name in ("grpcio", "protobuf", "uvloop")}


if __name__ == "__main__":
    main()
