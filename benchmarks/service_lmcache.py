"""LMCache's multi-process server, asked as its vLLM connector asks it; for a virtual environment that has LMCache.

`python service_lmcache.py FOLDER` (`lmcache.txt` says what to install): starts the server, stores one prompt of 64
chunks through shared memory, and answers commands as in `service_loops.serve`. A look-up is what the connector makes of
one: LOOKUP with the prompt's tokens, and QUERY_PREFETCH_STATUS once it is acknowledged, until there is an answer; the
server hashes the tokens. What it locks is freed behind every loop. Written for LMCache 0.5.6.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from service_loops import Submit, serve

CHUNKS, CHUNK_TOKENS = 64, 256  # LMCache's own default chunk
MODEL, INSTANCE = "bench", 1
_DEADLINE_S = 10.0


class LMCache:
    """A server, and the client that its connector uses."""

    def __init__(self, folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        options = ["--host", "127.0.0.1", "--port", str(port), "--chunk-size", str(CHUNK_TOKENS), "--l1-size-gb", "1"]
        options += ["--no-l1-use-lazy", "--eviction-policy", "LRU", "--supported-transfer-mode", "auto"]
        options += ["--shm-name", f"lmcache-bench-{os.getpid()}", "--disable-observability"]
        with (folder / "lmcache-server.log").open("wb") as log:
            command = [sys.executable, "-m", "lmcache.v1.multiprocess.server", *options]
            self._server = subprocess.Popen(command, stdout=log, stderr=log)
        import zmq
        from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey, RegisterEngineDrivenContextPayload
        from lmcache.v1.multiprocess.transport.factory import RequestClientFactory

        self._key_type = IPCCacheServerKey
        self._client: Any = RequestClientFactory.create(f"tcp://127.0.0.1:{port}", context=zmq.Context())
        self._wait_ready()
        self._client.register_kv_cache_engine_driven_context(
            RegisterEngineDrivenContextPayload(
                instance_id=INSTANCE,
                model_name=MODEL,
                world_size=1,
                block_size=16,
                num_layers=1,
                hidden_dim_size=64,
                dtype_str="bfloat16",
                use_mla=False,
            )
        ).result(_DEADLINE_S)
        self._pool = ThreadPoolExecutor(32)
        self._tokens = tuple(range(CHUNKS * CHUNK_TOKENS))
        self._sent = 0
        self._held: list[Any] = []
        self._store(self._tokens)

    def operations(self) -> dict[str, Submit]:
        """Look-ups of a prompt that is there, and stores of prompts of one chunk that are not."""
        return {"lookup 64": lambda number: self._run(self._lookup), "reserve and commit": self._store_one}

    def release(self) -> None:
        """Free what look-ups locked."""
        held, self._held = self._held, []
        for key in held:
            self._client.free_lookup_locks(key, 1).result(_DEADLINE_S)
            self._client.end_session(key.request_id).result(_DEADLINE_S)

    def stop(self) -> None:
        """End the server."""
        self._server.terminate()
        try:
            self._server.wait(5.0)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()

    def _run(self, call: Any, *arguments: Any) -> Future[Any]:
        return self._pool.submit(call, *arguments)

    def _key(self, tokens: tuple[int, ...], worker: int | None) -> Any:
        self._sent += 1
        return self._key_type(
            model_name=MODEL,
            world_size=1,
            worker_id=worker,
            token_ids=tokens,
            start=0,
            end=len(tokens),
            request_id=f"request-{self._sent}",
            num_kv_readers=1,
        )

    def _lookup(self) -> None:
        key = self._key(self._tokens, None)
        self._client.lookup(key, 1).result(_DEADLINE_S)
        while (found := self._client.query_prefetch_status(key.request_id).result(_DEADLINE_S)) is None:
            pass
        self._held.append(key)
        if found != CHUNKS:
            raise RuntimeError(f"found {found} of {CHUNKS} chunks")

    def _store(self, tokens: tuple[int, ...]) -> None:
        key = self._key(tokens, 0)
        self._client.prepare_store(key, INSTANCE).result(_DEADLINE_S)
        if not self._client.commit_store(key, INSTANCE, b"").result(_DEADLINE_S):
            raise RuntimeError("the server did not store")

    def _store_one(self, number: int) -> Future[Any]:
        first = 1_000_000 + self._sent
        return self._run(self._store, tuple(range(first, first + CHUNK_TOKENS)))

    def _wait_ready(self) -> None:
        end = time.monotonic() + 60.0
        while True:
            try:
                self._client.ping(None).result(1.0)
                return
            except TimeoutError:
                if time.monotonic() > end or self._server.poll() is not None:
                    raise RuntimeError("LMCache's server did not start; see lmcache-server.log") from None


def main() -> None:
    """Start, and answer commands."""
    one = LMCache(Path(sys.argv[1]))
    try:
        serve(one.operations(), one.release)
    finally:
        one.stop()


if __name__ == "__main__":
    main()
