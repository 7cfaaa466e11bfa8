"""Moving blobs: in place through mapped arenas, or as bytes over the socket where no memory is shared.

Everything here blocks, within a deadline, and works in one given session: a reservation or lease of another boot or
session never touches this one's memory.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Sequence

import grpc

from mapflow.connector.arena import Arena, ArenaSet
from mapflow.connector.call_stream import PendingCall
from mapflow.connector.messages import (
    Extent,
    Kind,
    Lease,
    NewEntry,
    PendingBlob,
    PublishReport,
    Reservation,
    ReservationState,
)
from mapflow.connector.reasons import Reason, Refused, Unavailable
from mapflow.connector.session import Session
from mapflow.v1 import cache_pb2

_PIECE_BYTES = 1 << 20  # below gRPC's default limit of 4 MiB a message
_WRITE_WITHIN_S = 10.0  # the daemon takes room back that is not committed in time; never write near that time
_BATCH_BYTES = 256 << 20  # of a Reserve, so that its room is written long before


def read(
    session: Session, arenas: ArenaSet, lease: Lease, extents: Sequence[Extent], deadline_s: float
) -> list[memoryview]:
    """Read-only views of leased extents, one each; fetches the bytes if one arena or more is not mapped.

    Raises:
        Unavailable: an extent outside its arena (PROTOCOL), or the fetch failed.
    """
    mapped = {number: arenas.get(session.boot_id, number) for number in {extent.arena_id for extent in extents}}
    views = []
    for extent in extents:
        arena = mapped[extent.arena_id]
        if arena is None:
            return _fetch(session, lease, extents, deadline_s)
        views.append(_view(arena, extent).toreadonly())
    return views


def arena_of(session: Session, arenas: ArenaSet, extents: Sequence[Extent]) -> Arena | None:
    """The mapped arena that holds all of these extents; None where they lie in several, or in one that is not mapped.

    Raises:
        Unavailable: an extent outside its arena (PROTOCOL).
    """
    numbers = {extent.arena_id for extent in extents}
    arena = arenas.get(session.boot_id, numbers.pop()) if len(numbers) == 1 else None
    if arena is not None:
        _view(arena, max(extents, key=lambda extent: extent.offset + extent.num_bytes))
    return arena


def reserve(
    session: Session, kind: Kind, producer: str, entries: Sequence[NewEntry], deadline_s: float
) -> list[Reservation]:
    """Room for blobs, one answer per entry, in order.

    Raises:
        Unavailable: no answer, or one that does not fit the question.
    """
    request = cache_pb2.ReserveRequest(
        session_id=session.session_id,
        kind=kind.value,
        producer=producer,
        entries=[entry.to_proto() for entry in entries],
    )

    def late(answer: cache_pb2.CallResponse) -> None:
        _give_back(session, [one.reservation_id for one in answer.reserve.reservations if one.reservation_id])

    response = session.calls.ask(cache_pb2.CallRequest(reserve=request), deadline_s, late).reserve
    if len(response.reservations) != len(entries):
        raise Unavailable(Reason.PROTOCOL, f"{len(response.reservations)} reservations for {len(entries)} entries")
    answers = []
    for message in response.reservations:
        try:
            state = ReservationState(message.state)
        except ValueError as error:
            raise Unavailable(Reason.PROTOCOL, f"unknown reservation state {message.state}") from error
        answers.append(
            Reservation(
                boot_id=session.boot_id,
                session_id=session.session_id,
                reservation_id=message.reservation_id,
                state=state,
                extent=Extent(message.extent.arena_id, message.extent.offset, message.extent.num_bytes),
            )
        )
    return answers


def commit(session: Session, reservations: Sequence[Reservation], deadline_s: float) -> None:
    """Publish what was written.

    Raises:
        Unavailable: no answer, or void reservations.
    """
    for reservation in reservations:
        _check_reservation(session, reservation)
    reservation_ids = [reservation.reservation_id for reservation in reservations]
    if reservation_ids:
        request = cache_pb2.CommitRequest(session_id=session.session_id, reservation_ids=reservation_ids)
        try:
            session.calls.ask(cache_pb2.CallRequest(commit=request), deadline_s)
        except Refused as error:
            gone = error.reason is Reason.SESSION_LOST  # what the daemon means by not knowing an id
            raise Unavailable(Reason.RESERVATION_EXPIRED if gone else error.reason, error.detail) from error


def abort(session: Session, reservations: Sequence[Reservation], deadline_s: float) -> None:
    """Give room back; leaves out the reservations of other boots and sessions, which are gone already.

    Raises:
        Unavailable: no answer.
    """
    mine = (session.boot_id, session.session_id)
    reservation_ids = [
        reservation.reservation_id
        for reservation in reservations
        if (reservation.boot_id, reservation.session_id) == mine and reservation.state is ReservationState.RESERVED
    ]
    if reservation_ids:
        session.calls.ask(_abort_request(session, reservation_ids), deadline_s)


def _abort_request(session: Session, reservation_ids: Sequence[int]) -> cache_pb2.CallRequest:
    request = cache_pb2.AbortRequest(session_id=session.session_id, reservation_ids=reservation_ids)
    return cache_pb2.CallRequest(abort=request)


def _give_back(session: Session, reservation_ids: Sequence[int]) -> None:
    """Abort what was reserved too late; nobody waits for the answer."""
    call = PendingCall(deadline=math.inf, answered=lambda answer, is_late: None, failed=lambda error: None)
    with contextlib.suppress(Unavailable):
        session.calls.send(_abort_request(session, reservation_ids), call)


def publish(
    session: Session, arenas: ArenaSet, kind: Kind, producer: str, blobs: Sequence[PendingBlob], deadline_s: float
) -> PublishReport:
    """Reserve, write in place and commit, in batches of the daemon's limit; store the blobs where nothing is mapped.

    Blobs over the daemon's size limit count as having found no room.

    Raises:
        Unavailable: the batch at hand was not published.
        Exception: whatever `write` raised, after the batch at hand was aborted.
    """
    fitting = [blob for blob in blobs if blob.num_bytes <= session.limits.max_blob_bytes]
    counts = dict.fromkeys(ReservationState, 0)
    counts[ReservationState.NO_ROOM] = len(blobs) - len(fitting)
    mappable = bool(session.arenas) and all(arenas.get(session.boot_id, arena.id) for arena in session.arenas)
    for part in _batches(fitting, session.limits.max_keys):
        if mappable:
            states = _publish_in_place(session, arenas, kind, producer, part, deadline_s)
        else:
            states = [_store(session, kind, producer, blob, deadline_s) for blob in part]
        for state in states:
            counts[state] += 1
    return PublishReport(
        published=counts[ReservationState.RESERVED],
        existed=counts[ReservationState.EXISTS],
        no_room=counts[ReservationState.NO_ROOM],
    )


def _batches(blobs: Sequence[PendingBlob], max_blobs: int) -> Iterator[list[PendingBlob]]:
    batch: list[PendingBlob] = []
    num_bytes = 0
    for blob in blobs:
        if batch and (len(batch) == max_blobs or num_bytes + blob.num_bytes > _BATCH_BYTES):
            yield batch
            batch, num_bytes = [], 0
        batch.append(blob)
        num_bytes += blob.num_bytes
    if batch:
        yield batch


def _publish_in_place(
    session: Session, arenas: ArenaSet, kind: Kind, producer: str, blobs: Sequence[PendingBlob], deadline_s: float
) -> list[ReservationState]:
    write_until = time.monotonic() + _WRITE_WITHIN_S
    reservations = reserve(session, kind, producer, blobs, deadline_s)
    reserved = [reservation for reservation in reservations if reservation.state is ReservationState.RESERVED]
    try:
        with contextlib.ExitStack() as views:
            written: list[tuple[PendingBlob, memoryview]] = []
            for blob, reservation in zip(blobs, reservations, strict=True):
                if reservation.state is ReservationState.RESERVED:
                    _check_reservation(session, reservation)
                    arena = arenas.get(session.boot_id, reservation.extent.arena_id)
                    if arena is None or reservation.extent.num_bytes != blob.num_bytes:
                        raise Unavailable(Reason.PROTOCOL, f"{reservation.extent} for a blob of {blob.num_bytes} bytes")
                    written.append((blob, views.enter_context(_view(arena, reservation.extent))))
            try:
                for blob, view in written:
                    blob.begin(view)
            finally:  # nothing may be under way into room that is given back
                for blob, _ in written:
                    blob.end()
            for blob, view in written:
                if time.monotonic() > write_until:
                    text = f"the blobs took more than {_WRITE_WITHIN_S} s to write"
                    raise Unavailable(Reason.RESERVATION_EXPIRED, text)
                _write(blob, view)
        commit(session, reserved, deadline_s)
    except BaseException:
        _abort_quietly(session, reserved, deadline_s)
        raise
    return [reservation.state for reservation in reservations]


def _store(session: Session, kind: Kind, producer: str, blob: PendingBlob, deadline_s: float) -> ReservationState:
    data = bytearray(blob.num_bytes)
    with memoryview(data) as view:
        blob.begin(view)
        blob.end()
        _write(blob, view)
    header = cache_pb2.StoreHeader(
        session_id=session.session_id, kind=kind.value, producer=producer, entry=blob.to_proto()
    )

    def requests() -> Iterator[cache_pb2.StoreRequest]:
        yield cache_pb2.StoreRequest(header=header)
        for start in range(0, len(data), _PIECE_BYTES):
            yield cache_pb2.StoreRequest(data=bytes(data[start : start + _PIECE_BYTES]))

    with _translated(session, Reason.SESSION_LOST):
        response: cache_pb2.StoreResponse = session.stub.Store(requests(), timeout=deadline_s)
    try:
        return ReservationState(response.state)
    except ValueError as error:
        raise Unavailable(Reason.PROTOCOL, f"unknown reservation state {response.state}") from error


def _fetch(session: Session, lease: Lease, extents: Sequence[Extent], deadline_s: float) -> list[memoryview]:
    request = cache_pb2.FetchRequest(
        session_id=lease.session_id,
        lease_id=lease.lease_id,
        extents=[
            cache_pb2.Extent(arena_id=extent.arena_id, offset=extent.offset, num_bytes=extent.num_bytes)
            for extent in extents
        ],
    )
    pieces: list[list[bytes]] = [[] for _ in extents]
    missing = [extent.num_bytes for extent in extents]
    with _translated(session, Reason.LEASE_EXPIRED):
        for response in session.stub.Fetch(request, timeout=deadline_s):
            if response.index >= len(extents) or len(response.data) > missing[response.index]:
                raise Unavailable(Reason.PROTOCOL, f"more bytes than asked for in extent {response.index}")
            pieces[response.index].append(response.data)
            missing[response.index] -= len(response.data)
    if any(missing):
        raise Unavailable(Reason.PROTOCOL, f"{sum(missing)} bytes less than asked for")
    return [memoryview(b"".join(parts)) for parts in pieces]


def _write(blob: PendingBlob, view: memoryview) -> None:
    written = blob.write(view)
    if written != blob.num_bytes:
        raise ValueError(f"a blob of {blob.num_bytes} bytes wrote {written}")


def _view(arena: Arena, extent: Extent) -> memoryview:
    try:
        return arena.view(extent)
    except ValueError as error:
        raise Unavailable(Reason.PROTOCOL, str(error)) from error


def _check_reservation(session: Session, reservation: Reservation) -> None:
    if reservation.boot_id != session.boot_id:
        raise Unavailable(Reason.RESTARTED, "the reservation belongs to an earlier start of the daemon")
    if reservation.session_id != session.session_id or time.monotonic() >= session.alive_until:
        raise Unavailable(Reason.SESSION_LOST, "the session that held the reservation is over")


def _abort_quietly(session: Session, reservations: Sequence[Reservation], deadline_s: float) -> None:
    with contextlib.suppress(Unavailable):  # the end of the session aborts them too
        abort(session, reservations, deadline_s)


@contextlib.contextmanager
def _translated(session: Session, gone: Reason) -> Iterator[None]:
    """Turn failures of a call into `Unavailable`; `gone` is what the daemon means by not knowing an id."""
    try:
        yield
    except (grpc.RpcError, ValueError) as error:  # ValueError: the channel was closed under us
        failure = session.failure(error)
        refused = isinstance(error, grpc.RpcError) and failure.reason is Reason.SESSION_LOST
        raise Unavailable(gone if refused else failure.reason, failure.detail) from error
