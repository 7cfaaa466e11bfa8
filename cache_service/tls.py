"""Mutual TLS for a daemon on TCP: who may connect is who has a certificate of the authority that it trusts.

Certificates are read again when their files change, so that whoever rotates them need not restart the daemon. What
cannot be read then is logged, and the last good ones stay.
"""

from __future__ import annotations

from dataclasses import fields

import grpc
import structlog

from mapflow.cache_service.config import TlsFiles
from mapflow.cache_service.errors import StartupError

_log = structlog.get_logger(__name__)


def server_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """Credentials of a server that every client must show a certificate to.

    Raises:
        StartupError: a file cannot be read.
    """
    contents = _Contents(files)
    return grpc.dynamic_ssl_server_credentials(
        contents.configuration(), contents.changed, require_client_authentication=True
    )


class _Contents:
    """What the files held when they were last read."""

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        try:
            self._pems = self._read()
        except OSError as error:
            raise StartupError(f"TLS file {error.filename} cannot be read: {error.strerror}") from error

    def configuration(self) -> grpc.ServerCertificateConfiguration:
        cert, key, client_ca = self._pems
        return grpc.ssl_server_certificate_configuration([(key, cert)], root_certificates=client_ca)

    def changed(self) -> grpc.ServerCertificateConfiguration | None:
        """New ones, or None where they are the same; gRPC asks before every handshake."""
        try:
            pems = self._read()
        except OSError as error:
            _log.warning("tls_file_unreadable", file=str(error.filename), reason=error.strerror)
            return None
        if pems == self._pems:
            return None
        self._pems = pems
        _log.info("tls_files_changed")
        return self.configuration()

    def _read(self) -> tuple[bytes, ...]:
        return tuple(getattr(self._files, field.name).read_bytes() for field in fields(self._files))
