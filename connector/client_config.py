"""How an engine reaches the daemon, and as whom. Values and their checks; nothing here connects."""

from __future__ import annotations

import re
from dataclasses import dataclass

from mapflow.connector.messages import Producer
from mapflow.connector.namespace import Namespace
from mapflow.connector.tls import ClientTls


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientConfig:
    """How to reach the daemon, and as whom.

    Attributes:
        endpoint: `unix:///path` or `host:port`.
        client_name: names this client in the daemon's logs.
        namespace: in which its keys are computed.
        producer: for clients that publish.
        call_deadline_s: most that a lookup may take.
        transfer_deadline_s: most that one reserve, commit, abort, fetch or store may take.
        connect_deadline_s: most that one attempt to connect may take.
        backoff_min_s, backoff_max_s: bounds of the jittered pause between attempts.
        device_uuid: GPU whose device arena is read, as in "GPU-12345678-..."; empty for none.
        tls: of a TCP endpoint with mutual TLS; None for a Unix socket, or plain TCP.
        map_arenas: False moves bytes by Fetch and Store even where memory could be shared.
    """

    endpoint: str
    client_name: str
    namespace: Namespace
    producer: Producer | None = None
    call_deadline_s: float = 0.25
    transfer_deadline_s: float = 2.0
    connect_deadline_s: float = 2.0
    backoff_min_s: float = 0.05
    backoff_max_s: float = 2.0
    device_uuid: str = ""
    tls: ClientTls | None = None
    map_arenas: bool = True

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ValueError: an endpoint of no known form, or a time that is not positive.
        """
        _check_endpoint(self.endpoint)
        if self.tls is not None and self.endpoint.startswith("unix:"):
            raise ValueError(f"endpoint {self.endpoint!r} is a Unix socket, which needs no TLS; leave tls out")
        for name in ("call_deadline_s", "transfer_deadline_s", "connect_deadline_s", "backoff_min_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.backoff_max_s < self.backoff_min_s:
            raise ValueError(f"backoff_max_s ({self.backoff_max_s}) is below backoff_min_s ({self.backoff_min_s})")


def _check_endpoint(endpoint: str) -> None:
    """Refuse what gRPC would not understand, or understand otherwise.

    Raises:
        ValueError: neither `unix:///path` nor `host:port`.
    """
    if endpoint.startswith("unix:"):
        path = endpoint.removeprefix("unix://")
        if not path.startswith("/") or len(path) < 2:
            raise ValueError(f"endpoint {endpoint!r} needs an absolute path, as in unix:///run/mapflow.sock")
        if len(path.encode()) > 107:
            raise ValueError(f"endpoint {endpoint!r}: a socket path may have 107 bytes, this has {len(path.encode())}")
        return
    match = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+):([0-9]+)", endpoint)
    if match is None or not 0 < int(match[2]) < 65536:
        raise ValueError(f"endpoint {endpoint!r} is neither unix:///path/to/socket nor host:port")
