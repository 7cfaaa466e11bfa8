"""The sums that least squares needs, one set for each pair of a receiver layer and a sender layer.

For receiver head i, its own attention output is y_i = A_i V_i, and sender head l offers the feature F_il = A_l V_i:
the sender's map on the receiver's values. All that a head map min_w |y_i - sum_l w_l F_il|^2 depends on is

    gram[i, l, m] = <F_il, F_im>        moment[i, l] = <F_il, y_i>        energy[i] = <y_i, y_i>

summed over rows, channels and documents. Heads of one KV group share V, and therefore the gram matrix. Sums are
float64, so that the order of documents hardly matters. This room adds and stores; it solves nothing.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from mapflow.calibration.attention import AttentionCall


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NormalEquations:
    """Sums over documents; `add_document` and `merge` change them in place.

    Attributes:
        receiver_layers: receiver layers fitted, ascending (nR of them).
        sender_layers: sender layers that each may be mapped to, ascending (nS of them).
        gram: f64 [nR, nS, receiver KV heads, sender heads, sender heads].
        moment: f64 [nR, nS, receiver heads, sender heads].
        energy: f64 [nR, receiver heads].
    """

    receiver_layers: tuple[int, ...]
    sender_layers: tuple[int, ...]
    gram: torch.Tensor
    moment: torch.Tensor
    energy: torch.Tensor

    @classmethod
    def zeros(
        cls,
        *,
        receiver_layers: tuple[int, ...],
        sender_layers: tuple[int, ...],
        receiver_heads: int,
        receiver_kv_heads: int,
        sender_heads: int,
    ) -> NormalEquations:
        """Sums over no document."""
        pairs = (len(receiver_layers), len(sender_layers))
        return cls(
            receiver_layers=receiver_layers,
            sender_layers=sender_layers,
            gram=torch.zeros(*pairs, receiver_kv_heads, sender_heads, sender_heads, dtype=torch.float64),
            moment=torch.zeros(*pairs, receiver_heads, sender_heads, dtype=torch.float64),
            energy=torch.zeros(len(receiver_layers), receiver_heads, dtype=torch.float64),
        )

    def head_gram(self, receiver: int) -> torch.Tensor:
        """The gram matrices of every head of a fitted layer (by its position): f64 [nS, receiver heads, S, S]."""
        group = self.moment.shape[2] // self.gram.shape[2]
        return self.gram[receiver].repeat_interleave(group, dim=1)

    def merge(self, other: NormalEquations) -> None:
        """Add the sums of other documents."""
        if (self.receiver_layers, self.sender_layers) != (other.receiver_layers, other.sender_layers):
            raise ValueError("normal equations of different layers cannot be merged")
        self.gram.add_(other.gram)
        self.moment.add_(other.moment)
        self.energy.add_(other.energy)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReceiverSide:
    """What one document leaves of the receiver: small beside its maps.

    Attributes:
        values: f32 [num_tokens, nR * KV heads * head_dim], every fitted layer's values side by side.
        outputs: f32 [nR, KV heads, group, num_tokens, head_dim], its own exact attention outputs.
        rows: i64 [num_rows], ascending; the token rows that count.
    """

    values: torch.Tensor
    outputs: torch.Tensor
    rows: torch.Tensor

    @classmethod
    def from_calls(cls, values: list[torch.Tensor], outputs: list[torch.Tensor], rows: torch.Tensor) -> ReceiverSide:
        """Pack per-layer tensors.

        Args:
            values: one [KV heads, num_tokens, head_dim] a fitted layer.
            outputs: one [heads, num_tokens, head_dim] a fitted layer.
            rows: i64 [num_rows], ascending.
        """
        stacked = torch.stack([value.float() for value in values])  # [nR, KV heads, num_tokens, head_dim]
        own = torch.stack([output.float() for output in outputs])  # [nR, heads, num_tokens, head_dim]
        num_layers, kv_heads, num_tokens, head_dim = stacked.shape
        return cls(
            values=stacked.permute(2, 0, 1, 3).flatten(1).contiguous(),
            outputs=own.reshape(num_layers, kv_heads, -1, num_tokens, head_dim),
            rows=rows,
        )


def add_energy(equations: NormalEquations, receiver: ReceiverSide) -> None:
    """Add one document's energy; once a document."""
    own = receiver.outputs[:, :, :, receiver.rows].double()
    equations.energy.add_(own.square().sum((3, 4)).flatten(1).cpu())


def add_sender_layer(
    equations: NormalEquations, receiver: ReceiverSide, call: AttentionCall, *, rows_at_once: int
) -> None:
    """Add what one sender layer offers to every fitted receiver layer, for one document.

    Probabilities and features exist for `rows_at_once` rows at a time.
    """
    sender = equations.sender_layers.index(call.layer)
    num_layers, kv_heads, group, _, head_dim = receiver.outputs.shape
    size = call.num_heads
    for rows in torch.split(receiver.rows, rows_at_once):
        maps = call.probabilities(rows)  # [S, num_rows, end]
        features = maps @ receiver.values[: maps.shape[-1]]  # [S, num_rows, nR * KV heads * head_dim]
        features = features.view(size, len(rows), num_layers * kv_heads, head_dim).permute(2, 0, 1, 3).flatten(2)
        own = receiver.outputs[:, :, :, rows].flatten(3).flatten(0, 1)  # [nR * KV heads, group, num_rows * head_dim]
        gram = features @ features.transpose(1, 2)  # [nR * KV heads, S, S]
        moment = own @ features.transpose(1, 2)  # [nR * KV heads, group, S]
        equations.gram[:, sender].add_(gram.view(num_layers, kv_heads, size, size).double().cpu())
        equations.moment[:, sender].add_(moment.view(num_layers, kv_heads * group, size).double().cpu())


def save_checkpoint(path: Path, equations: NormalEquations, *, digest: str, documents_done: int) -> None:
    """Write the sums so far; the file appears whole or not at all."""
    partial = path.with_name(path.name + ".new")
    tensors = {"gram": equations.gram, "moment": equations.moment, "energy": equations.energy}
    save_file(tensors, str(partial), metadata={"digest": digest, "documents_done": str(documents_done)})
    os.replace(partial, path)


def load_checkpoint(path: Path, empty: NormalEquations, *, digest: str) -> tuple[NormalEquations, int] | None:
    """The sums of an interrupted run and the number of documents in them; None if they belong to another run."""
    try:
        with safe_open(str(path), "pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("digest") != digest:
                return None
            tensors = {name: file.get_tensor(name) for name in ("gram", "moment", "energy")}
    except (SafetensorError, OSError):
        return None
    expected = {"gram": empty.gram, "moment": empty.moment, "energy": empty.energy}
    if any(tensors[name].shape != tensor.shape for name, tensor in expected.items()):
        return None
    equations = NormalEquations(receiver_layers=empty.receiver_layers, sender_layers=empty.sender_layers, **tensors)
    return equations, int(metadata["documents_done"])
