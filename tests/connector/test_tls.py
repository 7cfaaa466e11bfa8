"""Mutual TLS on TCP, with a real daemon and real certificates: who has none of its authority's gets nowhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

trustme = pytest.importorskip("trustme")

from mapflow.cli.main import app  # noqa: E402
from mapflow.connector.client_config import ClientConfig  # noqa: E402
from mapflow.connector.messages import Kind, Want  # noqa: E402
from mapflow.connector.namespace import Namespace  # noqa: E402
from mapflow.connector.reasons import Reason  # noqa: E402
from mapflow.connector.tls import ClientTls  # noqa: E402

from .conftest import MODEL, PRODUCER, StartClient, make_blobs  # noqa: E402

pytestmark = pytest.mark.service
WANT = Want(model=MODEL, layers=(0, 1))


@dataclass(frozen=True, kw_only=True)
class Authority:
    """Signs; writes what it signs into a folder."""

    folder: Path
    authority: trustme.CA

    @classmethod
    def make(cls, folder: Path) -> Authority:
        folder.mkdir()
        authority = trustme.CA()
        authority.cert_pem.write_to_path(str(folder / "ca.pem"))
        return cls(folder=folder, authority=authority)

    def issue(self, name: str, host: str) -> tuple[Path, Path]:
        """Files of a certificate and of its key."""
        cert, key = self.folder / f"{name}.pem", self.folder / f"{name}.key"
        leaf = self.authority.issue_cert(host)
        for path, pem in ((cert, leaf.cert_chain_pems[0].bytes()), (key, leaf.private_key_pem.bytes())):
            path.with_suffix(".new").write_bytes(pem)
            os.replace(path.with_suffix(".new"), path)
        return cert, key

    def client(self) -> ClientTls:
        """What a client of this authority shows and trusts."""
        cert, key = self.issue("client", "client")
        return ClientTls(ca=self.folder / "ca.pem", cert=cert, key=key)


class TcpDaemon:
    """A daemon process on a port that the system chose."""

    def __init__(self, folder: Path, *options: str) -> None:
        self._log = folder / "daemon.log"
        command = [sys.executable, "-P", "-m", "mapflow.cache_service", "--arena", "4MiB", *options]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen([*command, "--endpoint", "127.0.0.1:0"], stderr=log)
        give_up_at = time.monotonic() + 30.0
        while (found := re.search(r"event=serving endpoint=(\S+)", self.log)) is None:
            assert self.process.poll() is None and time.monotonic() < give_up_at, self.log
            time.sleep(0.02)
        self.endpoint = found[1]

    @property
    def log(self) -> str:
        return self._log.read_text()


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority.make(tmp_path / "ours")


@pytest.fixture
def tls_daemon(tmp_path: Path, authority: Authority) -> Iterator[TcpDaemon]:
    cert, key = authority.issue("daemon", "127.0.0.1")
    files = ("--tls-cert", str(cert), "--tls-key", str(key), "--tls-client-ca", str(authority.folder / "ca.pem"))
    daemon = TcpDaemon(tmp_path, *files)
    yield daemon
    daemon.process.terminate()
    daemon.process.wait(30.0)


def test_a_client_of_the_authority_works(
    tls_daemon: TcpDaemon, authority: Authority, start_client: StartClient, namespace: Namespace
) -> None:
    client = start_client(tls_daemon.endpoint, producer=PRODUCER, tls=authority.client())
    blobs, keys = make_blobs(namespace, 2)
    assert client.publish(Kind.MAP, PRODUCER.id, blobs).published == len(blobs)
    (hit,) = client.lookup(keys, [WANT], 1.0).result(5.0).hits
    assert hit.num_chunks == 2


def test_nobody_else_does(
    tls_daemon: TcpDaemon, authority: Authority, start_client: StartClient, tmp_path: Path
) -> None:
    ours, other = authority.client(), Authority.make(tmp_path / "other")
    foreign = replace(other.client(), ca=ours.ca)  # trusts the daemon, but shows what another authority signed
    distrustful = replace(ours, ca=other.folder / "ca.pem")
    elsewhere = replace(ours, server_name="another.example")
    for tls in (None, foreign, distrustful, elsewhere):
        client = start_client(tls_daemon.endpoint, wait=False, tls=tls, connect_deadline_s=1.0)
        assert not client.wait_connected(2.5), tls
        assert client.counters.get("session", Reason.UNREACHABLE) + client.counters.get("session", Reason.DEADLINE) > 0
    assert "sessions_expired" not in tls_daemon.log and "Traceback" not in tls_daemon.log


def test_a_name_that_is_not_the_endpoints(
    tls_daemon: TcpDaemon, authority: Authority, start_client: StartClient
) -> None:
    authority.issue("daemon", "mapflow.example")
    tls = authority.client()
    assert not start_client(tls_daemon.endpoint, wait=False, tls=tls, connect_deadline_s=1.0).wait_connected(2.0)
    start_client(tls_daemon.endpoint, tls=replace(tls, server_name="mapflow.example"))


def test_files_are_read_anew(
    tls_daemon: TcpDaemon, authority: Authority, start_client: StartClient, tmp_path: Path
) -> None:
    """The authority's certificate and those it signed are replaced while the daemon runs."""
    old = authority.client()
    kept = tmp_path / "kept"
    kept.mkdir()
    for name in ("ca", "cert", "key"):
        (kept / name).write_bytes(getattr(old, name).read_bytes())
    start_client(tls_daemon.endpoint, tls=old)
    renewed = Authority.make(tmp_path / "renewed")
    cert, key = renewed.issue("daemon", "127.0.0.1")
    moves = [(cert, "daemon.pem"), (key, "daemon.key"), (renewed.folder / "ca.pem", "ca.pem")]
    for source, name in moves:
        (authority.folder / "new").write_bytes(source.read_bytes())
        os.replace(authority.folder / "new", authority.folder / name)
    start_client(tls_daemon.endpoint, tls=renewed.client())
    assert "tls_files_changed" in tls_daemon.log
    late = ClientTls(ca=kept / "ca", cert=kept / "cert", key=kept / "key")
    assert not start_client(tls_daemon.endpoint, wait=False, tls=late, connect_deadline_s=1.0).wait_connected(2.0)
    (authority.folder / "daemon.key").unlink()  # the last good ones stay
    start_client(tls_daemon.endpoint, tls=renewed.client())
    assert "tls_file_unreadable" in tls_daemon.log


def test_files_that_are_missing(
    tls_daemon: TcpDaemon, authority: Authority, start_client: StartClient, tmp_path: Path
) -> None:
    gone = replace(authority.client(), key=tmp_path / "gone.key")
    client = start_client(tls_daemon.endpoint, wait=False, tls=gone)
    assert not client.wait_connected(0.5) and client.counters.get("session", Reason.UNREACHABLE) > 0
    gone.key.write_bytes(authority.client().key.read_bytes())
    gone.cert.write_bytes(gone.cert.read_bytes())
    assert client.wait_connected(10.0), "it is read again with every attempt"
    command = [sys.executable, "-P", "-m", "mapflow.cache_service", "--arena", "1MiB", "--endpoint", "127.0.0.1:0"]
    names = ("--tls-cert", "--tls-key", "--tls-client-ca")
    files = [part for name in names for part in (name, str(tmp_path / name))]
    done = subprocess.run([*command, *files], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last == f"mapflow: TLS file {tmp_path}/--tls-cert cannot be read: No such file or directory"
    for name in names:
        (tmp_path / name).write_text("nonsense")
    done = subprocess.run([*command, *files], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and "are the TLS files no PEM" in done.stderr.splitlines()[-1]


def test_status(tls_daemon: TcpDaemon, authority: Authority) -> None:
    tls = authority.client()
    ask = ["status", "--endpoint", tls_daemon.endpoint]
    own = ["--tls-cert", str(tls.cert), "--tls-key", str(tls.key)]
    shown = CliRunner().invoke(app, [*ask, "--tls-ca", str(tls.ca), *own])
    assert shown.exit_code == 0 and "uptime" in shown.stdout
    plain = CliRunner().invoke(app, ask)
    assert plain.exit_code != 0 and "no daemon answers" in plain.stderr
    half = CliRunner().invoke(app, [*ask, "--tls-ca", str(tls.ca)])
    assert half.exit_code != 0 and "tls_cert, tls_key is missing" in half.stderr
    gone = CliRunner().invoke(app, [*ask, "--tls-ca", "/gone", *own])
    assert gone.exit_code != 0 and "TLS file /gone cannot be read" in gone.stderr


def test_a_unix_socket_needs_none(authority: Authority, namespace: Namespace) -> None:
    with pytest.raises(ValueError, match="needs no TLS"):
        ClientConfig(endpoint="unix:///run/x", client_name="x", namespace=namespace, tls=authority.client())
