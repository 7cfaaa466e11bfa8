"""What the daemon is told at start: one frozen value, checked once.

Parses sizes, endpoints and GPU arenas; opens nothing. What can only be seen from the machine (a socket in use, too
little memory) is for `server.py` to find.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from mapflow.cache_service.core.extents import ALIGNMENT
from mapflow.cache_service.core.limits import Limits

DEFAULT_ENDPOINT = "unix:///run/mapflow/mapflow.sock"
MAX_UNIX_PATH_BYTES = 107
READ_GRACE_S = 5.0  # engines begin no copy under a lease that has less left, and none takes as long
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?B|B)?", re.IGNORECASE)
_UNITS = {"": 1, "b": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("kmgt", start=1)
    for suffix, base in (("b", 1000), ("ib", 1024))
}


class LogFormat(StrEnum):
    """How log lines look: one JSON object each, or `key=value` for people."""

    JSON = "json"
    CONSOLE = "console"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where the daemon listens: a Unix socket (`path`) or TCP (`host` and `port`; port 0 lets the system choose)."""

    path: str = ""
    host: str = ""
    port: int = 0

    def __str__(self) -> str:
        """The form that `parse_endpoint` reads, which gRPC takes as a target too."""
        if self.path:
            return f"unix://{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """PEM files.

    Attributes:
        cert: the daemon's certificate, with those of the authorities between it and a client's root.
        key: its private key.
        client_ca: authorities whose certificates clients must show.
    """

    cert: Path
    key: Path
    client_ca: Path

    @classmethod
    def parse(cls, cert: str | None, key: str | None, client_ca: str | None) -> TlsFiles | None:
        """What the command line names; None for nothing.

        Raises:
            ValueError: only some of the three.
        """
        given = {"--tls-cert": cert, "--tls-key": key, "--tls-client-ca": client_ca}
        if not any(given.values()):
            return None
        if missing := [name for name, value in given.items() if not value]:
            raise ValueError(f"TLS needs a certificate, its key and the clients' authority; add {', '.join(missing)}")
        return cls(cert=Path(cert or ""), key=Path(key or ""), client_ca=Path(client_ca or ""))


@dataclass(frozen=True, slots=True)
class GpuArena:
    """A device arena to be made: on which GPU, by its CUDA number, and how large."""

    device: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Everything that `serve` needs to know.

    Attributes:
        endpoint: where to listen.
        arena_bytes: size of the shared-memory arena.
        metrics_host: address of the Prometheus port.
        metrics_port: Prometheus port; 0 serves no metrics.
        session_timeout_s: silence after which a session is ended.
        max_lease_s: longest life of a lease.
        reservation_timeout_s: time after which a reservation that was not committed is aborted.
        drain_s: how long leases and reservations may last once the daemon was told to stop.
        max_keys: most keys that one request may carry.
        insecure_tcp: listen on TCP without encryption or authentication.
        tls: mutual TLS on TCP.
        log_format: how log lines look.
        gpu_arenas: memory of GPUs for copies of maps, one arena a GPU.
    """

    endpoint: Endpoint
    arena_bytes: int
    metrics_host: str = "127.0.0.1"
    metrics_port: int = 0
    session_timeout_s: float = 10.0
    max_lease_s: float = 60.0
    reservation_timeout_s: float = 60.0
    drain_s: float = 10.0
    max_keys: int = 4096
    insecure_tcp: bool = False
    tls: TlsFiles | None = None
    log_format: LogFormat = LogFormat.CONSOLE
    gpu_arenas: tuple[GpuArena, ...] = ()

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ValueError: one line that names the value and the way out.
        """
        if self.endpoint.path and self.tls is not None:
            raise ValueError(
                f"endpoint {self.endpoint} is a Unix socket, which only this user can open, and needs no TLS; "
                "leave out --tls-cert, --tls-key and --tls-client-ca"
            )
        if not self.endpoint.path and self.tls is None and not self.insecure_tcp:
            raise ValueError(
                f"endpoint {self.endpoint} is TCP, open to whoever reaches it; give --tls-cert, --tls-key and "
                "--tls-client-ca, use a unix:// endpoint, or allow it with --insecure-tcp"
            )
        if self.arena_bytes < ALIGNMENT:
            raise ValueError(f"arena must have at least {ALIGNMENT} bytes, got {self.arena_bytes}; try 4GiB")
        if not 0 <= self.metrics_port <= 65535:
            raise ValueError(f"metrics port must be in [0, 65535] (0 = off), got {self.metrics_port}")
        for name in ("session_timeout_s", "max_lease_s", "reservation_timeout_s"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise ValueError(f"{name} must be a positive number of seconds, got {getattr(self, name)}")
        if not (math.isfinite(self.drain_s) and self.drain_s >= 0):
            raise ValueError(f"drain_s must be 0 or a positive number of seconds, got {self.drain_s}")
        if self.max_keys < 1:
            raise ValueError(f"max_keys must be at least 1, got {self.max_keys}")
        for number, arena in enumerate(self.gpu_arenas):
            if arena.num_bytes < ALIGNMENT:
                raise ValueError(
                    f"GPU arena on device {arena.device} must have at least {ALIGNMENT} bytes, got {arena.num_bytes}; "
                    f"try {arena.device}:8GiB"
                )
            if arena.device in [other.device for other in self.gpu_arenas[:number]]:
                raise ValueError(f"GPU arena on device {arena.device} is named twice; name each device once")

    @property
    def limits(self) -> Limits:
        """The part of it that the core decides by."""
        return Limits(
            arena_bytes=self.arena_bytes,
            session_timeout_s=self.session_timeout_s,
            max_lease_s=self.max_lease_s,
            reservation_timeout_s=self.reservation_timeout_s,
            max_keys=self.max_keys,
            read_grace_s=READ_GRACE_S,
            device_arena_bytes=tuple(arena.num_bytes for arena in self.gpu_arenas),
        )


def parse_size(text: str) -> int:
    """Bytes of a size such as `4GiB`, `512MB` or `1048576`.

    Raises:
        ValueError: the text is no size.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is no size; write it like 4GiB, 512MB or 1048576")
    number, unit = match.groups()
    return (
        int(float(number) * _UNITS[(unit or "").lower()])
        if "." in number
        else int(number) * _UNITS[(unit or "").lower()]
    )


def parse_gpu_arena(text: str) -> GpuArena:
    """A GPU arena such as `0:8GiB`: the GPU's CUDA number and a size.

    Raises:
        ValueError: the text is no GPU arena.
    """
    device, colon, size = text.strip().partition(":")
    if not colon or not device.isascii() or not device.isdecimal():
        raise ValueError(f"{text!r} is no GPU arena; write it like 0:8GiB, the device's number and a size")
    return GpuArena(int(device), parse_size(size))


def parse_endpoint(text: str) -> Endpoint:
    """An endpoint such as `unix:///run/mapflow/mapflow.sock`, `127.0.0.1:7070` or `[::1]:7070`.

    Raises:
        ValueError: the text is no endpoint, or a path too long for a Unix socket.
    """
    if text.startswith("unix:"):
        path = text.removeprefix("unix:")
        path = path.removeprefix("//") if path.startswith("//") else path
        if not path.startswith("/") or path.endswith("/"):
            raise ValueError(f"endpoint {text!r} must name a socket by its absolute path, like {DEFAULT_ENDPOINT}")
        if len(path.encode()) > MAX_UNIX_PATH_BYTES:
            raise ValueError(f"socket path {path!r} is longer than {MAX_UNIX_PATH_BYTES} bytes; choose a shorter one")
        return Endpoint(path=path)
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") if host.startswith("[") else host
    if not colon or not host or not port.isascii() or not port.isdecimal() or int(port) > 65535 or "/" in host:
        raise ValueError(f"{text!r} is no endpoint; write it like {DEFAULT_ENDPOINT} or 127.0.0.1:7070")
    return Endpoint(host=host, port=int(port))
