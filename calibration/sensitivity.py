"""What it does to a receiver when one layer alone reuses, for every way in which it may.

Each held-out document goes through both models once without reuse; then the receiver runs again for each layer and
option, everything else exact. The damage is the KL of the next-token distributions on the last rows that reused, where
an error has the fewest layers and rows to be averaged away.
"""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from mapflow.calibration.attention import ObservedModel
from mapflow.calibration.reuse import Recorder, ReuseAttention
from mapflow.calibration.run_log import RunLog
from mapflow.connector.plan import LayerPlan, Mode, Plan

Candidates = Mapping[int, Sequence[LayerPlan]]
"""Layer -> what it may do."""


@dataclass(slots=True)
class Measured:
    """One layer's option. damages: prefix KL in nats, by document. densities: of its mask, by document."""

    layer: LayerPlan
    damages: list[float] = field(default_factory=list)
    densities: list[float] = field(default_factory=list)

    @property
    def damage(self) -> float:
        """Mean over documents."""
        return statistics.fmean(self.damages)

    @property
    def spread(self) -> float:
        """Standard error of the mean; 0 of a single document."""
        if len(self.damages) < 2:
            return 0.0
        return statistics.stdev(self.damages) / math.sqrt(len(self.damages))

    @property
    def density(self) -> float:
        """Mean over documents; 1 where nothing is left out."""
        return statistics.fmean(self.densities) if self.densities else 1.0


class Judge:
    """Held-out documents, and the receiver's own next-token distributions on their last reused rows."""

    def __init__(
        self,
        maps: Plan,
        sender: ObservedModel,
        receiver: ObservedModel,
        documents: Sequence[Sequence[int]],
        *,
        rows: int,
    ) -> None:
        """maps: any plan that has the head maps of every layer and mode. rows: at most so many of a document's last
        rows count.

        Only whole blocks of a document reuse; the rest of it is cut off.
        """
        self._maps, self._sender, self._receiver, self._rows = maps, sender, receiver, rows
        self._documents = [list(ids[: len(ids) // maps.block * maps.block]) for ids in documents]

    @property
    def num_documents(self) -> int:
        """How many there are."""
        return len(self._documents)

    @property
    def digest(self) -> str:
        """Changes whenever a run could have another outcome."""
        facts = (self._maps.digest, repr(self._documents), str(self._rows))
        return hashlib.sha256("\0".join(facts).encode()).hexdigest()

    def sensitivities(
        self, candidates: Candidates, log: RunLog, progress: Callable[[int], None] = lambda done: None
    ) -> dict[int, list[Measured]]:
        """Every option of every layer, alone.

        log: has the runs that need not be made, and is given those that are. progress: called with the runs done.
        """
        found = {layer: [Measured(one) for one in options] for layer, options in candidates.items()}
        every = [one for options in candidates.values() for one in options]
        done = 0
        for number in range(self.num_documents):
            document: _Document | None = None
            for layer, options in found.items():
                for one in options:
                    if one.layer.mode is Mode.COMPUTE:
                        one.damages.append(0.0)
                        continue
                    outcome = log.get(number, layer, one.layer)
                    if outcome is None:
                        document = document or self._document(number, every)
                        damage, densities = document.run(self._with({layer: one.layer}))
                        outcome = damage, densities[layer]
                        log.add(number, layer, one.layer, *outcome)
                    one.damages.append(outcome[0])
                    one.densities.append(outcome[1])
                    done += 1
                    progress(done)
        return found

    def judge(self, layers: Mapping[int, LayerPlan]) -> tuple[float, dict[int, float]]:
        """Prefix KL in nats, and densities by layer, when all of these layers do what they should; means."""
        damages, densities = [], []
        for number in range(self.num_documents):
            damage, of_layers = self._document(number, layers.values()).run(self._with(layers))
            damages.append(damage)
            densities.append(of_layers)
        mean = {layer: statistics.fmean(one[layer] for one in densities) for layer in densities[0]}
        return statistics.fmean(damages), mean

    def _with(self, layers: Mapping[int, LayerPlan]) -> Plan:
        compute = LayerPlan(mode=Mode.COMPUTE)
        return with_layers(self._maps, [layers.get(number, compute) for number in range(len(self._maps.layers))])

    def _document(self, number: int, layers: Iterable[LayerPlan]) -> _Document:
        ids = self._documents[number]
        wanted = frozenset(one.sender_layer for one in layers if one.sender_layer is not None)
        recorder = Recorder(wanted, num_rows=len(ids), block=self._maps.block)
        self._sender.run(ids, recorder)
        return _Document(self._receiver, ids, recorder, max(0, len(ids) - self._rows))


class _Document:
    """One document's maps, and the receiver's distributions without reuse."""

    def __init__(self, receiver: ObservedModel, ids: list[int], recorder: Recorder, logits_from: int) -> None:
        self._receiver, self._ids, self._records, self._from = receiver, ids, recorder.records, logits_from
        exact = Recorder(frozenset(), num_rows=0, block=1)
        self._log_p = receiver.run(ids, exact, logits_from=logits_from).log_softmax(-1)

    def run(self, plan: Plan) -> tuple[float, dict[int, float]]:
        """Prefix KL and densities of a plan."""
        reuse = ReuseAttention(plan, self._records, num_rows=len(self._ids))
        log_q = self._receiver.run(self._ids, reuse, logits_from=self._from).log_softmax(-1)
        kl = torch.nn.functional.kl_div(log_q, self._log_p, reduction="none", log_target=True).sum(-1).mean()
        return max(0.0, float(kl)), reuse.densities


def with_layers(maps: Plan, layers: Sequence[LayerPlan]) -> Plan:
    """A plan of these layers, with the head maps that they need of those that `maps` has."""
    guided = {number for number, layer in enumerate(layers) if layer.mode is Mode.GUIDE}
    translated = {number for number, layer in enumerate(layers) if layer.mode is Mode.TRANSLATE}
    return replace(
        maps,
        layers=tuple(layers),
        head_map={number: one for number, one in maps.head_map.items() if number in guided},
        head_index={number: one for number, one in maps.head_index.items() if number in translated},
        head_weight={number: one for number, one in maps.head_weight.items() if number in translated},
    )
