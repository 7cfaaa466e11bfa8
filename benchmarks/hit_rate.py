"""Hit rates on a trace of real requests: `python benchmarks/hit_rate.py TRACE`, some minutes, no daemon.

TRACE has a JSON line a request, with `hash_ids`: ids of 512-token prefix blocks (Mooncake's conversation trace). Every
request looks its chunks up and publishes those that are missing, through the daemon's own core (`core/cache.py`), at
several arena sizes. Beside it what no cache of that size can pass: Belady's choice of what to evict, which knows the
future and minds no chains; other orders of eviction, simulated; and an unlimited cache. Prints a table and writes
`benchmarks/results/hit-rate.json`.
"""

from __future__ import annotations

import argparse
import heapq
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # PYTHONSAFEPATH, which this project runs with, leaves it out

from eviction_variants import VARIANTS, simulated

from kernels import git_commit, write_report
from mapflow.cache_service.core.cache import Cache
from mapflow.cache_service.core.limits import Limits
from mapflow.cache_service.core.peers import Namespace, Publisher
from mapflow.cache_service.core.values import Kind, NewEntry, Want

RESULTS = Path(__file__).parent / "results" / "hit-rate.json"
SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.4)  # of the trace's distinct chunks
_PRODUCER, _MODEL, _BYTES = "m@1/bfloat16/tp0of1", "m@1", 64
_NEVER = 1 << 60

Requests = Sequence[Sequence[int]]


def read_trace(path: Path) -> list[list[int]]:
    """The chunks of every request, in order of arrival."""
    return [json.loads(line)["hash_ids"] for line in path.read_text().splitlines()]


def unlimited(requests: Requests) -> float:
    """Share of chunks that were seen before, in an unbroken run from the first."""
    seen: set[int] = set()
    hits = 0
    for chunks in requests:
        hits += next((number for number, chunk in enumerate(chunks) if chunk not in seen), len(chunks))
        seen.update(chunks)
    return hits / sum(map(len, requests))


def belady(requests: Requests, room: int) -> float:
    """Share of chunks that are there if what is used again last is evicted first (Belady, 1966), or not kept at all."""
    uses = [chunk for chunks in requests for chunk in chunks]
    next_use = [_NEVER] * len(uses)
    last: dict[int, int] = {}
    for place in range(len(uses) - 1, -1, -1):
        next_use[place] = last.get(uses[place], _NEVER)
        last[uses[place]] = place
    here: dict[int, int] = {}  # chunk -> its next use
    furthest: list[tuple[int, int]] = []  # (-next use, chunk), some out of date
    hits = 0
    for place, chunk in enumerate(uses):
        hits += chunk in here
        here[chunk] = next_use[place]
        heapq.heappush(furthest, (-next_use[place], chunk))
        while len(here) > room:
            use, victim = heapq.heappop(furthest)
            if here.get(victim) == -use:
                del here[victim]
    return hits / len(uses)


def mapflow(requests: Requests, room: int) -> float:
    """Share of chunks that look-ups found in the daemon's core with room for so many."""
    times = {"session_timeout_s": 1e9, "max_lease_s": 1e9, "reservation_timeout_s": 1e9}
    cache = Cache(Limits(arena_bytes=room * _BYTES, max_keys=4096, **times), boot_tag=1, now=0.0)
    namespace = Namespace(
        format_version=1, tokenizer_fingerprint="0" * 32, chunk_tokens=512, block=64, tenant="", key_hash=1
    )
    session = cache.open_session("replay", Publisher(_PRODUCER, namespace), 0.0)
    hits = 0
    for chunks in requests:
        keys = list(_keys(chunks))
        found = cache.lookup(session, keys, [Want(Kind.MAP, _MODEL, (0,))], 1.0, 0.0)
        length = max((hit.num_chunks for hit in found.hits), default=0)
        hits += length
        parents = [None, *keys]
        new = [NewEntry(key, parent, 0, _BYTES) for key, parent in zip(keys[length:], parents[length:])]
        reserved = cache.reserve(session, Kind.MAP, _PRODUCER, new, 0.0)
        cache.commit(session, [one.id for one in reserved if one.id], 0.0)
        cache.release(session, [found.lease_id] if found.lease_id else [], 0.0)
    return hits / sum(map(len, requests))


def _keys(chunks: Sequence[int]) -> Iterator[bytes]:
    """Of a trace whose block ids name their whole prefix, as chained hashes do."""
    return (chunk.to_bytes(16, "big") for chunk in chunks)


def main() -> None:
    """Parse, replay, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--shares", nargs="+", type=float, default=list(SHARES), help="arena sizes, of all chunks")
    parser.add_argument("--commit", default=None, help="the commit that is measured, where git cannot be asked")
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    requests = read_trace(arguments.trace)
    distinct = len({chunk for chunks in requests for chunk in chunks})
    report: dict[str, Any] = {
        "trace": arguments.trace.name,
        "requests": len(requests),
        "chunks": sum(map(len, requests)),
        "distinct_chunks": distinct,
        "commit": arguments.commit or git_commit(),
        "unlimited": round(unlimited(requests), 4),
        "cases": [],
    }
    print(f"{distinct} chunks in {len(requests)} requests; unlimited {report['unlimited']:.1%}")
    for share in arguments.shares:
        room = max(1, round(share * distinct))
        case = {"share": share, "chunks": room}
        case |= {name: round(make(requests, room), 4) for name, make in (("mapflow", mapflow), ("belady", belady))}
        case["variants"] = {name: round(simulated(requests, room, rank), 4) for name, rank in VARIANTS.items()}
        report["cases"].append(case)
        print(f"{share:5.0%} {room:7} chunks  mapflow {case['mapflow']:.1%}  at most {case['belady']:.1%}")
        print(
            "  simulated: " + ", ".join(f"{name} {found:.1%}" for name, found in case["variants"].items()), flush=True
        )
    write_report(report, arguments.output)


if __name__ == "__main__":
    main()
