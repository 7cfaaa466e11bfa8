"""The Calls stream: one call after another, without what gRPC spends on a call of its own for each.

Refusals are answers here; only what is wrong with the stream itself ends it. What a call does is the servicer's affair.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any

import grpc
import structlog

from mapflow.cache_service.core.errors import CacheError, InvalidRequest
from mapflow.cache_service.status import Observer, status_code
from mapflow.v1 import cache_pb2

_log = structlog.get_logger(__name__)


class CallStreams:
    """All Calls streams of one daemon."""

    def __init__(
        self,
        lookup: Callable[[cache_pb2.LookupRequest], cache_pb2.LookupResponse],
        reserve: Callable[[cache_pb2.ReserveRequest], cache_pb2.ReserveResponse],
        others: Mapping[str, Callable[[Any], object]],
        observe: Observer,
    ) -> None:
        """lookup, reserve, others: what answers a call; others by field of CallRequest. observe: told of each."""
        self._lookup = lookup
        self._reserve = reserve
        self._others = others
        self._observe = observe
        self._serving: set[asyncio.Task[Any]] = set()

    async def serve(self, context: Any) -> None:
        """Answer one stream until its client is through, or `end_all`."""
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        try:
            while (request := await context.read()) is not grpc.aio.EOF:
                await context.write(self._answer(request))
        finally:
            self._serving.discard(task)

    def end_all(self) -> None:
        """End every stream, because the daemon stops."""
        for task in self._serving:
            task.cancel()

    def _answer(self, request: cache_pb2.CallRequest) -> cache_pb2.CallResponse:
        started, name, code = perf_counter(), request.WhichOneof("call"), grpc.StatusCode.OK
        try:
            match name:
                case "lookup":
                    return cache_pb2.CallResponse(lookup=self._lookup(request.lookup))
                case "reserve":
                    return cache_pb2.CallResponse(reserve=self._reserve(request.reserve))
                case None:
                    raise InvalidRequest("a call must name what it calls")
                case other:
                    self._others[other](getattr(request, other))
                    return cache_pb2.CallResponse()
        except CacheError as error:
            code = status_code(error)
            return cache_pb2.CallResponse(code=code.value[0], message=str(error))
        except Exception:
            code = grpc.StatusCode.INTERNAL
            _log.exception("call_failed", method=name)
            message = f"{name} failed; the daemon's log has the traceback"
            return cache_pb2.CallResponse(code=code.value[0], message=message)
        finally:
            self._observe((name or "none").capitalize(), code, perf_counter() - started)
