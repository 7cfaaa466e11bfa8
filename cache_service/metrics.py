"""Prometheus metrics of one daemon, in a registry of their own, on a port of their own.

Gauges and counters are read from the core at each scrape; only call latencies are recorded as they happen.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence

import grpc
from prometheus_client import CollectorRegistry, Histogram, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mapflow.cache_service.core.values import DeviceArenaStats, Stats
from mapflow.cache_service.errors import StartupError

_SCRAPE_TIMEOUT_S = 5.0
_STREAMS_WITHOUT_LATENCY = ("Session", "Calls")  # last as long as their client
_BUCKETS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0, 5.0)
_COUNTERS = {
    "lookups": "Lookup calls.",
    "lookup_chunks": "Chunks asked for, per want.",
    "hit_chunks": "Chunks of those that lay in the returned runs.",
    "miss_chunks": "Chunks of those that did not.",
    "evicted_entries": "Entries evicted.",
    "expired_sessions": "Sessions ended because of their silence.",
}
_GAUGES = {
    "arena_bytes": "Size of the arena.",
    "used_bytes": "Bytes in committed or reserved extents.",
    "largest_free_bytes": "Largest extent that could be handed out without eviction.",
    "num_chunks": "Chunks with at least one committed entry.",
    "num_entries": "Committed entries.",
    "num_reservations": "Reservations neither committed nor aborted.",
    "num_leases": "Leases in force.",
    "num_sessions": "Open sessions.",
    "uptime_s": "Seconds since start.",
}
_DEVICE_COUNTERS = {
    "promoted_entries": "Copies made in a device arena.",
    "no_room_entries": "Copies not made because there was no room.",
    "failed_entries": "Copies given up because copying failed.",
    "dropped_entries": "Copies that made way for others, or went with their chunk.",
}
_DEVICE_GAUGES = {
    "arena_bytes": "Size of a device arena.",
    "used_bytes": "Bytes in copies that can be read or are being made.",
    "num_copies": "Copies that can be read.",
}


class Metrics:
    """The registry, and what is recorded in it directly."""

    def __init__(self, read_stats: Callable[[], Stats], loop: asyncio.AbstractEventLoop) -> None:
        """Prepare the registry.

        Args:
            read_stats: reads the core; always called on the loop.
        """
        self.registry = CollectorRegistry()
        self.registry.register(_CoreCollector(read_stats, loop))
        self._rpc_seconds = Histogram(
            "mapflow_rpc_seconds",
            "Time to answer a call.",
            labelnames=("method", "code"),
            buckets=_BUCKETS,
            registry=self.registry,
        )
        self._series: dict[tuple[str, grpc.StatusCode], Histogram] = {}

    def observe(self, method: str, code: grpc.StatusCode, seconds: float) -> None:
        """Record a finished call."""
        if method in _STREAMS_WITHOUT_LATENCY:
            return
        series = self._series.get((method, code))
        if series is None:  # `labels` takes as long as a look-up
            series = self._series[method, code] = self._rpc_seconds.labels(method, code.name)
        series.observe(seconds)

    def serve(self, host: str, port: int) -> Callable[[], None]:
        """Start answering scrapes in a thread; returns what stops it.

        Raises:
            StartupError: the port cannot be bound.
        """
        try:
            server, thread = start_http_server(port, host, registry=self.registry)
        except OSError as error:
            raise StartupError(
                f"metrics port {host}:{port} cannot be bound: {error.strerror}; choose another one or 0 for none"
            ) from error

        def stop() -> None:
            server.shutdown()
            server.server_close()
            thread.join()

        return stop


class _CoreCollector(Collector):
    def __init__(self, read_stats: Callable[[], Stats], loop: asyncio.AbstractEventLoop) -> None:
        self._read_stats = read_stats
        self._loop = loop

    def collect(self) -> Iterator[Metric]:
        """Read the core on its own loop, from the thread of a scrape."""
        stats = asyncio.run_coroutine_threadsafe(self._read(), self._loop).result(_SCRAPE_TIMEOUT_S)
        for name, text in _COUNTERS.items():
            yield CounterMetricFamily(f"mapflow_{name}", text, value=_value(stats, name))
        for name, text in _GAUGES.items():
            yield GaugeMetricFamily(f"mapflow_{name}", text, value=_value(stats, name))
        if stats.device_arenas:
            yield from _device_metrics(stats.device_arenas)

    async def _read(self) -> Stats:
        return self._read_stats()


def _device_metrics(arenas: Sequence[DeviceArenaStats]) -> Iterator[Metric]:
    for names, family in ((_DEVICE_COUNTERS, CounterMetricFamily), (_DEVICE_GAUGES, GaugeMetricFamily)):
        for name, text in names.items():
            metric = family(f"mapflow_device_{name}", text, labels=["device_arena"])
            for arena in arenas:
                metric.add_metric([str(arena.arena_id)], float(getattr(arena, name)))
            yield metric


def _value(stats: Stats, name: str) -> float:
    if name == "miss_chunks":
        return stats.lookup_chunks - stats.hit_chunks
    return float(getattr(stats, name))
