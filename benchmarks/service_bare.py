"""A gRPC server that only echoes: what the messages of a look-up cost without a cache behind them.

`python service_bare.py ENDPOINT`: `grpc.aio` on uvloop, like the daemon. Every request is parsed, and answered by
the message that the daemon would answer with, made anew; once as a unary call, once on a stream.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc
import uvloop

from mapflow.v1 import cache_pb2

SERVICE = "mapflow.bench.Bare"


def response(request: cache_pb2.LookupRequest) -> cache_pb2.LookupResponse:
    """A hit on all keys of a request, in one layer, with a lease."""
    count = len(request.keys) // request.key_bytes
    extents = cache_pb2.Extents(arena_ids=[1] * count, offsets=range(0, count << 20, 1 << 20), num_bytes=[4096] * count)
    hit = cache_pb2.Hit(want=0, producer="bare/bfloat16/tp0of1", num_chunks=count, extents=extents)
    return cache_pb2.LookupResponse(hits=[hit], lease_id=request.session_id)


async def unary(request: cache_pb2.LookupRequest, context: Any) -> cache_pb2.LookupResponse:
    """One call."""
    return response(request)


async def stream(requests: AsyncIterator[cache_pb2.LookupRequest], context: Any) -> AsyncIterator[Any]:
    """Many, answered in order."""
    async for request in requests:
        yield response(request)


async def main() -> None:
    """Serve until killed."""
    server = grpc.aio.server()
    codec = {
        "request_deserializer": cache_pb2.LookupRequest.FromString,
        "response_serializer": cache_pb2.LookupResponse.SerializeToString,
    }
    methods = {
        "Unary": grpc.unary_unary_rpc_method_handler(unary, **codec),
        "Stream": grpc.stream_stream_rpc_method_handler(stream, **codec),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
    server.add_insecure_port(sys.argv[1])
    await server.start()
    print("serving", flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    uvloop.run(main())
