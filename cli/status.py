"""`mapflow status`: the daemon's counters as a table. Asks once, with a deadline; changes nothing."""

from __future__ import annotations

import grpc
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from mapflow.connector.reasons import Unavailable
from mapflow.connector.tls import ClientTls, open_channel
from mapflow.v1 import cache_pb2, cache_pb2_grpc

_DEADLINE_S = 3.0


class StatusError(RuntimeError):
    """The daemon could not be asked; one line with the way out."""


def fetch_stats(endpoint: str, tls: ClientTls | None = None) -> cache_pb2.StatsResponse:
    """Ask the daemon for its counters.

    Raises:
        StatusError: no daemon answers there, or a TLS file cannot be read.
    """
    try:
        opened = open_channel(endpoint, tls)
    except Unavailable as error:
        raise StatusError(error.detail) from error
    with opened as channel:
        try:
            stub = cache_pb2_grpc.CacheStub(channel)  # type: ignore[no-untyped-call]
            stats: cache_pb2.StatsResponse = stub.Stats(cache_pb2.StatsRequest(), timeout=_DEADLINE_S)
        except grpc.RpcError as error:
            raise StatusError(
                f"no daemon answers at {endpoint} ({error.code().name.lower()}); start one with `mapflow serve`"
            ) from error
    return stats


def print_status(endpoint: str, tls: ClientTls | None = None) -> None:
    """Print the daemon's state.

    Raises:
        StatusError: no daemon answers there.
    """
    stats = fetch_stats(endpoint, tls)
    table = Table(title=f"mapflow at {endpoint}", show_header=False)
    table.add_row("boot", stats.boot_id.hex())
    table.add_row("uptime", f"{stats.uptime_s:.0f} s")
    for arena in stats.arenas:
        used, size = decimal(arena.used_bytes), decimal(arena.arena.num_bytes)
        table.add_row(f"arena {arena.arena.segment_name}", f"{used} of {size}")
    for device in stats.device_arenas:
        used, size = decimal(device.used_bytes), decimal(device.arena.num_bytes)
        table.add_row(f"arena on {device.arena.device_uuid}", f"{used} of {size}, {device.num_copies} copies")
    table.add_row("chunks, entries", f"{stats.num_chunks}, {stats.num_entries}")
    table.add_row(
        "sessions, leases, reservations", f"{stats.num_sessions}, {stats.num_leases}, {stats.num_reservations}"
    )
    hits = f"{stats.hit_chunks / stats.lookup_chunks:.1%}" if stats.lookup_chunks else "no look-ups yet"
    table.add_row("chunks hit of looked up", f"{stats.hit_chunks} of {stats.lookup_chunks} ({hits})")
    table.add_row("entries evicted", str(stats.evicted_entries))
    for publisher in stats.publishers:
        table.add_row("publisher", publisher.producer.id)
    Console().print(table)
