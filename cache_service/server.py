"""The daemon put together: arenas, core, gRPC server, health, reflection, metrics; started, kept tidy, and stopped.

Starting either succeeds as a whole or raises `StartupError` with everything undone.
"""

from __future__ import annotations

import asyncio
import secrets
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import grpc
import structlog
import uvloop
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from mapflow.cache_service import logs, sockets
from mapflow.cache_service.arena import Arena, remove_stale_segments
from mapflow.cache_service.config import Config, Endpoint
from mapflow.cache_service.core.cache import Cache
from mapflow.cache_service.core.ids import TAG_BITS
from mapflow.cache_service.device_memory import CudaArenas
from mapflow.cache_service.errors import StartupError
from mapflow.cache_service.garbage import Garbage
from mapflow.cache_service.lifecycle import StopSignals
from mapflow.cache_service.metrics import Metrics
from mapflow.cache_service.promoter import DeviceMemory, Promoter
from mapflow.cache_service.servicer import CacheServicer
from mapflow.cache_service.session import SessionHub
from mapflow.cache_service.status import StatusInterceptor
from mapflow.cache_service.tls import server_credentials
from mapflow.v1 import cache_pb2, cache_pb2_grpc

_log = structlog.get_logger(__name__)

SERVICE = cache_pb2.DESCRIPTOR.services_by_name["Cache"].full_name
_STOP_GRACE_S = 1.0
_DRAIN_POLL_S = 0.02
_TIDY_S = 1.0


class CacheServer:
    """One boot of the daemon on an arena that is ready; it serves from `start` to `stop`."""

    def __init__(self, config: Config, arena: Arena, memories: Sequence[DeviceMemory] = ()) -> None:
        """Put the parts together.

        Args:
            memories: of `config.gpu_arenas`, in order; the caller's to close, after `stop`.
        """
        self._config = config
        self._clock = time.monotonic
        self._boot_id = secrets.token_bytes(16)
        boot_tag = 1 + secrets.randbelow((1 << TAG_BITS) - 1)
        self._cache = Cache(config.limits, boot_tag, self._clock())
        self._sessions = SessionHub(self._cache, self._boot_id, self._clock)
        self._metrics = Metrics(lambda: self._cache.stats(self._clock()), asyncio.get_running_loop())
        self._promoter = Promoter(self._cache, memories)
        self._health = health.aio.HealthServicer()
        self._stack = AsyncExitStack()
        self._server = grpc.aio.server(
            interceptors=[StatusInterceptor(self._metrics.observe)],
            options=[
                ("grpc.so_reuseport", 0),  # a second daemon on the same port must fail, not share it
                ("grpc.max_receive_message_length", min(self._cache.max_blob_bytes + (1 << 20), (1 << 31) - 1)),
            ],
        )
        self._servicer = CacheServicer(
            config,
            self._cache,
            arena,
            self._sessions,
            self._boot_id,
            self._clock,
            memories,
            self._promoter.kick,
            self._metrics.observe,
        )
        cache_pb2_grpc.add_CacheServicer_to_server(self._servicer, self._server)  # type: ignore[no-untyped-call]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server)

    @property
    def ended_sessions(self) -> int:
        """Sessions that have ended since the start."""
        return self._sessions.num_ended

    async def start(self) -> Endpoint:
        """Listen; returns where.

        Raises:
            StartupError: the endpoint or the metrics port is in use.
        """
        try:
            self._promoter.start()
            self._stack.push_async_callback(self._promoter.stop)
            if self._config.metrics_port:
                stop_metrics = self._metrics.serve(self._config.metrics_host, self._config.metrics_port)
                self._stack.push_async_callback(asyncio.to_thread, stop_metrics)
            credentials = server_credentials(self._config.tls) if self._config.tls is not None else None
            endpoint = sockets.bind(self._server, self._config.endpoint, credentials)
            self._stack.push_async_callback(self._server.stop, _STOP_GRACE_S)
            await self._health.set(SERVICE, health_pb2.HealthCheckResponse.SERVING)
            await self._server.start()
            sweeper = asyncio.create_task(self._sweep())
            self._stack.callback(sweeper.cancel)
        except BaseException:
            await self._stack.aclose()
            raise
        return endpoint

    async def drain(self) -> None:
        """Take no new work, and wait until nobody reads or writes, but no longer than `drain_s`."""
        await self._health.enter_graceful_shutdown()
        self._cache.drain()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._config.drain_s):
                while not self._cache.is_idle:
                    await asyncio.sleep(_DRAIN_POLL_S)
        _log.info("drained", complete=self._cache.is_idle)

    async def stop(self) -> None:
        """End every session and stop listening."""
        self._sessions.end_all()
        self._servicer.calls.end_all()
        await self._stack.aclose()

    async def _sweep(self) -> None:
        interval_s = min(1.0, self._config.session_timeout_s / 8)
        while True:
            await asyncio.sleep(interval_s)
            if silent := self._cache.expire(self._clock()):
                _log.warning("sessions_expired", session_ids=silent)
                self._sessions.end(silent)


@asynccontextmanager
async def ready_arena(config: Config, signals: StopSignals) -> AsyncIterator[Arena | None]:
    """An arena with all of its memory, removed at the end; None if a signal came while memory was being fetched.

    Raises:
        StartupError: there is not enough shared memory.
    """
    for name in remove_stale_segments():
        _log.warning("stale_segment_removed", segment_name=name)
    with Arena(config.arena_bytes) as arena:
        signals.before_exit(arena.unlink)
        pieces = arena.allocate()
        while await asyncio.to_thread(next, pieces, None) is not None:
            if signals.asked.is_set():
                yield None
                return
        yield arena


@asynccontextmanager
async def ready_memories(
    config: Config, arena: Arena, signals: StopSignals
) -> AsyncIterator[Sequence[DeviceMemory] | None]:
    """The memory of all GPU arenas, given back at the end; None if a signal came while it was being prepared.

    Raises:
        StartupError: a GPU is not there, or has too little memory.
    """
    if not config.gpu_arenas:
        yield ()
        return
    cuda = await asyncio.to_thread(CudaArenas, config.gpu_arenas)
    try:
        pieces = cuda.register(arena.address, arena.num_bytes)
        while await asyncio.to_thread(next, pieces, None) is not None:
            if signals.asked.is_set():
                yield None
                return
        yield cuda.memories
    finally:
        await asyncio.to_thread(cuda.close)


async def serve(config: Config) -> int:
    """Run the daemon until it is told to stop; returns the process's exit status.

    Raises:
        StartupError: it cannot start.
    """
    with StopSignals() as signals:
        sockets.require_free(config.endpoint)
        async with AsyncExitStack() as stack:
            arena = await stack.enter_async_context(ready_arena(config, signals))
            if arena is None:
                return 0
            memories = await stack.enter_async_context(ready_memories(config, arena, signals))
            if memories is None:
                return 0
            server = CacheServer(config, arena, memories)
            endpoint = await server.start()
            stack.push_async_callback(server.stop)
            if endpoint.path:
                signals.before_exit(lambda: Path(endpoint.path).unlink(missing_ok=True))
            tidying = asyncio.create_task(_keep_tidy(server))
            stack.callback(tidying.cancel)
            for memory in memories:
                _log.info("device_arena", device_uuid=memory.device_uuid, num_bytes=memory.num_bytes)
            _log.info("serving", endpoint=str(endpoint), segment_name=arena.segment_name, arena_bytes=arena.num_bytes)
            await signals.asked.wait()
            await server.drain()
    _log.info("stopped")
    return 0


async def _keep_tidy(server: CacheServer) -> None:
    garbage = Garbage()
    while True:
        await asyncio.sleep(_TIDY_S)
        garbage.tend(server.ended_sessions)


def run(config: Config) -> int:
    """Be the daemon: set up logs and the event loop, serve, and return the exit status (2: it could not start)."""
    logs.configure(config.log_format)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(serve(config))
    except StartupError as error:
        print(f"mapflow: {error}", file=sys.stderr)
        return 2
