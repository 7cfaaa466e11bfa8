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

from mapflow.calibration.attention import ObservedModel
from mapflow.calibration.quality import kl_divergence
from mapflow.calibration.resume_log import ResumeLog
from mapflow.calibration.reuse import Recorder, ReuseAttention
from mapflow.connector.plan import LayerPlan, Mode, Plan

Candidates = Mapping[int, Sequence[LayerPlan]]
"""Layer -> what it may do."""


@dataclass(slots=True)
class Measured:
    """One layer's option.

    Attributes:
        damages: prefix KL in nats, by document.
        densities: of its mask, by document.
        densities_then: the same, expected of prompts of `context` tokens.
    """

    layer: LayerPlan
    damages: list[float] = field(default_factory=list)
    densities: list[float] = field(default_factory=list)
    densities_then: list[float] = field(default_factory=list)

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

    @property
    def density_then(self) -> float:
        """Mean of those that are expected."""
        return statistics.fmean(self.densities_then) if self.densities_then else 1.0


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
        context: int,
    ) -> None:
        """maps: any plan that has the head maps of every layer and mode. rows: at most so many of a document's last
        rows count. context: tokens of the prompts whose densities are expected.

        Only whole blocks of a document reuse; the rest of it is cut off.
        """
        self._maps, self._sender, self._receiver, self._rows = maps, sender, receiver, rows
        self._context = context
        self._documents = [list(ids[: len(ids) // maps.block * maps.block]) for ids in documents]

    @property
    def num_documents(self) -> int:
        """How many there are."""
        return len(self._documents)

    @property
    def digest(self) -> str:
        """Changes whenever a run could have another outcome."""
        facts = (self._maps.digest, repr(self._documents), str(self._rows), str(self._context))
        return hashlib.sha256("\0".join(facts).encode()).hexdigest()

    def sensitivities(
        self, candidates: Candidates, log: ResumeLog, progress: Callable[[int], None] = lambda done: None
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
                    outcome = log.get(run := _name(number, layer, one.layer))
                    if outcome is None:
                        document = document or self._document(number, every)
                        damage, reuse = document.run(with_layers(self._maps, {layer: one.layer}))
                        outcome = damage, reuse.densities[layer], reuse.densities_at(self._context)[layer]
                        log.add(run, outcome)
                    one.damages.append(outcome[0])
                    one.densities.append(outcome[1])
                    one.densities_then.append(outcome[2])
                    done += 1
                    progress(done)
        return found

    def judge(self, layers: Mapping[int, LayerPlan]) -> float:
        """Prefix KL in nats when all of these layers do what they should; mean over documents."""
        plan = with_layers(self._maps, layers)
        documents = (self._document(number, layers.values()) for number in range(self.num_documents))
        return statistics.fmean(document.run(plan)[0] for document in documents)

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

    def run(self, plan: Plan) -> tuple[float, ReuseAttention]:
        """Prefix KL of a plan, and its attention, which knows densities."""
        reuse = ReuseAttention(plan, self._records, num_rows=len(self._ids))
        log_q = self._receiver.run(self._ids, reuse, logits_from=self._from).log_softmax(-1)
        return max(0.0, float(kl_divergence(self._log_p, log_q).mean())), reuse


def _name(document: int, layer: int, option: LayerPlan) -> str:
    """Of a run in the log."""
    parts = (option.mode.value, option.sender_layer, option.top_p, option.sink_blocks, option.local_blocks)
    return " ".join(map(str, (document, layer, *parts)))


def with_layers(maps: Plan, layers: Mapping[int, LayerPlan]) -> Plan:
    """A plan in which these layers do that and all others compute, with the head maps that they need of `maps`."""
    guided = {number for number, layer in layers.items() if layer.mode is Mode.GUIDE}
    translated = {number for number, layer in layers.items() if layer.mode is Mode.TRANSLATE}
    compute = LayerPlan(mode=Mode.COMPUTE)
    return replace(
        maps,
        layers=tuple(layers.get(number, compute) for number in range(len(maps.layers))),
        head_map={number: one for number, one in maps.head_map.items() if number in guided},
        head_index={number: one for number, one in maps.head_index.items() if number in translated},
        head_weight={number: one for number, one in maps.head_weight.items() if number in translated},
    )
