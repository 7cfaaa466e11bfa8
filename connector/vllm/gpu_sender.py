"""What a worker on a GPU keeps from step to step to publish maps: the buffer of its captures, and where they go."""

from __future__ import annotations

from collections.abc import Callable

import torch

from mapflow.connector.vllm.capture_buffer import CaptureBuffer
from mapflow.connector.vllm.engine import Engine
from mapflow.connector.vllm.facts import EngineFacts
from mapflow.connector.vllm.kernel_capture import KernelCapture
from mapflow.connector.vllm.pinned import PinnedArenas
from mapflow.connector.vllm.publisher import Publisher
from mapflow.kernels.pack import HEAD_DIMS, KERNEL_DTYPES
from mapflow.kernels.paged import PagedKV
from mapflow.kernels.tile_codec import TILE_DTYPES
from mapflow.kernels.warm_up import Warmer

_MASS_BYTES = 256 << 20
_TILE_SHARE = 32  # of the GPU's memory: twelve layers of Qwen3-8B's tiles at 16k tokens and density 0.05 on an H200


class GpuSender:
    """Of one worker that publishes."""

    def __init__(self, engine: Engine, publisher: Publisher, arenas: PinnedArenas) -> None:
        """arenas: of the daemon, which maps are copied to from their device.

        Raises:
            torch.OutOfMemoryError: there is not as much memory as the settings say, or as the sender's plans need as a
                rule; without a plan receivers may want tiles.
        """
        config, namespace = engine.config, engine.namespace
        memory = torch.cuda.get_device_properties(arenas.device).total_memory
        usual = memory // _TILE_SHARE if engine.may_want_tiles else _MASS_BYTES
        self._namespace, self._row_stride = namespace, config.row_stride
        self._client, self._arenas, self._defer = engine.client, arenas, publisher.defer
        self._buffer = CaptureBuffer(config.capture_bytes or usual, arenas.device)
        self.capture = KernelCapture(
            chunk_tokens=namespace.chunk_tokens,
            block=namespace.block,
            buffer=self._buffer,
            defer=self._with_arenas,
            counters=engine.counters,
            row_stride=config.row_stride,
        )

    @staticmethod
    def can_measure(facts: EngineFacts) -> bool:
        """Whether the kernels know the model's precision and head_dim; the references measure any."""
        return getattr(torch, facts.dtype, None) in KERNEL_DTYPES and facts.head_dim in HEAD_DIMS

    def warm_up(self, kv: PagedKV, num_heads: int, max_tokens: int) -> None:
        """Compile every kernel that anybody's interests may ask for, for one layer's cache; begin to pin the arenas."""
        sizes = {"block": self._namespace.block, "chunk_tokens": self._namespace.chunk_tokens}
        warmer = Warmer(kv=kv, num_heads=num_heads, max_tokens=max_tokens, **sizes)
        warmer.warm_sender(TILE_DTYPES, row_strides={1, self._row_stride})
        self._with_arenas(lambda: None)

    def close(self) -> None:
        """Let go of the daemon's memory, when the publisher's thread has ended."""
        self._arenas.close()

    def _with_arenas(self, job: Callable[[], None]) -> bool:
        """As `Publisher.defer`; sees to it that the daemon's memory is page-locked."""

        def run() -> None:
            for boot_id, arena in self._client.mapped_arenas():
                self._arenas.tensor(boot_id, arena)
            job()

        return self._defer(run)
