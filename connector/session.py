"""One connection to one start of the daemon: handshake, session stream, heartbeats, and its end.

A session never reconnects and never maps memory; `client.py` opens the next one. All its messages are handled on the
thread that calls `open` and `serve`; a second thread only waits for the stream.
"""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from mapflow.connector.call_stream import CallStream
from mapflow.connector.client_config import ClientConfig
from mapflow.connector.messages import DeviceArena, Interest, Peers
from mapflow.connector.namespace import FORMAT_VERSION
from mapflow.connector.reasons import Reason, Unavailable, from_rpc_error
from mapflow.connector.tls import open_channel
from mapflow.v1 import cache_pb2
from mapflow.v1.cache_pb2_grpc import CacheStub

_CHANNEL_OPTIONS = (
    ("grpc.use_local_subchannel_pool", 1),  # a new channel means a new connection, with no backoff of an older one
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),  # a retry could reach another boot
    ("grpc.max_receive_message_length", 64 << 20),
)
_Message = cache_pb2.HandshakeResponse | cache_pb2.SessionResponse | Unavailable
_HEARTBEAT = cache_pb2.SessionRequest(heartbeat=cache_pb2.Heartbeat())


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the daemon allows, from its handshake."""

    session_timeout_s: float
    max_lease_s: float
    max_keys: int
    max_blob_bytes: int

    @classmethod
    def from_proto(cls, message: cache_pb2.HandshakeResponse) -> Limits:
        """Read the handshake.

        Raises:
            Unavailable: limits that no client could live with (PROTOCOL).
        """
        timeout = message.session_timeout_s
        if not (math.isfinite(timeout) and timeout > 0 and message.max_keys > 0 and len(message.boot_id) == 16):
            raise Unavailable(
                Reason.PROTOCOL,
                f"unusable handshake: session_timeout_s={timeout}, max_keys={message.max_keys}, "
                f"a boot id of {len(message.boot_id)} bytes",
            )
        return cls(
            session_timeout_s=timeout,
            max_lease_s=message.max_lease_s,
            max_keys=message.max_keys,
            max_blob_bytes=message.max_blob_bytes,
        )


class Session:
    """A session, from its handshake to its loss.

    Attributes:
        stub: for calls within this session.
        calls: for those that carry no bytes of blobs, once it is open.
        boot_id: start of the daemon that it belongs to.
        session_id: the daemon's number for it; 0 before it is open.
        limits: what the daemon allows.
        arenas: what the daemon offers to map.
        device_arena: what it offers on the client's GPU.
        alive_until: until when, in `time.monotonic()` seconds, the daemon has surely not ended it for silence.
    """

    def __init__(self, config: ClientConfig) -> None:
        """Prepare the connection; sends nothing yet.

        Raises:
            Unavailable: a TLS file cannot be read.
        """
        self._channel = open_channel(config.endpoint, config.tls, _CHANNEL_OPTIONS)
        self._deadline_s = config.connect_deadline_s
        self._opening = cache_pb2.OpenSession(client_name=config.client_name, namespace=config.namespace.to_proto())
        if config.producer is not None:
            self._opening.producer.id = config.producer.id
            self._opening.producer.model = config.producer.model
        self._device_uuid = config.device_uuid
        self._inbox: queue.SimpleQueue[_Message] = queue.SimpleQueue()
        self._outbox: queue.SimpleQueue[cache_pb2.SessionRequest | None] = queue.SimpleQueue()
        self._unanswered: deque[float] = deque()
        self._ended: Unavailable | None = None
        self._tick_s = config.call_deadline_s / 8  # so late may a call learn that its time is up
        self.stub: Any = CacheStub(self._channel)  # type: ignore[no-untyped-call]
        self.boot_id = b""
        self.session_id = 0
        self.limits = Limits(session_timeout_s=1.0, max_lease_s=0.0, max_keys=1, max_blob_bytes=0)
        self.arenas: tuple[cache_pb2.Arena, ...] = ()
        self.device_arena: DeviceArena | None = None
        self.alive_until = 0.0

    @property
    def device_arena_id(self) -> int:
        """Number of the device arena, 0 without one."""
        return 0 if self.device_arena is None else self.device_arena.arena_id

    def open(self) -> None:
        """Shake hands and open the stream.

        Raises:
            Unavailable: no daemon, no answer in time, or one that we cannot work with.
        """
        handshake = self._shake_hands()
        self.limits = Limits.from_proto(handshake)
        self.boot_id = handshake.boot_id
        self.arenas = tuple(handshake.arenas)
        for one in handshake.device_arenas:
            if self._device_uuid and one.device_uuid == self._device_uuid:
                self.device_arena = DeviceArena(one.arena_id, one.num_bytes, one.handle)
        self._opening.device_arena_id = self.device_arena_id
        sent_at = time.monotonic()
        self._outbox.put(cache_pb2.SessionRequest(open=self._opening))
        threading.Thread(target=self._receive, name="mapflow-session", daemon=True).start()
        answer = self._next(self._deadline_s)
        if isinstance(answer, Unavailable):
            raise answer
        if not isinstance(answer, cache_pb2.SessionResponse):
            raise Unavailable(Reason.DEADLINE, f"the daemon did not open a session within {self._deadline_s} s")
        if answer.WhichOneof("message") != "opened":
            raise Unavailable(Reason.PROTOCOL, f"the daemon opened a session with {answer.WhichOneof('message')!r}")
        if answer.opened.boot_id != self.boot_id:
            raise Unavailable(Reason.RESTARTED, "the daemon restarted during the handshake")
        self.session_id = answer.opened.session_id
        self.calls = CallStream(self.stub.Calls, self._calls_over)
        self.alive_until = sent_at + self.limits.session_timeout_s

    def serve(self, on_peers: Callable[[Peers], None]) -> Unavailable:
        """Send heartbeats and take messages until the session ends; returns why it ended."""
        interval = self.limits.session_timeout_s / 3
        next_beat = time.monotonic() + interval
        while True:
            now = time.monotonic()
            self.calls.expire(now)
            if now >= self.alive_until:
                return Unavailable(Reason.DEADLINE, f"no heartbeat answered in {self.limits.session_timeout_s} s")
            if now >= next_beat:
                self._unanswered.append(now)
                self._outbox.put(_HEARTBEAT)
                next_beat = now + interval
            answer = self._next(min(next_beat, self.alive_until, now + self._tick_s) - now)
            if isinstance(answer, Unavailable):
                return answer
            if not isinstance(answer, cache_pb2.SessionResponse):
                continue
            match answer.WhichOneof("message"):
                case "heartbeat" if self._unanswered:
                    self.alive_until = self._unanswered.popleft() + self.limits.session_timeout_s
                case "peers":
                    on_peers(Peers.from_proto(answer.peers))
                case _:
                    pass  # a later version may say more

    def send_interests(self, interests: Sequence[Interest]) -> None:
        """Replace what this client wants published."""
        message = cache_pb2.InterestSet(interests=[interest.to_proto() for interest in interests])
        self._outbox.put(cache_pb2.SessionRequest(interests=message))

    def failure(self, error: Exception) -> Unavailable:
        """Why a call in this session failed: its own status, or what ended the session under it."""
        if isinstance(error, grpc.RpcError):
            cancelled = error.code() is grpc.StatusCode.CANCELLED
            return self._ended if cancelled and self._ended is not None else from_rpc_error(error)
        return self._ended or Unavailable(Reason.SESSION_LOST, str(error))  # a call on a closed channel

    def end(self, why: Unavailable) -> None:
        """Let `open` or `serve` return `why`. From any thread, gRPC's own too, any number of times; never blocks."""
        self._ended = self._ended or why
        self._inbox.put(why)

    def close(self) -> None:
        """Cancel everything in flight. Waits for gRPC's threads, so never call it on one of them: they would wait."""
        self._outbox.put(None)
        if self.session_id:
            self.calls.close()
        self._channel.close()

    def _calls_over(self, error: Exception | None) -> Unavailable:
        """The stream of calls has ended, and the session with it."""
        why = self.failure(error or ConnectionError("the daemon ended the stream of calls"))
        self.end(why)
        return why

    def _shake_hands(self) -> cache_pb2.HandshakeResponse:
        request = cache_pb2.HandshakeRequest(format_versions=[FORMAT_VERSION])
        call = self.stub.Handshake.future(request, timeout=self._deadline_s)
        call.add_done_callback(self._shaken)
        answer = self._next(2 * self._deadline_s)
        if isinstance(answer, Unavailable):
            raise answer
        if not isinstance(answer, cache_pb2.HandshakeResponse):
            raise Unavailable(Reason.DEADLINE, f"the daemon did not shake hands within {self._deadline_s} s")
        return answer

    def _shaken(self, call: Any) -> None:
        try:
            self._inbox.put(call.result())
        except (grpc.RpcError, grpc.FutureCancelledError) as error:
            failure = self.failure(error)
            if failure.reason is Reason.SESSION_LOST:  # FAILED_PRECONDITION: there is no session yet
                failure = Unavailable(Reason.VERSION_SKEW, failure.detail)
            self._inbox.put(failure)

    def _next(self, timeout_s: float) -> _Message | None:
        with contextlib.suppress(queue.Empty):
            return self._inbox.get(timeout=max(0.0, timeout_s))
        return None

    def _receive(self) -> None:
        try:
            stream = self.stub.Session(self._requests())
            for response in stream:
                self._inbox.put(response)
            self._inbox.put(Unavailable(Reason.SESSION_LOST, "the daemon ended the session"))
        except (grpc.RpcError, ValueError) as error:
            self._inbox.put(self.failure(error))

    def _requests(self) -> Iterator[cache_pb2.SessionRequest]:
        while (request := self._outbox.get()) is not None:
            yield request
