"""Head maps of several kinds for the translation benchmark: from sums over texts to what each receiver head reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy.optimize import nnls

from mapflow.calibration.attention import AttentionCall, ObservedModel
from mapflow.calibration.document_pass import receiver_side, sample_rows
from mapflow.calibration.head_maps import residual
from mapflow.calibration.layer_map import LayerFit, fit_layers
from mapflow.calibration.models import ModelFacts
from mapflow.calibration.normal_equations import NormalEquations, ReceiverSide, add_energy, add_sender_layer
from mapflow.calibration.reuse import LayerRecord


@dataclass(frozen=True, kw_only=True)
class Variant:
    """How heads are translated.

    Attributes:
        k: sender heads per receiver head, 0 for all.
        top_p: of the tiles that are kept.
        distinct: sender heads that a layer reads at most, 0 for any number.
        tuned: whether weights are tuned end to end.
        kind: "plain", "non-negative" weights, each head's kept tiles "renormalised" to rows of 1, or what is left out
            as block "means".
        neighbours: whether heads of the next sender layer may be taken as well.
        without_worst: layers that compute, those that harm most alone.
    """

    k: int = 1
    top_p: float = 0.9
    distinct: int = 0
    tuned: bool = False
    kind: str = "plain"
    neighbours: bool = False
    without_worst: int = 0

    @property
    def name(self) -> str:
        """For tables."""
        parts = (
            f"k {self.k or 'all'}",
            f"p {self.top_p:g}",
            f"{self.distinct} heads a layer" if self.distinct else "",
            "tuned" if self.tuned else "",
            "" if self.kind == "plain" else self.kind,
            "two sender layers" if self.neighbours else "",
            f"without the {self.without_worst} worst layers" if self.without_worst else "",
        )
        return ", ".join(filter(None, parts))


VARIANTS = (
    *(Variant(k=k) for k in (1, 2, 4, 0)),
    *(Variant(k=k, tuned=True) for k in (1, 2, 4, 0)),
    *(Variant(top_p=p) for p in (0.7, 0.8, 0.97, 1.0)),
    *(Variant(distinct=heads) for heads in (6, 4, 3, 2)),
    *(Variant(k=k, kind=kind) for k in (1, 0) for kind in ("renormalised", "means")),
    Variant(k=0, kind="non-negative"),
    *(Variant(k=k, neighbours=True) for k in (1, 2)),
    *(Variant(without_worst=3, tuned=tuned) for tuned in (False, True)),
)


@dataclass(frozen=True, kw_only=True)
class TwoLayers:
    """A sender layer and the next one as if they were one with the heads of both."""

    calls: tuple[AttentionCall, AttentionCall]

    @property
    def layer(self) -> int:
        """The first one's number."""
        return self.calls[0].layer

    @property
    def query(self) -> torch.Tensor:
        """The first one's, for its device."""
        return self.calls[0].query

    @property
    def num_heads(self) -> int:
        """Of both."""
        return sum(call.num_heads for call in self.calls)

    def probabilities(self, rows: torch.Tensor) -> torch.Tensor:
        """As `AttentionCall.probabilities`."""
        return torch.cat([call.probabilities(rows) for call in self.calls])


def joined(records: dict[int, LayerRecord]) -> dict[int, LayerRecord]:
    """Each sender layer's record together with the next one's."""
    found = {}
    for layer in sorted(records):
        if layer + 1 in records:
            both = records[layer], records[layer + 1]
            call: Any = TwoLayers(calls=(both[0].call, both[1].call))
            found[layer] = LayerRecord(call=call, mass=torch.cat([one.mass for one in both]))
    return found


class _Stream:
    """Adds each sender layer to the sums, and each with the one before it."""

    def __init__(self, single: NormalEquations, double: NormalEquations, side: ReceiverSide) -> None:
        self._single, self._double, self._side = single, double, side
        self._before: AttentionCall | None = None

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """The exact output."""
        add_sender_layer(self._single, self._side, call, rows_at_once=64)
        if self._before is not None:
            both: Any = TwoLayers(calls=(self._before, call))
            add_sender_layer(self._double, self._side, both, rows_at_once=64)
        self._before = call
        return call.output()


def sums_of(
    facts: Sequence[ModelFacts],
    sender: ObservedModel,
    receiver: ObservedModel,
    documents: Sequence[list[int]],
    *,
    first_layer: int,
    row_fraction: float,
    device: str,
) -> tuple[NormalEquations, NormalEquations]:
    """Normal equations of single sender layers, and of neighbours together. facts: of sender and receiver."""
    sender_layers = facts[0].full_layers

    def empty(layers: tuple[int, ...], heads: int) -> NormalEquations:
        return NormalEquations.zeros(
            receiver_layers=tuple(layer for layer in facts[1].full_layers if layer >= first_layer),
            sender_layers=layers,
            receiver_heads=facts[1].spec.num_heads,
            receiver_kv_heads=facts[1].spec.num_kv_heads,
            sender_heads=heads,
        )

    heads = facts[0].spec.num_heads
    single, double = empty(sender_layers, heads), empty(sender_layers[:-1], 2 * heads)
    for number, ids in enumerate(documents):
        rows = sample_rows(len(ids), row_fraction, seed=number).to(device)
        side = receiver_side(receiver, single.receiver_layers, ids, rows)
        for sums in (single, double):
            add_energy(sums, side)
        sender.run(ids, _Stream(single, double, side))
    return single, double


def best_heads(equations: NormalEquations, position: int, sender: int, count: int) -> list[int]:
    """The sender heads that, one for each receiver head, leave a layer the least error; taken one after the other."""
    gram, moment = equations.head_gram(position)[sender], equations.moment[position, sender]
    gain = moment.clamp_min(0).square() / gram.diagonal(dim1=-2, dim2=-1).clamp_min(1e-30)  # [heads, S]
    chosen: list[int] = []
    reached = torch.zeros(gain.shape[0], dtype=gain.dtype)
    for _ in range(count):
        total = torch.maximum(gain, reached[:, None]).sum(0)
        total[chosen] = -1.0
        chosen.append(int(total.argmax()))
        reached = torch.maximum(reached, gain[:, chosen[-1]])
    return chosen


def fits_of(equations: NormalEquations, variant: Variant) -> dict[int, LayerFit]:
    """Of every layer; the sender layers are those of least squares."""
    found = fit_layers(equations, heads_per_head=variant.k or None)
    for position, (layer, fit) in enumerate(found.items()):
        sender = equations.sender_layers.index(fit.sender_layer)
        gram, moment = equations.head_gram(position)[sender], equations.moment[position, sender]
        if variant.distinct:
            chosen = torch.tensor(best_heads(equations, position, sender, variant.distinct))
            weight = moment[:, chosen] / gram.diagonal(dim1=-2, dim2=-1)[:, chosen].clamp_min(1e-30)
            energy = equations.energy[position][:, None].expand_as(weight)
            best = residual(
                gram.diagonal(dim1=-2, dim2=-1)[:, chosen, None, None],
                moment[:, chosen, None],
                energy,
                weight[..., None],
            ).argmin(1, keepdim=True)
            found[layer] = replace(fit, index=chosen[best].int(), weight=weight.gather(1, best).float())
        elif variant.kind == "non-negative":
            weights = [_non_negative(*one) for one in zip(gram.numpy(), moment.numpy())]
            found[layer] = replace(fit, weight=torch.from_numpy(np.stack(weights)).float())
    return found


def _non_negative(gram: npt.NDArray[np.float64], moment: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The weights of least error that are not negative (Lawson and Hanson, 1974)."""
    root = np.linalg.cholesky(gram + 1e-6 * gram.diagonal().mean() * np.eye(len(gram)))
    weights: npt.NDArray[np.float64] = nnls(root.T, np.linalg.solve(root, moment))[0]
    return weights
