"""`python -m mapflow.cache_service`: the daemon with plain options, for where the `mapflow` command is not wanted."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from mapflow.cache_service.config import (
    DEFAULT_ENDPOINT,
    Config,
    LogFormat,
    TlsFiles,
    parse_endpoint,
    parse_gpu_arena,
    parse_size,
)
from mapflow.cache_service.server import run


def parse(arguments: Sequence[str]) -> Config:
    """The configuration that the command line asks for; exits with status 2 and one line if it is wrong."""
    parser = argparse.ArgumentParser(prog="mapflow.cache_service", description="The MapFlow cache daemon of one node.")
    add = parser.add_argument
    add("--endpoint", default=DEFAULT_ENDPOINT, help="unix:///path or host:port (default: %(default)s)")
    add("--arena", default="1GiB", help="shared memory for attention maps, like 4GiB (default: %(default)s)")
    add("--gpu-arena", action="append", default=[], metavar="DEVICE:SIZE", help="GPU memory, like 0:8GiB; repeatable")
    add("--metrics-host", default="127.0.0.1", help="address of the Prometheus port (default: %(default)s)")
    add("--metrics-port", type=int, default=0, help="Prometheus port; 0: none (default: %(default)s)")
    add("--session-timeout", type=float, default=10.0, help="silence that ends a session, in s (default: %(default)s)")
    add("--max-lease", type=float, default=60.0, help="longest life of a lease, in s (default: %(default)s)")
    add("--reservation-timeout", type=float, default=60.0, help="longest write of a blob, in s (default: %(default)s)")
    add("--drain", type=float, default=10.0, help="longest wait for readers and writers at the end, in s")
    add("--max-keys", type=int, default=4096, help="most keys in one request (default: %(default)s)")
    add("--insecure-tcp", action="store_true", help="allow TCP without TLS")
    add("--tls-cert", metavar="FILE", help="PEM certificate of the daemon, for TCP")
    add("--tls-key", metavar="FILE", help="its private key")
    add("--tls-client-ca", metavar="FILE", help="authority whose certificates clients must show")
    add("--log-format", choices=list(LogFormat), default=LogFormat.CONSOLE, help="default: %(default)s")
    options = parser.parse_args(arguments)
    try:
        return Config(
            endpoint=parse_endpoint(options.endpoint),
            arena_bytes=parse_size(options.arena),
            metrics_host=options.metrics_host,
            metrics_port=options.metrics_port,
            session_timeout_s=options.session_timeout,
            max_lease_s=options.max_lease,
            reservation_timeout_s=options.reservation_timeout,
            drain_s=options.drain,
            max_keys=options.max_keys,
            insecure_tcp=options.insecure_tcp,
            tls=TlsFiles.parse(options.tls_cert, options.tls_key, options.tls_client_ca),
            log_format=LogFormat(options.log_format),
            gpu_arenas=tuple(map(parse_gpu_arena, options.gpu_arena)),
        )
    except ValueError as error:
        print(f"mapflow: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    sys.exit(run(parse(sys.argv[1:])))
