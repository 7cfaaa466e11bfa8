"""What a worker on a GPU keeps from step to step to reuse maps: staging memory, head maps, the daemon's memory."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial

import torch

from mapflow.connector.plan import Mode, Plan
from mapflow.connector.vllm.device_arenas import DeviceArenas
from mapflow.connector.vllm.kernel_reuse import DevicePlans, KernelReuse
from mapflow.connector.vllm.pinned import PinnedArenas
from mapflow.connector.vllm.reuse import EntryReuse, StepReuse, reads_from
from mapflow.connector.vllm.reuse_gain import ReuseGain
from mapflow.connector.vllm.staged_maps import ReadRuns
from mapflow.connector.vllm.staging import StagingBuffer
from mapflow.connector.vllm.step_timer import StepSize, StepTimer
from mapflow.connector.vllm.transfer_model import Transfer, TransferModel
from mapflow.kernels.paged import PagedKV
from mapflow.kernels.tile_codec import TILE_DTYPE_BY_NAME
from mapflow.kernels.warm_up import Warmer

TIMED_ROWS = 1024  # of a step that is large enough to be a prefill
_GUIDE_STAGING_BYTES = 256 << 20
_TRANSLATE_STAGING_BYTES = 2 << 30  # two layers of Qwen3-8B's heads at 32k tokens and density 0.05


class GpuReuse:
    """Of one worker."""

    def __init__(
        self,
        plans: Sequence[Plan],
        device: torch.device,
        staging_bytes: int,
        *,
        arenas: PinnedArenas | None = None,
        copies: DeviceArenas | None = None,
        cost_model: bool = True,
    ) -> None:
        """staging_bytes: of GPU memory; 0 for what the plans' modes need as a rule.

        arenas: where a sender uses them too. copies: the daemon's arena on this GPU. cost_model: whether layers are
        computed whose maps would come too late, and steps that reuse makes slower.

        Raises:
            torch.OutOfMemoryError: the memory is not there.
        """
        self.arenas = arenas or PinnedArenas(device)
        self.copies = copies
        self._plans = plans
        self._device = device
        translates = any(layer.mode is Mode.TRANSLATE for plan in plans for layer in plan.layers)
        usual = _TRANSLATE_STAGING_BYTES if translates else _GUIDE_STAGING_BYTES
        self._staging = StagingBuffer(staging_bytes or usual, device)
        self._tensors = DevicePlans(device)
        self._model = TransferModel()
        self._gain = ReuseGain()
        self._timer = StepTimer(device, len(plans[0].layers) - 1)
        self._cost_model = cost_model

    def step_begins(self, num_rows: int, context: int, *, is_timed: bool) -> None:
        """Layer 0 of a step is about to be launched.

        Args:
            num_rows: of the batch.
            context: tokens of its longest request.
            is_timed: whether what it takes tells anything.
        """
        self._learn()
        is_prefill = num_rows >= TIMED_ROWS
        self._timer.begin(StepSize(num_rows=num_rows, context=context) if is_timed and is_prefill else None)

    def layer_ends(self, layer: int) -> None:
        """Its attention was launched."""
        self._timer.end(layer)

    def step(self, entries: Sequence[EntryReuse], num_rows: int, read: ReadRuns) -> StepReuse:
        """Reuse of one step whose batch has `num_rows` rows; what earlier ones took tells which maps come in time.

        A step that reuse would make slower gets none: its entries have no ranges then.
        """
        self._learn()  # layer 0 of some models is none of ours
        size = _size(entries, num_rows)
        if self._cost_model and size.plans and not self._gain.pays(size.num_rows, size.context, size.plans):
            self._timer.resize(replace(size, plans=frozenset()))
            for one in entries:
                one.ranges.clear()
                one.report.reasons["no_gain"] += 1
            return StepReuse(entries)
        self._timer.resize(size)
        return KernelReuse(
            entries,
            size=size,
            device=self._device,
            staging=self._staging,
            plans=self._tensors,
            read=read,
            late=partial(self._late, size),
        )

    def _late(self, size: StepSize, plan: Plan, wanted: Sequence[Transfer]) -> set[int]:
        if not self._cost_model:
            return set()
        saved = self._gain.saved_s(size.num_rows, size.context, size.plans) if size.plans else None
        return self._model.late(wanted, size.num_rows, size.context, begin=reads_from(plan), saved_s=saved)

    def _learn(self) -> None:
        for num_bytes, seconds, num_parts in self._staging.copies_done():
            self._model.observe_copy(num_bytes, seconds, num_parts)
        for size, seconds in self._timer.observed():
            if size.plans is not None:
                self._gain.observe(size.num_rows, size.context, size.plans, seconds)
            if size.plans != frozenset():
                self._model.observe_layers(size.num_rows, size.context, seconds)

    def warm_up(self, kv: PagedKV, num_heads: int, max_tokens: int) -> None:
        """Compile every kernel that the plans use, for one layer's cache and prompts of up to `max_tokens`."""
        for block, chunk_tokens in {(plan.block, plan.chunk_tokens) for plan in self._plans}:
            warmer = Warmer(kv=kv, num_heads=num_heads, block=block, chunk_tokens=chunk_tokens, max_tokens=max_tokens)
            warmer.warm_receiver(self._tile_dtypes())

    def close(self) -> None:
        """Let go of the daemon's memory."""
        self._staging.synchronize()
        self.arenas.close()
        if self.copies is not None:
            self.copies.close()

    def _tile_dtypes(self) -> Collection[torch.dtype]:
        return {
            TILE_DTYPE_BY_NAME[plan.tile_dtype]
            for plan in self._plans
            if any(layer.mode is Mode.TRANSLATE for layer in plan.layers)
        }


def _size(entries: Sequence[EntryReuse], num_rows: int) -> StepSize:
    reused = sum(rows.num_rows for one in entries for rows in one.reused_rows())
    return StepSize(
        num_rows=num_rows,
        context=max(one.row.row_end for one in entries),
        plans=frozenset(one.plan.name for one in entries) if reused > 0.9 * num_rows else None,
    )
