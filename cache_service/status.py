"""The one place that turns refusals of the core into gRPC status codes.

An interceptor around the cache's own methods: servicers raise, this ends the call. Never decides anything else.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from inspect import isasyncgenfunction
from time import perf_counter
from typing import Any

import grpc
import structlog

from mapflow.cache_service.core.errors import CacheError, Draining, InvalidRequest, NotFound, PreconditionFailed
from mapflow.v1 import cache_pb2

_log = structlog.get_logger(__name__)

_PREFIX = f"/{cache_pb2.DESCRIPTOR.services_by_name['Cache'].full_name}/"
_CODES: dict[type[CacheError], grpc.StatusCode] = {
    InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    NotFound: grpc.StatusCode.NOT_FOUND,
    PreconditionFailed: grpc.StatusCode.FAILED_PRECONDITION,
    Draining: grpc.StatusCode.UNAVAILABLE,
}

Observer = Callable[[str, grpc.StatusCode, float], None]
"""Told of every finished call: method name, status code, seconds."""


def status_code(error: CacheError) -> grpc.StatusCode:
    """The code that stands for a refusal."""
    return _CODES[type(error)]


class StatusInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Ends calls of the cache service whose servicer raised with the right status, and reports every call."""

    def __init__(self, observe: Observer) -> None:
        self._observe = observe

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        """Wrap the handler of a cache method; leave health and reflection alone."""
        handler = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith(_PREFIX):
            return handler
        method = handler_call_details.method.removeprefix(_PREFIX)
        if handler.unary_unary or handler.stream_unary:
            inner = handler.unary_unary or handler.stream_unary

            async def unary(request: Any, context: grpc.aio.ServicerContext) -> Any:
                async with self._guard(method, context):
                    return await inner(request, context)

            make = grpc.unary_unary_rpc_method_handler if handler.unary_unary else grpc.stream_unary_rpc_method_handler
            return make(unary, handler.request_deserializer, handler.response_serializer)
        inner = handler.unary_stream or handler.stream_stream
        make = grpc.unary_stream_rpc_method_handler if handler.unary_stream else grpc.stream_stream_rpc_method_handler
        if not isasyncgenfunction(inner):  # it reads and writes by itself

            async def talk(request: Any, context: grpc.aio.ServicerContext) -> None:
                async with self._guard(method, context):
                    await inner(request, context)

            return make(talk, handler.request_deserializer, handler.response_serializer)

        async def stream(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
            async with self._guard(method, context), aclosing(inner(request, context)) as responses:
                async for response in responses:
                    yield response

        return make(stream, handler.request_deserializer, handler.response_serializer)

    @asynccontextmanager
    async def _guard(self, method: str, context: grpc.aio.ServicerContext) -> AsyncIterator[None]:
        started, code = perf_counter(), grpc.StatusCode.CANCELLED
        try:
            yield
            code = grpc.StatusCode.OK
        except CacheError as error:
            code = status_code(error)
            await context.abort(code, str(error))
        except Exception:
            code = grpc.StatusCode.INTERNAL
            _log.exception("call_failed", method=method)
            await context.abort(code, f"{method} failed; the daemon's log has the traceback")
        finally:
            self._observe(method, code, perf_counter() - started)
