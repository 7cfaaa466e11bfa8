"""One document through both models, into the normal equations.

The receiver goes first and leaves its values and attention outputs, which are small; then the sender runs, and each
layer's maps are used block row by block row while its queries and keys exist. A sender map is thus made once, for all
receiver layers together, and never stored.
"""

from __future__ import annotations

import torch

from mapflow.calibration.attention import AttentionCall, ObservedModel
from mapflow.calibration.normal_equations import NormalEquations, ReceiverSide, add_energy, add_sender_layer


def sample_rows(num_tokens: int, fraction: float, *, seed: int) -> torch.Tensor:
    """Rows of a document that count: i64, ascending, at least one; all of them at fraction 1."""
    if fraction >= 1.0:
        return torch.arange(num_tokens)
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(num_tokens, generator=generator)[: max(1, round(fraction * num_tokens))]
    return chosen.sort().values


def receiver_side(
    receiver: ObservedModel, layers: tuple[int, ...], token_ids: list[int], rows: torch.Tensor
) -> ReceiverSide:
    """Run one document through the receiver and keep what the sums need of these layers."""
    taken = _ReceiverCapture(layers)
    receiver.run(token_ids, taken)
    return ReceiverSide.from_calls(taken.values, taken.outputs, rows)


def add_document(
    equations: NormalEquations, sender: ObservedModel, side: ReceiverSide, token_ids: list[int], *, rows_at_once: int
) -> None:
    """Run the same document through the sender and add it to the sums."""
    add_energy(equations, side)
    sender.run(token_ids, _SenderStream(equations, side, rows_at_once))


class _ReceiverCapture:
    """Keeps values and exact outputs of the fitted layers."""

    def __init__(self, layers: tuple[int, ...]) -> None:
        self._layers = frozenset(layers)
        self.values: list[torch.Tensor] = []
        self.outputs: list[torch.Tensor] = []

    def attend(self, call: AttentionCall) -> torch.Tensor:
        output = call.output()
        if call.layer in self._layers:
            self.values.append(call.value)
            self.outputs.append(output)
        return output


class _SenderStream:
    """Adds each sender layer to the sums while its queries and keys exist."""

    def __init__(self, equations: NormalEquations, receiver: ReceiverSide, rows_at_once: int) -> None:
        self._equations = equations
        self._receiver = receiver
        self._rows_at_once = rows_at_once

    def attend(self, call: AttentionCall) -> torch.Tensor:
        if call.layer in self._equations.sender_layers:
            add_sender_layer(self._equations, self._receiver, call, rows_at_once=self._rows_at_once)
        return call.output()
