"""One text through both models: the receiver's logits without reuse, under a plan, and under its baselines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from mapflow.calibration.attention import ObservedModel
from mapflow.calibration.reuse import Recorder, ReuseAttention
from mapflow.connector.plan import LayerPlan, Mode, Plan
from mapflow.kernels.mask import mask_density, static_mask


class ReuseRuns:
    """Runs of one text.

    Attributes:
        exact: f32 [num_tokens - logits_from, vocab_size], the receiver's logits without reuse.
    """

    def __init__(
        self,
        plans: Sequence[Plan],
        sender: ObservedModel,
        receiver: ObservedModel,
        token_ids: Sequence[int],
        *,
        num_rows: int,
        logits_from: int,
    ) -> None:
        """Run both models without reuse; plans share a block, of which `num_rows`, the rows that reuse, is a multiple.

        logits_from: first row whose logits are wanted.
        """
        self._receiver, self._ids, self._num_rows, self._from = receiver, list(token_ids), num_rows, logits_from
        layers = frozenset(layer for plan in plans for layer in plan.map_layers)
        sent = Recorder(layers, num_rows=num_rows, block=plans[0].block)
        sender.run(self._ids, sent)
        guided = frozenset(n for plan in plans for n, layer in enumerate(plan.layers) if layer.mode is Mode.GUIDE)
        own = Recorder(guided, num_rows=num_rows, block=plans[0].block)
        self.exact = receiver.run(self._ids, own, logits_from=logits_from)
        self._sent, self._own = sent.records, own.records

    def reused(self, plan: Plan, *, oracle: bool = False) -> tuple[torch.Tensor, float]:
        """Logits as `exact`, and the mean density of the layers that reuse.

        oracle: guide layers take the receiver's own masses in place of the sender's.
        """
        reuse = ReuseAttention(plan, self._sent, num_rows=self._num_rows, own=self._own if oracle else None)
        logits = self._receiver.run(self._ids, reuse, logits_from=self._from)
        return logits, sum(reuse.densities) / len(reuse.densities) if reuse.densities else 1.0

    def static(self, plan: Plan, density: float) -> tuple[torch.Tensor, float]:
        """As `reused`, with a static mask of at least this density in each layer that reuses."""
        return self.reused(static_plan(plan, self._num_rows // plan.block, density))


def has_oracle(plan: Plan) -> bool:
    """Whether any layer takes a mask from masses."""
    return any(layer.mode is Mode.GUIDE for layer in plan.layers)


def static_plan(plan: Plan, num_blocks: int, density: float) -> Plan:
    """The plan with a static mask in each reusing layer: the smallest window of at least the given density."""
    local = 1
    while local < num_blocks and _static_density(num_blocks, local) < density:
        local += 1
    static = LayerPlan(mode=Mode.STATIC, sink_blocks=1, local_blocks=local)
    return replace(plan, layers=tuple(static if layer.needs_map else layer for layer in plan.layers))


def _static_density(num_blocks: int, local_blocks: int) -> float:
    mask = static_mask(
        num_heads=1, first_block_row=0, num_block_rows=num_blocks, sink_blocks=1, local_blocks=local_blocks
    )
    return mask_density(mask, first_block_row=0)
