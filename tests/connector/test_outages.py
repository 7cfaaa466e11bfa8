"""The client when the daemon is missing, stopped, killed, restarted or draining: late is as bad as wrong."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest

from mapflow.connector import session
from mapflow.connector.client import Client
from mapflow.connector.client_config import ClientConfig
from mapflow.connector.events import Connected, Disconnected, Event, PeersChanged
from mapflow.connector.messages import Interest, Kind, LayerInterest, LookupResult, NewEntry, PendingBlob, Want
from mapflow.connector.namespace import Namespace
from mapflow.connector.reasons import Reason, Unavailable

from .conftest import MODEL, PRODUCER, DaemonProcess, StartClient, StartDaemon, blob_bytes, make_blobs, wait_until

pytestmark = pytest.mark.service

KEYS = [b"k" * 16]
WANT = Want(model=MODEL, layers=(0, 1))


def reason_of(future: Future[LookupResult]) -> Reason | None:
    error = future.exception(10.0)
    assert error is None or isinstance(error, Unavailable)
    return None if error is None else error.reason


def looked_up(client: Client, keys: list[bytes]) -> LookupResult:
    return client.lookup(keys, [WANT], 30.0).result(5.0)


def unlocked(events: list[Event]) -> list[Event]:
    return [event for event in events if not isinstance(event, PeersChanged)]


def test_an_unreachable_daemon_costs_nothing_and_is_found_when_it_comes(
    start_daemon: StartDaemon, start_client: StartClient, socket_folder: Path
) -> None:
    client = start_client(f"unix://{socket_folder}/mapflow.sock", wait=False)
    started_at = time.monotonic()
    future = client.lookup(KEYS, [WANT], 1.0)
    assert future.done()
    assert reason_of(future) is Reason.UNREACHABLE
    client.release([])
    client.set_interests([])
    with pytest.raises(Unavailable, match="unreachable"):
        client.publish(Kind.MAP, PRODUCER.id, [])
    assert time.monotonic() - started_at < 0.2
    assert not client.connected and client.boot_id is None
    daemon = start_daemon()
    daemon.socket_path.rename(socket_folder / "mapflow.sock")
    assert client.wait_connected(10.0)
    assert client.boot_id is not None
    assert reason_of(client.lookup(KEYS, [WANT], 1.0)) is None
    assert client.counters.get("session", Reason.UNREACHABLE) >= 1


def test_a_tcp_port_that_nobody_answers(start_client: StartClient) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = start_client(f"127.0.0.1:{silent.getsockname()[1]}", wait=False, connect_deadline_s=0.3)
        wait_until(lambda: client.counters.get("session", Reason.DEADLINE) >= 1)
        assert reason_of(client.lookup(KEYS, [WANT], 1.0)) is Reason.DEADLINE
        started_at = time.monotonic()
        client.close()
        assert time.monotonic() - started_at < 1.0


def test_every_call_returns_in_time_while_the_daemon_is_stopped(
    daemon: DaemonProcess, start_client: StartClient, namespace: Namespace
) -> None:
    client = start_client(daemon.endpoint, producer=PRODUCER, call_deadline_s=0.25, transfer_deadline_s=0.5)
    blobs, keys = make_blobs(namespace, 2)
    client.publish(Kind.MAP, PRODUCER.id, blobs)
    result = looked_up(client, keys)
    assert result.lease is not None
    daemon.signal(signal.SIGSTOP)
    started_at = time.monotonic()
    future = client.lookup(keys, [WANT], 30.0)
    client.release([result.lease])
    assert time.monotonic() - started_at < 0.1
    assert reason_of(future) is Reason.DEADLINE
    assert 0.2 < time.monotonic() - started_at < 0.6
    started_at = time.monotonic()
    with pytest.raises(Unavailable) as caught:
        client.publish(Kind.MAP, PRODUCER.id, blobs)
    assert caught.value.reason is Reason.DEADLINE
    assert time.monotonic() - started_at < 0.5 + 0.5 + 0.4
    daemon.signal(signal.SIGCONT)
    assert looked_up(client, keys).hits[0].num_chunks == 2
    wait_until(lambda: client.counters.get("release", Reason.DEADLINE) == 1)
    assert daemon.stats().num_reservations == 0
    wait_until(lambda: daemon.stats().num_leases == 1)  # of the last look-up; that of the late one was given back


def test_a_daemon_that_stays_stopped_ends_the_session_and_is_found_again(
    start_daemon: StartDaemon, start_client: StartClient
) -> None:
    daemon = start_daemon(options=("--session-timeout", "0.9"))
    events: list[Event] = []
    client = start_client(daemon.endpoint, listener=events.append, connect_deadline_s=0.5)
    boot_id = client.boot_id
    daemon.signal(signal.SIGSTOP)
    stopped_at = time.monotonic()
    wait_until(lambda: not client.connected)
    assert time.monotonic() - stopped_at < 2.0
    future = client.lookup(KEYS, [WANT], 1.0)
    assert future.done() and reason_of(future) is Reason.DEADLINE
    daemon.signal(signal.SIGCONT)
    wait_until(lambda: client.connected)
    assert unlocked(events) == [Connected(boot_id), Disconnected(Reason.DEADLINE), Connected(boot_id)]


def test_heartbeats_keep_an_idle_session(start_daemon: StartDaemon, start_client: StartClient) -> None:
    daemon = start_daemon(options=("--session-timeout", "0.6"))
    events: list[Event] = []
    client = start_client(daemon.endpoint, listener=events.append)
    time.sleep(2.0)
    assert client.connected and len(unlocked(events)) == 1
    assert reason_of(client.lookup(KEYS, [WANT], 1.0)) is None


def test_closing_does_not_wait_for_a_stopped_daemon(daemon: DaemonProcess, start_client: StartClient) -> None:
    client = start_client(daemon.endpoint, call_deadline_s=5.0)
    daemon.signal(signal.SIGSTOP)
    future = client.lookup(KEYS, [WANT], 1.0)
    started_at = time.monotonic()
    client.close()
    client.close()
    assert time.monotonic() - started_at < 1.0
    assert reason_of(future) is not None
    assert reason_of(client.lookup(KEYS, [WANT], 1.0)) is Reason.CLOSED
    daemon.signal(signal.SIGCONT)


def test_a_restart_voids_leases_and_reservations_and_interests_are_sent_again(
    start_daemon: StartDaemon, start_client: StartClient, namespace: Namespace
) -> None:
    daemon = start_daemon()  # its sessions may be silent for 10 s: the restart falls between two heartbeats
    events: list[Event] = []
    client = start_client(daemon.endpoint, producer=PRODUCER, listener=events.append)
    interest = Interest(namespace=namespace, model=MODEL, layers=(LayerInterest(layer=1),))
    client.set_interests([interest])
    blobs, keys = make_blobs(namespace, 2)
    client.publish(Kind.MAP, PRODUCER.id, blobs)
    result = looked_up(client, keys)
    other_keys = namespace.chunk_keys(list(range(1000, 1128)))
    entry = NewEntry(key=other_keys[0], parent_key=b"", layer=0, num_bytes=100)
    (reservation,) = client.reserve(Kind.MAP, PRODUCER.id, [entry])
    old_boot, old_lease = client.boot_id, result.lease
    assert old_boot is not None and old_lease is not None
    old_view = client.read(old_lease, result.hits[0].extents[0])[0]
    old_bytes = bytes(old_view)

    daemon.restart()
    wait_until(lambda: client.boot_id not in (None, old_boot))

    assert bytes(old_view) == old_bytes  # a dead daemon's memory stays as it was for those who hold a view
    for act in (
        lambda: client.read(old_lease, result.hits[0].extents[0]),
        lambda: client.check_lease(old_lease),
        lambda: client.arena(old_boot, reservation.extent.arena_id),
        lambda: client.commit([reservation]),
    ):
        with pytest.raises(Unavailable) as caught:
            act()
        assert caught.value.reason is Reason.RESTARTED
    client.release([old_lease])
    client.abort([reservation])
    assert set(daemon.segment_path.read_bytes()) == {0}
    assert looked_up(client, keys).hits == ()
    watcher = start_client(daemon.endpoint)
    wait_until(lambda: watcher.peers.interests == (interest,) and len(watcher.peers.publishers) == 1)
    kinds = [type(event) for event in unlocked(events)]
    assert kinds == [Connected, Disconnected, Connected]
    assert client.publish(Kind.MAP, PRODUCER.id, blobs).published == 4
    assert looked_up(client, keys).hits[0].num_chunks == 2


def test_a_dead_daemons_memory_is_given_back(daemon: DaemonProcess, start_client: StartClient) -> None:
    client = start_client(daemon.endpoint)
    name = daemon.segment_path.name
    assert name in Path("/proc/self/maps").read_text()
    daemon.kill()
    wait_until(lambda: not client.connected and name not in Path("/proc/self/maps").read_text())


def test_a_write_in_progress_when_the_daemon_dies_is_not_published(
    daemon: DaemonProcess, start_client: StartClient, namespace: Namespace
) -> None:
    client = start_client(daemon.endpoint, producer=PRODUCER)
    blobs, keys = make_blobs(namespace, 1, layers=(0,), num_bytes=4096)
    boot_id = client.boot_id

    def write(view: memoryview) -> int:
        daemon.restart()
        wait_until(lambda: client.boot_id not in (None, boot_id))
        view[:] = b"x" * 4096
        return 4096

    (blob,) = blobs
    slow = type(blob)(key=blob.key, parent_key=b"", layer=0, num_bytes=4096, write=write)
    with pytest.raises(Unavailable) as caught:
        client.publish(Kind.MAP, PRODUCER.id, [slow])
    assert caught.value.reason is Reason.UNREACHABLE
    assert set(daemon.segment_path.read_bytes()) == {0}
    assert looked_up(client, keys).hits == ()


def test_a_draining_daemon_is_named(start_daemon: StartDaemon, start_client: StartClient, namespace: Namespace) -> None:
    daemon = start_daemon(options=("--drain", "20"))
    client = start_client(daemon.endpoint, producer=PRODUCER)
    blobs, keys = make_blobs(namespace, 2)
    client.publish(Kind.MAP, PRODUCER.id, blobs)
    result = looked_up(client, keys)
    assert result.lease is not None
    daemon.signal(signal.SIGTERM)
    wait_until(lambda: reason_of(client.lookup(keys, [WANT], 1.0)) is Reason.DRAINING)
    with pytest.raises(Unavailable) as caught:
        client.publish(Kind.MAP, PRODUCER.id, blobs)
    assert caught.value.reason is Reason.DRAINING
    assert len(client.read(result.lease, result.hits[0].extents[0])) == 2  # what was leased stays readable
    client.release([result.lease])
    assert daemon.wait() == 0


def test_a_daemon_that_does_not_speak_our_format_is_named(
    daemon: DaemonProcess, start_client: StartClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "FORMAT_VERSION", 999)
    client = start_client(daemon.endpoint, wait=False)
    wait_until(lambda: client.counters.get("session", Reason.VERSION_SKEW) >= 1)
    assert reason_of(client.lookup(KEYS, [WANT], 1.0)) is Reason.VERSION_SKEW


def test_an_outage_logs_a_line_and_counts_all(
    daemon: DaemonProcess, start_client: StartClient, caplog: pytest.LogCaptureFixture
) -> None:
    client = start_client(daemon.endpoint)
    daemon.kill()
    wait_until(lambda: not client.connected)
    for _ in range(100):
        client.lookup(KEYS, [WANT], 1.0)
    assert client.counters.get("lookup", Reason.UNREACHABLE) == 100
    lines = [message for message in caplog.messages if "cache lookup failed" in message]
    assert len(lines) == 1


@pytest.mark.parametrize("stopped", [False, True])
@pytest.mark.parametrize("ending", ["pass", "raise SystemExit(0)", "del client"])
def test_a_process_that_never_closes_its_client_ends_cleanly(daemon: DaemonProcess, stopped: bool, ending: str) -> None:
    script = f"""
        from mapflow.connector.client import Client
        from mapflow.connector.client_config import ClientConfig
        from mapflow.connector.messages import Want
        from mapflow.connector.namespace import Namespace

        config = ClientConfig(
            endpoint={daemon.endpoint!r}, client_name="exit", namespace=Namespace(tokenizer_fingerprint="ab")
        )
        client = Client(config)
        client.start()
        assert client.wait_connected(10.0)
        print("connected", flush=True)
        input()
        client.lookup([b"k" * 16], [Want(model="m@1", layers=(0,))], 1.0)
        {ending}
    """
    with subprocess.Popen(
        [sys.executable, "-P", "-X", "faulthandler", "-c", textwrap.dedent(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "connected\n"
            if stopped:
                daemon.signal(signal.SIGSTOP)
            ended_at = time.monotonic()
            try:
                _, errors = process.communicate("\n", timeout=20.0)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGABRT)  # faulthandler says where its threads are
                pytest.fail(f"still there after 20 s:\n{process.communicate()[1]}")
            assert (process.returncode, errors) == (0, "")
            assert time.monotonic() - ended_at < 3.0
        finally:
            process.kill()
    if stopped:
        daemon.signal(signal.SIGCONT)
    wait_until(lambda: daemon.stats().num_sessions == 0)


def test_a_forked_child_is_refused_and_leaves_the_parents_session_alone(daemon: DaemonProcess) -> None:
    script = f"""
        import os, sys
        from mapflow.connector.client import Client
        from mapflow.connector.client_config import ClientConfig
        from mapflow.connector.messages import Want
        from mapflow.connector.namespace import Namespace

        config = ClientConfig(
            endpoint={daemon.endpoint!r}, client_name="fork", namespace=Namespace(tokenizer_fingerprint="ab")
        )
        client = Client(config)
        client.start()
        assert client.wait_connected(10.0)
        look = lambda: client.lookup([b"k" * 16], [Want(model="m@1", layers=(0,))], 1.0).exception(5.0)
        child = os.fork()
        if child == 0:
            client.release([])
            client.close()
            sys.exit(7 if look() is not None else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert client.connected and look() is None, look()
    """
    done = subprocess.run([sys.executable, "-P", "-c", textwrap.dedent(script)], timeout=30, check=False)
    assert done.returncode == 0


def test_nothing_wrong_is_ever_read_while_the_daemon_comes_and_goes(
    start_daemon: StartDaemon, start_client: StartClient, namespace: Namespace
) -> None:
    daemon = start_daemon(arena="1MiB")  # so small that entries are evicted and their room is reused all the time
    sender = start_client(daemon.endpoint, producer=PRODUCER, transfer_deadline_s=0.5)
    receivers = [start_client(daemon.endpoint, map_arenas=map_arenas) for map_arenas in (True, False)]
    num_bytes, stop, counts, problems = 40_000, threading.Event(), Counter[str](), list[str]()

    def chain(number: int) -> tuple[list[PendingBlob], list[bytes]]:
        return make_blobs(replace(namespace, tenant=str(number % 7)), 3, num_bytes=num_bytes)

    def publish() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            try:
                counts["published"] += sender.publish(Kind.MAP, PRODUCER.id, chain(number)[0]).published
            except Unavailable:
                time.sleep(0.01)

    def receive(client: Client) -> None:
        number = 0
        while not stop.is_set():
            number += 1
            keys = chain(number)[1]
            try:
                result = client.lookup(keys, [WANT], 5.0).result(2.0)
                for hit in result.hits:
                    assert result.lease is not None
                    for key, row in zip(keys, hit.extents):
                        copies = [bytes(view) for view in client.read(result.lease, row)]
                        client.check_lease(result.lease)
                        if copies != [blob_bytes(key, layer, num_bytes) for layer in WANT.layers]:
                            problems.append(f"wrong bytes of chain {number}")
                        counts["read"] += 1
                if result.lease is not None:
                    client.release([result.lease])
            except Unavailable:
                counts["unavailable"] += 1
                time.sleep(0.01)
            except TimeoutError:
                problems.append("a lookup did not resolve")

    threads = [threading.Thread(target=publish), *(threading.Thread(target=receive, args=[c]) for c in receivers)]
    for thread in threads:
        thread.start()
    for _ in range(2):
        time.sleep(1.0)
        daemon.restart()
    wait_until(lambda: all(client.connected for client in (sender, *receivers)))
    before = counts["read"]
    wait_until(lambda: counts["read"] > before)
    stop.set()
    for thread in threads:
        thread.join(10.0)
        assert not thread.is_alive()
    assert problems == []
    assert counts["published"] > 0 and counts["unavailable"] > 0


def test_a_client_may_be_made_and_closed_without_starting(namespace: Namespace) -> None:
    client = Client(ClientConfig(endpoint="localhost:1", client_name="idle", namespace=namespace))
    assert reason_of(client.lookup(KEYS, [WANT], 1.0)) is Reason.UNREACHABLE
    client.close()
    client.start()
    assert not client.wait_connected(0.0)
