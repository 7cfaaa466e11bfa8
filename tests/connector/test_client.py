"""The client against a real daemon: publishing, looking up, reading, and what other clients see of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mapflow.connector.client import Client
from mapflow.connector.events import Connected, Disconnected, Event, PeersChanged
from mapflow.connector.messages import (
    Interest,
    Kind,
    LayerInterest,
    LookupResult,
    NewEntry,
    Publisher,
    PublishReport,
    ReservationState,
    Want,
)
from mapflow.connector.namespace import Namespace
from mapflow.connector.reasons import Reason, Unavailable

from .conftest import MODEL, PRODUCER, DaemonProcess, StartClient, StartDaemon, blob_bytes, make_blobs, wait_until

pytestmark = pytest.mark.service

WANT = Want(model=MODEL, layers=(0, 1))


def lookup(client: Client, keys: list[bytes], lease_s: float = 30.0, want: Want = WANT) -> LookupResult:
    return client.lookup(keys, [want], lease_s).result(5.0)


def read_all(client: Client, result: LookupResult) -> list[list[bytes]]:
    assert result.lease is not None
    return [[bytes(view) for view in client.read(result.lease, row)] for row in result.hits[0].extents]


def expected(keys: list[bytes], num_bytes: int = 1000) -> list[list[bytes]]:
    return [[blob_bytes(key, layer, num_bytes) for layer in WANT.layers] for key in keys]


@pytest.mark.parametrize("map_arenas", [True, False])
def test_what_one_client_publishes_another_reads(
    daemon: DaemonProcess, start_client: StartClient, namespace: Namespace, map_arenas: bool
) -> None:
    sender = start_client(daemon.endpoint, producer=PRODUCER, map_arenas=map_arenas)
    receiver = start_client(daemon.endpoint, map_arenas=map_arenas)
    blobs, keys = make_blobs(namespace, 3)
    assert lookup(receiver, keys).hits == ()
    assert sender.publish(Kind.MAP, PRODUCER.id, blobs) == PublishReport(published=6)
    result = lookup(receiver, keys)
    assert result.lease is not None and result.boot_id == receiver.boot_id
    (hit,) = result.hits
    assert (hit.want, hit.producer, hit.num_chunks) == (0, PRODUCER.id, 3)
    assert read_all(receiver, result) == expected(keys)
    receiver.check_lease(result.lease)
    assert sender.publish(Kind.MAP, PRODUCER.id, blobs) == PublishReport(existed=6)


def test_blobs_of_many_messages_survive_store_and_fetch(
    daemon: DaemonProcess, start_client: StartClient, namespace: Namespace
) -> None:
    client = start_client(daemon.endpoint, producer=PRODUCER, map_arenas=False)
    blobs, keys = make_blobs(namespace, 2, num_bytes=(5 << 20) + 3)
    assert client.publish(Kind.MAP, PRODUCER.id, blobs).published == 4
    assert read_all(client, lookup(client, keys)) == expected(keys, (5 << 20) + 3)


def test_a_segment_that_cannot_be_mapped_falls_back_to_store_and_fetch(
    daemon: DaemonProcess, start_client: StartClient, namespace: Namespace
) -> None:
    path = daemon.segment_path
    hidden = path.rename(path.with_name(f"hidden-{path.name}"))
    client = start_client(daemon.endpoint, producer=PRODUCER)
    hidden.rename(path)
    assert client.counters.get("map", Reason.NO_SHARED_MEMORY) == 1
    blobs, keys = make_blobs(namespace, 2)
    assert client.publish(Kind.MAP, PRODUCER.id, blobs).published == 4
    result = lookup(client, keys)
    assert read_all(client, result) == expected(keys)
    with pytest.raises(Unavailable) as caught:
        client.arena(result.boot_id, result.hits[0].extents[0][0].arena_id)
    assert caught.value.reason is Reason.NO_SHARED_MEMORY


def test_views_are_read_only_and_in_place(
    daemon: DaemonProcess, start_client: StartClient, namespace: Namespace
) -> None:
    client = start_client(daemon.endpoint, producer=PRODUCER)
    blobs, keys = make_blobs(namespace, 1)
    client.publish(Kind.MAP, PRODUCER.id, blobs)
    result = lookup(client, keys)
    assert result.lease is not None
    extent = result.hits[0].extents[0][0]
    (view,) = client.read(result.lease, [extent])
    assert view.readonly
    client.arena(result.boot_id, extent.arena_id).view(extent)[:4] = b"!!!!"
    assert bytes(view[:4]) == b"!!!!"


def test_a_run_ends_at_the_first_gap(daemon: DaemonProcess, start_client: StartClient, namespace: Namespace) -> None:
    client = start_client(daemon.endpoint, producer=PRODUCER)
    blobs, keys = make_blobs(namespace, 4)
    client.publish(Kind.MAP, PRODUCER.id, blobs[:5])  # of chunk 2 only layer 0
    assert lookup(client, keys).hits[0].num_chunks == 2
    assert lookup(client, keys, want=replace(WANT, layers=(0,))).hits[0].num_chunks == 3
    assert lookup(client, keys[1:]).hits[0].num_chunks == 1
    assert lookup(client, keys[3:]).hits == ()
    assert lookup(client, keys, want=replace(WANT, model="other@1")).hits == ()


def test_a_look_takes_no_lease(daemon: DaemonProcess, start_client: StartClient, namespace: Namespace) -> None:
    client = start_client(daemon.endpoint, producer=PRODUCER)
    blobs, keys = make_blobs(namespace, 2)
    client.publish(Kind.MAP, PRODUCER.id, blobs)
    result = lookup(client, keys, lease_s=0.0)
    assert (result.lease, result.hits[0].num_chunks, result.hits[0].extents) == (None, 2, ())
    assert daemon.stats().num_leases == 0


def test_leases_end_with_release_and_with_close(
    daemon: DaemonProcess, start_client: StartClient, namespace: Namespace
) -> None:
    client = start_client(daemon.endpoint, producer=PRODUCER)
    blobs, keys = make_blobs(namespace, 2)
    client.publish(Kind.MAP, PRODUCER.id, blobs)
    results = [lookup(client, keys) for _ in range(3)]
    assert daemon.stats().num_leases == 3
    client.release([result.lease for result in results[:2] if result.lease])
    wait_until(lambda: daemon.stats().num_leases == 1)
    client.close()
    wait_until(lambda: daemon.stats().num_leases == 0)
    assert daemon.stats().num_sessions == 0


def test_a_cancelled_lookup_gives_its_lease_back(
    daemon: DaemonProcess, start_client: StartClient, namespace: Namespace
) -> None:
    client = start_client(daemon.endpoint, producer=PRODUCER)
    blobs, keys = make_blobs(namespace, 2)
    client.publish(Kind.MAP, PRODUCER.id, blobs)
    before = daemon.stats().lookup_chunks
    assert client.lookup(keys, [WANT], 30.0).cancel()
    wait_until(lambda: daemon.stats().lookup_chunks == before + 2 and daemon.stats().num_leases == 0)


def test_an_expired_lease_is_refused_before_reading(
    daemon: DaemonProcess, start_client: StartClient, namespace: Namespace
) -> None:
    client = start_client(daemon.endpoint, producer=PRODUCER)
    blobs, keys = make_blobs(namespace, 1)
    client.publish(Kind.MAP, PRODUCER.id, blobs)
    result = lookup(client, keys, lease_s=0.2)
    lease = result.lease
    assert lease is not None
    with pytest.raises(Unavailable) as caught:
        wait_until(lambda: client.check_lease(lease) is not None)  # type: ignore[func-returns-value]
    assert caught.value.reason is Reason.LEASE_EXPIRED
    with pytest.raises(Unavailable) as caught:
        client.read(lease, result.hits[0].extents[0])
    assert caught.value.reason is Reason.LEASE_EXPIRED
    assert client.counters.get("read", Reason.LEASE_EXPIRED) == 1


@pytest.mark.parametrize("map_arenas", [True, False])
def test_a_worker_reads_under_the_schedulers_lease(
    daemon: DaemonProcess, start_client: StartClient, namespace: Namespace, map_arenas: bool
) -> None:
    scheduler = start_client(daemon.endpoint, producer=PRODUCER)
    worker = start_client(daemon.endpoint, map_arenas=map_arenas)
    blobs, keys = make_blobs(namespace, 2)
    scheduler.publish(Kind.MAP, PRODUCER.id, blobs)
    assert read_all(worker, lookup(scheduler, keys)) == expected(keys)


def test_fetching_after_release_is_refused_by_the_daemon(
    daemon: DaemonProcess, start_client: StartClient, namespace: Namespace
) -> None:
    client = start_client(daemon.endpoint, producer=PRODUCER, map_arenas=False)
    blobs, keys = make_blobs(namespace, 1)
    client.publish(Kind.MAP, PRODUCER.id, blobs)
    result = lookup(client, keys)
    assert result.lease is not None
    client.release([result.lease])
    wait_until(lambda: daemon.stats().num_leases == 0)
    with pytest.raises(Unavailable) as caught:
        client.read(result.lease, result.hits[0].extents[0])
    assert caught.value.reason is Reason.LEASE_EXPIRED


@pytest.mark.parametrize("map_arenas", [True, False])
def test_a_failing_write_publishes_nothing_and_leaves_no_reservation(
    daemon: DaemonProcess, start_client: StartClient, namespace: Namespace, map_arenas: bool
) -> None:
    client = start_client(daemon.endpoint, producer=PRODUCER, map_arenas=map_arenas)
    blobs, keys = make_blobs(namespace, 1)

    def fail(view: memoryview) -> int:
        raise RuntimeError("the disk is on fire")

    with pytest.raises(RuntimeError, match="on fire"):
        client.publish(Kind.MAP, PRODUCER.id, [replace(blobs[0], write=fail), blobs[1]])
    with pytest.raises(ValueError, match="a blob of 1000 bytes wrote 999"):
        client.publish(Kind.MAP, PRODUCER.id, [replace(blobs[0], write=lambda view: 999), blobs[1]])
    assert daemon.stats().num_reservations == 0
    assert lookup(client, keys).hits == ()
    assert client.publish(Kind.MAP, PRODUCER.id, blobs).published == 2


def test_blobs_that_do_not_fit_find_no_room(
    daemon: DaemonProcess, start_client: StartClient, namespace: Namespace
) -> None:
    client = start_client(daemon.endpoint, producer=PRODUCER)
    blobs, _ = make_blobs(namespace, 2, layers=(0,))
    too_large = replace(blobs[1], num_bytes=65 << 20)
    assert client.publish(Kind.MAP, PRODUCER.id, [blobs[0], too_large]) == PublishReport(published=1, no_room=1)


def test_reserve_commit_and_abort_by_hand(
    daemon: DaemonProcess, start_client: StartClient, namespace: Namespace
) -> None:
    client = start_client(daemon.endpoint, producer=PRODUCER)
    keys = namespace.chunk_keys(list(range(256)))
    entries = [NewEntry(key=keys[0], parent_key=b"", layer=layer, num_bytes=100) for layer in (0, 1)]
    first, second = client.reserve(Kind.MAP, PRODUCER.id, entries)
    assert first.state is second.state is ReservationState.RESERVED
    (again,) = client.reserve(Kind.MAP, PRODUCER.id, entries[:1])
    assert again.state is ReservationState.EXISTS
    client.arena(first.boot_id, first.extent.arena_id).view(first.extent)[:] = b"x" * 100
    client.commit([first])
    client.abort([second])
    assert daemon.stats().num_reservations == 0
    result = lookup(client, keys, want=replace(WANT, layers=(0,)))
    assert result.lease is not None
    assert bytes(client.read(result.lease, result.hits[0].extents[0])[0]) == b"x" * 100
    with pytest.raises(Unavailable) as caught:
        client.commit([second])
    assert caught.value.reason is Reason.RESERVATION_EXPIRED


def test_another_producers_name_is_refused(
    daemon: DaemonProcess, start_client: StartClient, namespace: Namespace
) -> None:
    client = start_client(daemon.endpoint, producer=PRODUCER)
    blobs, _ = make_blobs(namespace, 1)
    with pytest.raises(Unavailable) as caught:
        client.publish(Kind.MAP, "somebody@else/float32/tp0of1", blobs)
    assert caught.value.reason is Reason.PROTOCOL
    assert client.connected


@pytest.mark.parametrize("keys", [[], [b"short"], [b"k" * 32], [b"k" * 15, b"k" * 17], [b"k" * 16, b"k" * 16]])
def test_lookups_that_make_no_sense_fail_in_their_future(
    daemon: DaemonProcess, start_client: StartClient, keys: list[bytes]
) -> None:
    client = start_client(daemon.endpoint)
    error = client.lookup(keys, [WANT], 1.0).exception(5.0)
    assert isinstance(error, Unavailable) and error.reason is Reason.PROTOCOL
    bad_layer = client.lookup([b"k" * 16], [replace(WANT, layers=(-1,))], 1.0).exception(5.0)
    assert isinstance(bad_layer, Unavailable) and bad_layer.reason is Reason.PROTOCOL
    assert client.connected


def test_lookups_are_cut_to_the_daemons_limit(
    start_daemon: StartDaemon, start_client: StartClient, namespace: Namespace
) -> None:
    daemon = start_daemon(options=("--max-keys", "3", "--max-lease", "5"))
    client = start_client(daemon.endpoint, producer=PRODUCER)
    blobs, keys = make_blobs(namespace, 5)
    assert client.publish(Kind.MAP, PRODUCER.id, blobs).published == 10
    result = lookup(client, keys, lease_s=1000.0)
    assert result.hits[0].num_chunks == 3
    assert read_all(client, result) == expected(keys[:3])


def test_peers_see_each_other(daemon: DaemonProcess, start_client: StartClient, namespace: Namespace) -> None:
    events: list[Event] = []
    sender = start_client(daemon.endpoint, producer=PRODUCER, listener=events.append)
    interest = Interest(namespace=namespace, model=MODEL, layers=(LayerInterest(layer=1, heads=(0, 3)),))
    receiver = start_client(daemon.endpoint)
    receiver.set_interests([interest])
    wait_until(lambda: sender.peers.interests == (interest,))
    publisher = Publisher(producer=PRODUCER, namespace=namespace)
    wait_until(lambda: receiver.peers.publishers == (publisher,))
    receiver.set_interests([])
    wait_until(lambda: sender.peers.interests == ())
    sender.close()
    wait_until(lambda: receiver.peers.publishers == ())
    assert events[0] == Connected(daemon.stats().boot_id)
    assert events[-1] == Disconnected(Reason.CLOSED)
    changes = [event.peers.interests for event in events[1:-1] if isinstance(event, PeersChanged)]
    assert changes[-1] == () and (interest,) in changes
    assert sender.peers.publishers == ()


def test_interests_set_before_the_connection_are_sent(
    daemon: DaemonProcess, start_client: StartClient, namespace: Namespace
) -> None:
    watcher = start_client(daemon.endpoint)
    interest = Interest(namespace=namespace, model=MODEL, layers=(LayerInterest(layer=1),))
    receiver = Client(replace(watcher.config, client_name="early"))
    receiver.set_interests([interest])
    receiver.start()
    wait_until(lambda: watcher.peers.interests == (interest,))
    receiver.close()
    wait_until(lambda: watcher.peers.interests == ())


def test_a_listener_that_fails_harms_nothing(
    daemon: DaemonProcess, start_client: StartClient, namespace: Namespace
) -> None:
    def listener(event: Event) -> None:
        raise RuntimeError("listener")

    client = start_client(daemon.endpoint, producer=PRODUCER, listener=listener)
    wait_until(lambda: len(client.peers.publishers) == 1)
    assert client.publish(Kind.MAP, PRODUCER.id, make_blobs(namespace, 1)[0]).published == 2
