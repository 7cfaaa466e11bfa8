"""Mutual TLS of a client: the certificate that it shows, and the authority of the daemons that it trusts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from mapflow.connector.reasons import Reason, Unavailable

Options = Sequence[tuple[str, int | str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientTls:
    """PEM files, read anew for every connection.

    Attributes:
        ca: authorities whose certificate the daemon must show.
        cert: the client's certificate.
        key: its private key.
        server_name: name in the daemon's certificate, where it is not the endpoint's host; empty for that.
    """

    ca: Path
    cert: Path
    key: Path
    server_name: str = ""

    @classmethod
    def parse(cls, ca: str | None, cert: str | None, key: str | None, server_name: str = "") -> ClientTls | None:
        """What settings name; None for nothing.

        Raises:
            ValueError: only some of the files.
        """
        given = {"tls_ca": ca, "tls_cert": cert, "tls_key": key}
        if not any((*given.values(), server_name)):
            return None
        if missing := [name for name, value in given.items() if not value]:
            raise ValueError(f"TLS needs tls_ca, tls_cert and tls_key; {', '.join(missing)} is missing")
        return cls(ca=Path(ca or ""), cert=Path(cert or ""), key=Path(key or ""), server_name=server_name)


def open_channel(endpoint: str, tls: ClientTls | None, options: Options = ()) -> grpc.Channel:
    """A channel to a daemon; connects to nothing yet.

    Raises:
        Unavailable: a file cannot be read (UNREACHABLE).
    """
    if tls is None:
        return grpc.insecure_channel(endpoint, options=options)
    try:
        ca, cert, key = (path.read_bytes() for path in (tls.ca, tls.cert, tls.key))
    except OSError as error:
        detail = f"TLS file {error.filename} cannot be read: {error.strerror}"
        raise Unavailable(Reason.UNREACHABLE, detail) from error
    credentials = grpc.ssl_channel_credentials(root_certificates=ca, private_key=key, certificate_chain=cert)
    name = [("grpc.ssl_target_name_override", tls.server_name)] if tls.server_name else []
    return grpc.secure_channel(endpoint, credentials, options=[*options, *name])
