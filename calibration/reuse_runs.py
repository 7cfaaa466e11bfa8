"""One text through both models: the receiver's logits without reuse, under a plan, and under its baselines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import torch

from mapflow.calibration.attention import ObservedModel
from mapflow.calibration.reuse import LayerRecord, Recorder, ReuseAttention
from mapflow.connector.plan import LayerPlan, Mode, Plan
from mapflow.kernels.mask import mask_density, static_mask

Records = Mapping[int, LayerRecord]


class Run(StrEnum):
    """A plan, and what it is held against at its own settings."""

    PLAN = "plan"
    ORACLE = "oracle"  # guide layers take the receiver's own masses
    STATIC = "static"  # sink and local window of at least the plan's density, in all layers that reuse maps
    ONLINE = "online"  # masses that the receiver estimates itself, at each layer's density
    OTHER_TEXT = "other text"  # the sender's maps of another text


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """One text, and which of its rows reuse.

    Attributes:
        token_ids: of the whole text.
        num_rows: rows that reuse, the first ones; a multiple of the plans' block.
        logits_from: first row whose logits are wanted.
    """

    token_ids: Sequence[int]
    num_rows: int
    logits_from: int


class PairRuns:
    """Several texts through both models, each with the one before it as its other text."""

    def __init__(
        self, plans: Sequence[Plan], sender: ObservedModel, receiver: ObservedModel, texts: Sequence[Text]
    ) -> None:
        """plans: they share a block."""
        self._plans, self._sender, self._receiver, self._texts = plans, sender, receiver, texts
        self._sent: dict[int, Records] = {}

    def of(self, number: int) -> ReuseRuns:
        """Runs of a text, best asked for in ascending order."""
        self._sent = {one: sent for one, sent in self._sent.items() if one == number - 1}
        other = self._records(number - 1) if number else None
        return ReuseRuns(self._plans, self._receiver, self._texts[number], sent=self._records(number), other=other)

    def _records(self, number: int) -> Records:
        """What the sender leaves of a text."""
        if number not in self._sent:
            text = self._texts[number]
            layers = frozenset(layer for plan in self._plans for layer in plan.map_layers)
            recorder = Recorder(layers, num_rows=text.num_rows, block=self._plans[0].block)
            self._sender.run(list(text.token_ids), recorder)
            self._sent[number] = recorder.records
        return self._sent[number]


class ReuseRuns:
    """Runs of one text.

    Attributes:
        exact: f32 [num_tokens - logits_from, vocab_size], the receiver's logits without reuse.
    """

    def __init__(
        self,
        plans: Sequence[Plan],
        receiver: ObservedModel,
        text: Text,
        *,
        sent: Records,
        other: Records | None = None,
    ) -> None:
        """Run the receiver without reuse.

        sent: the sender's records of the text. other: those of another text, if there is one.
        """
        self._receiver, self._ids, self._from = receiver, list(text.token_ids), text.logits_from
        self._num_rows, self._block = text.num_rows, plans[0].block
        guided = frozenset(n for plan in plans for n, layer in enumerate(plan.layers) if layer.mode is Mode.GUIDE)
        own = Recorder(guided, num_rows=text.num_rows, block=self._block)
        self.exact = receiver.run(self._ids, own, logits_from=self._from)
        self._sent, self._own, self._other = sent, own.records, other

    def judge(self, plan: Plan) -> Iterator[tuple[Run, torch.Tensor, ReuseAttention]]:
        """What ran, its logits as `exact`, its attention, which knows densities: the plan, then its baselines.

        A plan without guide layers has no oracle; a text that is longer than the other one goes without that.
        """
        reused = ReuseAttention(plan, self._sent, num_rows=self._num_rows)
        yield Run.PLAN, *self._run(reused)
        if any(layer.mode is Mode.GUIDE for layer in plan.layers):
            oracle = ReuseAttention(plan, self._sent, num_rows=self._num_rows, own=self._own)
            yield Run.ORACLE, *self._run(oracle)
        static = static_plan(plan, self._num_rows // plan.block, mean_density(reused.densities))
        yield Run.STATIC, *self._run(ReuseAttention(static, {}, num_rows=self._num_rows))
        online = ReuseAttention(plan, {}, num_rows=self._num_rows, online=reused.densities)
        yield Run.ONLINE, *self._run(online)
        if (other := self._of_other_text()) is not None:
            yield Run.OTHER_TEXT, *self._run(ReuseAttention(plan, other, num_rows=self._num_rows))

    def time(self, plan: Plan) -> tuple[float, float]:
        """Milliseconds of attention in the layers that reuse, by the kernels on this GPU, and of full attention there.

        Raises:
            ValueError: the kernels cannot run such heads or blocks.
        """
        from mapflow.calibration.kernel_attention import KernelAttention  # needs Triton

        kernels = KernelAttention(plan, self._sent, num_rows=self._num_rows)
        self._receiver.run(self._ids, kernels)
        return sum(kernels.reuse_ms.values()), sum(kernels.full_ms.values())

    def _run(self, reuse: ReuseAttention) -> tuple[torch.Tensor, ReuseAttention]:
        return self._receiver.run(self._ids, reuse, logits_from=self._from), reuse

    def _of_other_text(self) -> Records | None:
        """Its records as far as this text goes; None if they do not."""
        size = self._num_rows // self._block
        if self._other is None or any(one.mass.shape[1] < size for one in self._other.values()):
            return None
        return {layer: replace(one, mass=one.mass[:, :size, :size]) for layer, one in self._other.items()}


def mean_density(densities: Mapping[int, float]) -> float:
    """Over layers; 1 where none reuses."""
    return sum(densities.values()) / len(densities) if densities else 1.0


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
