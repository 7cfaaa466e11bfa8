"""What a worker on a GPU keeps from step to step: for reuse, staging memory, head maps and the daemon's pinned memory;
for a sender, the buffer of its captures.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from mapflow.connector.counters import Counters
from mapflow.connector.plan import Mode, Plan
from mapflow.connector.vllm.capture_buffer import CaptureBuffer
from mapflow.connector.vllm.facts import EngineFacts
from mapflow.connector.vllm.kernel_capture import Defer, KernelCapture
from mapflow.connector.vllm.kernel_reuse import DevicePlans, KernelReuse
from mapflow.connector.vllm.layer_timer import LayerTimer
from mapflow.connector.vllm.pinned import PinnedArenas
from mapflow.connector.vllm.reuse import EntryReuse
from mapflow.connector.vllm.staged_maps import ReadRuns
from mapflow.connector.vllm.staging import StagingBuffer
from mapflow.connector.vllm.transfer_model import TransferModel
from mapflow.kernels.pack import HEAD_DIMS, KERNEL_DTYPES
from mapflow.kernels.paged import PagedKV
from mapflow.kernels.tile_codec import TILE_DTYPE_BY_NAME, TILE_DTYPES
from mapflow.kernels.warm_up import Warmer

GUIDE_STAGING_BYTES = 256 << 20
TRANSLATE_STAGING_BYTES = 2 << 30  # two layers of Qwen3-8B's heads at 32k tokens and density 0.05


def staging_bytes_for(plans: Sequence[Plan]) -> int:
    """GPU memory that the plans' modes need as a rule, for maps on their way to or from the device."""
    translates = any(layer.mode is Mode.TRANSLATE for plan in plans for layer in plan.layers)
    return TRANSLATE_STAGING_BYTES if translates else GUIDE_STAGING_BYTES


class GpuSender:
    """Of one worker that publishes."""

    def __init__(
        self,
        plans: Sequence[Plan],
        device: torch.device,
        capture_bytes: int,
        *,
        chunk_tokens: int,
        block: int,
        defer: Defer,
        counters: Counters,
    ) -> None:
        """capture_bytes: of GPU memory; 0 for what the plans' modes need as a rule. defer: the publisher's.

        Raises:
            torch.OutOfMemoryError: the memory is not there.
        """
        self._chunk_tokens, self._block = chunk_tokens, block
        buffer = CaptureBuffer(capture_bytes or staging_bytes_for(plans), device)
        self.capture = KernelCapture(
            chunk_tokens=chunk_tokens, block=block, buffer=buffer, defer=defer, counters=counters
        )

    @staticmethod
    def can_measure(facts: EngineFacts) -> bool:
        """Whether the kernels know the model's precision and head_dim; the references measure any."""
        return getattr(torch, facts.dtype, None) in KERNEL_DTYPES and facts.head_dim in HEAD_DIMS

    def warm_up(self, kv: PagedKV, num_heads: int, max_tokens: int) -> None:
        """Compile every kernel that anybody's interests may ask for, for one layer's cache."""
        Warmer(
            kv=kv, num_heads=num_heads, block=self._block, chunk_tokens=self._chunk_tokens, max_tokens=max_tokens
        ).warm_sender(TILE_DTYPES)


class GpuReuse:
    """Of one worker."""

    def __init__(
        self, plans: Sequence[Plan], device: torch.device, staging_bytes: int, *, skip_late_layers: bool = True
    ) -> None:
        """staging_bytes: of GPU memory; 0 for what the plans' modes need as a rule.

        skip_late_layers: whether layers are computed whose maps would come too late.

        Raises:
            torch.OutOfMemoryError: the memory is not there.
        """
        self.arenas = PinnedArenas(device)
        self._plans = plans
        self._device = device
        self._staging = StagingBuffer(staging_bytes or staging_bytes_for(plans), device)
        self._tensors = DevicePlans(device)
        self._model = TransferModel()
        self._timer = LayerTimer(device, len(plans[0].layers))
        self._skip_late_layers = skip_late_layers

    def step(self, entries: Sequence[EntryReuse], num_rows: int, read: ReadRuns) -> KernelReuse:
        """Reuse of one step whose batch has `num_rows` rows; what earlier ones took tells which maps come in time."""
        copies, layers = self._staging.copies_done(), self._timer.observed()
        if self._skip_late_layers:
            for num_bytes, seconds in copies:
                self._model.observe_copy(num_bytes, seconds)
            for observed in layers:
                self._model.observe_layers(*observed)
        return KernelReuse(
            entries,
            num_rows=num_rows,
            device=self._device,
            staging=self._staging,
            plans=self._tensors,
            read=read,
            model=self._model,
            timer=self._timer,
        )

    def warm_up(self, kv: PagedKV, num_heads: int, max_tokens: int) -> None:
        """Compile every kernel that the plans use, for one layer's cache and prompts of up to `max_tokens`."""
        for block, chunk_tokens in {(plan.block, plan.chunk_tokens) for plan in self._plans}:
            warmer = Warmer(kv=kv, num_heads=num_heads, block=block, chunk_tokens=chunk_tokens, max_tokens=max_tokens)
            warmer.warm_receiver(self._tile_dtypes())

    def close(self) -> None:
        """Let go of the daemon's memory."""
        self._staging.synchronize()
        self.arenas.close()

    def _tile_dtypes(self) -> Collection[torch.dtype]:
        return {
            TILE_DTYPE_BY_NAME[plan.tile_dtype]
            for plan in self._plans
            if any(layer.mode is Mode.TRANSLATE for layer in plan.layers)
        }
