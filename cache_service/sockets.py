"""The daemon's listening address: found free, bound, and open to nobody else.

A Unix socket that a living daemon serves is left alone; one that a dead daemon left behind is removed.
"""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc

from mapflow.cache_service.config import Endpoint
from mapflow.cache_service.errors import StartupError

_PROBE_TIMEOUT_S = 1.0
_TURN_TIMEOUT_S = 5.0


def bind(server: grpc.aio.Server, endpoint: Endpoint, credentials: grpc.ServerCredentials | None = None) -> Endpoint:
    """Let the server listen on an endpoint; returns it with the port that the system chose, if it did.

    credentials: of a TCP endpoint with TLS.

    Raises:
        StartupError: the address is in use or cannot be bound.
    """
    if not endpoint.path:
        return Endpoint(host=endpoint.host, port=_add_port(server, endpoint, credentials))
    path = Path(endpoint.path)
    with _turn(path.parent):
        require_free(endpoint)
        mask = os.umask(0o177)
        try:
            _add_port(server, endpoint)
        finally:
            os.umask(mask)
    return endpoint


def require_free(endpoint: Endpoint) -> None:
    """Make sure that nobody serves a Unix socket, and that its folder is there; removes a socket that is left over.

    Raises:
        StartupError: a daemon answers, the path is something else than a socket, or the folder cannot be made.
    """
    if not endpoint.path:
        return
    path = Path(endpoint.path)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            return
        if not stat.S_ISSOCK(path.stat().st_mode):
            raise StartupError(f"{path} exists and is no socket; remove it or choose another endpoint")
        if _is_served(path):
            raise StartupError(f"socket {path} is in use by a running daemon; stop it or choose another endpoint")
        path.unlink(missing_ok=True)
    except OSError as error:
        raise StartupError(f"socket {path} cannot be used: {error.strerror}; choose another endpoint") from error


def _is_served(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(_PROBE_TIMEOUT_S)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except TimeoutError:
            return True  # somebody listens but is too busy to answer
    return True


def _add_port(server: grpc.aio.Server, endpoint: Endpoint, credentials: grpc.ServerCredentials | None = None) -> int:
    try:
        if credentials is not None:
            return int(server.add_secure_port(str(endpoint), credentials))
        return int(server.add_insecure_port(str(endpoint)))
    except RuntimeError as error:
        doubt = "" if credentials is None else " Or are the TLS files no PEM, or the key another certificate's?"
        raise StartupError(
            f"endpoint {endpoint} cannot be bound; is it in use, or not an address of this host?{doubt}"
        ) from error


@contextmanager
def _turn(folder: Path) -> Iterator[None]:
    """Let one daemon at a time look for a socket in a folder and bind it."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise StartupError(f"folder {folder} cannot be used: {error.strerror}; choose another endpoint") from error
    try:
        give_up_at = time.monotonic() + _TURN_TIMEOUT_S
        while not _try_lock(fd):
            if time.monotonic() > give_up_at:
                raise StartupError(f"folder {folder} stays locked by another process; choose another endpoint")
            time.sleep(0.02)
        yield
    finally:
        os.close(fd)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
