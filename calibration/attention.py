"""Runs a transformers model with its attention handed, layer by layer, to an object of ours.

The attention function that is registered with transformers passes each layer's queries, keys and values (after RoPE)
to an `AttentionHandler`, which returns the layer's output: exact, or under reuse. Probabilities are only ever made for
a few rows at a time; no whole map exists, and nothing is kept between layers unless the handler keeps it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from transformers import AttentionInterface, PreTrainedModel

from mapflow.calibration.config import CalibrationError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionCall:
    """One layer's attention over one document, from its first token on.

    Attributes:
        layer: the layer's number.
        query: [num_heads, num_tokens, head_dim], rotated.
        key: [num_kv_heads, num_tokens, head_dim], rotated.
        value: [num_kv_heads, num_tokens, value_dim].
        scaling: factor on the dot products.
        window: tokens that a row sees up to its own in a sliding-window layer; None: all of them.
    """

    layer: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scaling: float
    window: int | None = None

    @property
    def num_heads(self) -> int:
        """Query heads."""
        return self.query.shape[0]

    @property
    def num_tokens(self) -> int:
        """Tokens of the document."""
        return self.query.shape[1]

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.query.shape[0] // self.key.shape[0]

    def output(self) -> torch.Tensor:
        """Exact attention: [num_heads, num_tokens, value_dim]."""
        mask = None
        if self.window is not None:
            age = torch.arange(self.num_tokens, device=self.query.device)
            age = age[:, None] - age[None]  # [num_tokens, num_tokens]
            mask = (age >= 0) & (age < self.window)
        return F.scaled_dot_product_attention(
            self.query[None],
            self.key[None],
            self.value[None],
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.scaling,
            enable_gqa=self.group > 1,
        )[0]

    def probabilities(self, rows: torch.Tensor, kept: torch.Tensor | None = None) -> torch.Tensor:
        """Exact probabilities of some rows.

        Args:
            rows: i64 [num_rows], ascending token rows.
            kept: bool, broadcast to [num_heads, num_rows, last row + 1]; the softmax runs inside it. None: everything.

        Returns:
            f32 [num_heads, num_rows, last row + 1]; zero above the diagonal and outside the window.
        """
        end = int(rows[-1]) + 1
        query = self.query[:, rows].float().reshape(self.key.shape[0], self.group, len(rows), -1)
        # query: [num_kv_heads, group, num_rows, head_dim]
        scores: torch.Tensor = (query @ self.key[:, None, :end].float().transpose(-1, -2) * self.scaling).flatten(0, 1)
        age = rows[:, None] - torch.arange(end, device=rows.device)  # [num_rows, end]
        hidden = age < 0 if self.window is None else (age < 0) | (age >= self.window)
        if kept is not None:
            hidden = hidden | ~kept
        return scores.masked_fill_(hidden, -math.inf).softmax(-1)


class AttentionHandler(Protocol):
    """Takes every attention call of one forward pass, first layer first."""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """The layer's output, [num_heads, num_tokens, value_dim], in the call's dtype."""


class ObservedModel:
    """A model whose attention goes to a handler, given anew for each document."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Point the model's attention at a function of this object; the model belongs to this object from now on.

        Raises:
            CalibrationError: the model's code doesn't use transformers' attention registry.
        """
        self._model = model
        hook = _Hook()
        name = f"mapflow_observed_{id(hook):x}"
        AttentionInterface.register(name, hook)
        model.set_attn_implementation(name)
        if model.get_decoder().config._attn_implementation != name:
            raise CalibrationError(f"{type(model).__name__} does not take its attention from transformers' registry")
        self._hook = hook

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        device: torch.device = self._model.device
        return device

    @torch.inference_mode()
    def run(self, token_ids: list[int], handler: AttentionHandler, *, logits_from: int | None = None) -> torch.Tensor:
        """One forward pass over one document, see `run_for_gradients`, that nothing can be differentiated through."""
        return self.run_for_gradients(token_ids, handler, logits_from=logits_from)

    def run_for_gradients(
        self, token_ids: list[int], handler: AttentionHandler, *, logits_from: int | None = None
    ) -> torch.Tensor:
        """One forward pass over one document.

        Args:
            token_ids: the document.
            handler: takes the attention calls.
            logits_from: first row whose logits are wanted; None: none are computed.

        Returns:
            f32 [num_tokens - logits_from, vocab_size]; empty without `logits_from`.
        """
        ids = torch.tensor([token_ids], device=self._model.device)
        self._hook.handler = handler
        try:
            if logits_from is None:
                self._model.get_decoder()(ids, use_cache=False)
                return torch.empty(0)
            kept = len(token_ids) - logits_from
            logits: torch.Tensor = self._model(ids, use_cache=False, logits_to_keep=kept).logits
            return logits[0].float()
        finally:
            self._hook.handler = None


class _Hook:
    """What transformers' registry holds: it knows the handler of the pass under way, and no model."""

    def __init__(self) -> None:
        self.handler: AttentionHandler | None = None

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,  # [1, num_heads, num_tokens, head_dim]
        key: torch.Tensor,  # [1, num_kv_heads, num_tokens, head_dim]
        value: torch.Tensor,  # [1, num_kv_heads, num_tokens, value_dim]
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        **kwargs: Any,  # transformers passes whatever the model's attention knows
    ) -> tuple[torch.Tensor, None]:
        assert self.handler is not None, "the model runs outside ObservedModel.run"
        assert attention_mask is None, "transformers made a mask for an attention function it doesn't know"
        for name in ("softcap", "s_aux"):
            if kwargs.get(name) is not None:
                raise CalibrationError(
                    f"{type(module).__name__} alters its attention by {name}, which no map can stand for; "
                    "use another model"
                )
        layer = module.layer_idx
        assert isinstance(layer, int)
        call = AttentionCall(
            layer=layer,
            query=query[0],
            key=key[0],
            value=value[0],
            scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
            window=sliding_window if sliding_window is not None and sliding_window < query.shape[2] else None,
        )
        return self.handler.attend(call).transpose(0, 1)[None], None
