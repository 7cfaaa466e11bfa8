"""A few maps to look at: what the sender saw in a text, what became of it, and what the receiver sees itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from mapflow.calibration.attention import ObservedModel
from mapflow.calibration.reuse import Recorder
from mapflow.connector.plan import Mode, Plan
from mapflow.kernels.translate_reference import dense_head_weights


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExampleMap:
    """Block masses f32 [blocks, blocks] of one receiver head over one text.

    sender: of the sender head that weighs most in it. translated: all of them, combined. own: the receiver's.
    """

    layer: int
    head: int
    sender_layer: int
    sender_head: int
    sender: npt.NDArray[np.float32]
    translated: npt.NDArray[np.float32]
    own: npt.NDArray[np.float32]


def example_maps(
    plan: Plan, sender: ObservedModel, receiver: ObservedModel, token_ids: Sequence[int], *, num_layers: int = 3
) -> list[ExampleMap]:
    """Of the layers that fitted best, worst and in between; of each the head whose own map is least like a window."""
    mapped = [number for number in plan.reusing_layers if plan.layers[number].needs_map]
    by_error = sorted(mapped, key=lambda number: plan.layers[number].error)
    places = np.linspace(0, len(by_error) - 1, min(num_layers, len(by_error))).round().astype(int)
    layers = [by_error[place] for place in places]
    ids = list(token_ids[: len(token_ids) // plan.block * plan.block])
    wanted = frozenset(one for layer in layers if (one := plan.layers[layer].sender_layer) is not None)
    sent = Recorder(wanted, num_rows=len(ids), block=plan.block)
    own = Recorder(frozenset(layers), num_rows=len(ids), block=plan.block)
    sender.run(ids, sent)
    receiver.run(ids, own)
    return [_example(plan, layer, sent, own) for layer in layers]


def _example(plan: Plan, layer: int, sent: Recorder, own: Recorder) -> ExampleMap:
    sender_layer = plan.layers[layer].sender_layer
    assert sender_layer is not None
    masses, mass = sent.records[sender_layer].mass.cpu(), own.records[layer].mass.cpu()
    weights = dense_weights(plan, layer)
    away = torch.ones(mass.shape[1:]).tril(-4)  # what neither a window of four blocks nor the first block holds
    away[:, 0] = 0.0
    head = int((mass * away).sum((1, 2)).argmax())
    sender_head = int(weights[head].abs().argmax())
    return ExampleMap(
        layer=layer,
        head=head,
        sender_layer=sender_layer,
        sender_head=sender_head,
        sender=masses[sender_head].numpy(),
        translated=torch.einsum("s,src->rc", weights[head], masses).clamp_min(0.0).numpy(),
        own=mass[head].numpy(),
    )


def dense_weights(plan: Plan, layer: int) -> torch.Tensor:
    """f32 [receiver heads, sender heads]: a layer's head map, whatever its mode."""
    if plan.layers[layer].mode is Mode.GUIDE:
        return plan.head_map[layer]
    return dense_head_weights(plan.head_index[layer], plan.head_weight[layer], plan.sender.num_heads)
