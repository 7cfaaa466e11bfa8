"""The two models of a pair, ready to observe: both at once, or one at a time where memory holds no more."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from mapflow.calibration.attention import AttentionHandler, ObservedModel
from mapflow.calibration.models import ModelFacts, load_model


class PairModels:
    """Attributes: sender, receiver, each to be run as it is."""

    def __init__(
        self, sender: ModelFacts, receiver: ModelFacts, *, device: str, dtype: str, one_at_a_time: bool = False
    ) -> None:
        """Load both; with `one_at_a_time` each is loaded when it is run, and again whenever the other one was.

        Raises:
            CalibrationError: the weights cannot be loaded, or the device cannot be used; later, one at a time.
        """

        def loader(facts: ModelFacts) -> Callable[[], PreTrainedModel]:
            return lambda: load_model(facts, device=device, dtype=dtype)

        self.sender: ObservedModel
        self.receiver: ObservedModel
        if one_at_a_time:
            seat = _Seat()
            self.sender, self.receiver = (_Seated(loader(facts), seat) for facts in (sender, receiver))
        else:
            self.sender, self.receiver = (ObservedModel(loader(facts)()) for facts in (sender, receiver))

    @property
    def both(self) -> tuple[ObservedModel, ObservedModel]:
        """Sender and receiver."""
        return self.sender, self.receiver


class _Seat:
    """Room for one model."""

    def __init__(self) -> None:
        self._holder: _Seated | None = None

    def give(self, model: _Seated) -> None:
        if self._holder is not None and self._holder is not model:
            self._holder.leave()
        self._holder = model


class _Seated(ObservedModel):
    """A model that is loaded when it is run, once the other one has left."""

    def __init__(self, load: Callable[[], PreTrainedModel], seat: _Seat) -> None:
        self._load, self._seat = load, seat
        self._is_loaded = False

    @property
    def device(self) -> torch.device:
        """As the base class's; loads the model."""
        self._sit()
        return super().device

    def run_for_gradients(
        self, token_ids: list[int], handler: AttentionHandler, *, logits_from: int | None = None
    ) -> torch.Tensor:
        """As the base class's; loads the model."""
        self._sit()
        return super().run_for_gradients(token_ids, handler, logits_from=logits_from)

    def leave(self) -> None:
        """Give the memory back."""
        del self._model, self._hook
        self._is_loaded = False
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _sit(self) -> None:
        self._seat.give(self)
        if not self._is_loaded:
            with torch.inference_mode(False):
                super().__init__(self._load())
            self._is_loaded = True
