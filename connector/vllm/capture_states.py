"""What a capture keeps from step to step: a state for each request and layer, and what the next turn goes on from."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, Protocol, Self, TypeVar

UNFINISHED_CAPTURES = 16  # requests whose unfinished last chunk is kept for the next turn


class Copyable(Protocol):
    """A state that can go its own way."""

    def copy(self) -> Self:
        """One that shares what nobody changes."""
        ...


_S = TypeVar("_S", bound=Copyable)


class CaptureStates(Generic[_S]):
    """By request and layer; under the name of its unfinished chunk once a request has ended."""

    def __init__(self, make: Callable[[], _S]) -> None:
        """make: the state of a request that starts at nothing."""
        self._make = make
        self._layers: dict[str, dict[int, _S]] = {}
        self._names: dict[str, bytes] = {}
        self._unfinished: OrderedDict[bytes, dict[int, _S]] = OrderedDict()

    def state(self, request_id: str, layer: int, *, resume: bytes, keep: bytes) -> _S:
        """A request's state in a layer.

        resume: the name of what to start from, where this is the first time. keep: the name under which to keep it when
        the request ends. Empty for none.
        """
        if keep:
            self._names[request_id] = keep
        layers = self._layers.setdefault(request_id, {})
        if layer not in layers:
            earlier = self._unfinished.get(resume, {}).get(layer)
            layers[layer] = earlier.copy() if earlier is not None else self._make()
        return layers[layer]

    def end(self, request_id: str) -> None:
        """A request ended: keep what the next turn can go on from, drop the rest."""
        layers, name = self._layers.pop(request_id, None), self._names.pop(request_id, b"")
        if layers and name:
            self._unfinished[name] = layers
            self._unfinished.move_to_end(name)
            while len(self._unfinished) > UNFINISHED_CAPTURES:
                self._unfinished.popitem(last=False)
