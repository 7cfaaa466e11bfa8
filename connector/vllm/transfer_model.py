"""Whether maps can be there in time: what copies and layers took lately, and what that means for a step to come.

Pure arithmetic on observed seconds. Maps are copied one layer after the other while the receiver computes. A layer that
would have to wait for its maps longer than they save is better computed, so it is given up before the step begins, and
those behind it come earlier. Without observations everything is expected in time: the first steps are observations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_WEIGHT = 0.25  # of a new observation in the running mean
_SLACK = 1.1  # a copy may take this much longer than was observed
_FORGIVENESS = 1.1
_SAVED = 0.1  # of a layer's time, at the least where reuse is worth anything
_MEASURABLE_BYTES = 1 << 20  # a smaller copy takes as long as its launch does, which says nothing about the link


@dataclass(frozen=True, slots=True)
class Transfer:
    """Maps that a step wants: of a sender layer, first read by receiver layer `first_use`."""

    sender_layer: int
    first_use: int
    num_bytes: int


class TransferModel:
    """Running means of one worker."""

    def __init__(self) -> None:
        self._bytes_per_s: float | None = None
        self._layer_s: dict[tuple[int, int], float] = {}

    def observe_copy(self, num_bytes: int, seconds: float, num_parts: int = 1) -> None:
        """So many copies, one behind the other, took so long; small ones tell nothing and are left out."""
        if num_bytes >= _MEASURABLE_BYTES * num_parts and seconds > 0:
            self._bytes_per_s = running_mean(self._bytes_per_s, num_bytes / seconds)

    def observe_layers(self, num_rows: int, context: int, seconds: float) -> None:
        """A layer of a step took so long on average; num_rows: of the batch, context: longest prompt so far in it."""
        if num_rows > 0 and seconds > 0:
            kind = _kind(num_rows, context)
            self._layer_s[kind] = running_mean(self._layer_s.get(kind), seconds)

    def late(
        self, wanted: Sequence[Transfer], num_rows: int, context: int, *, begin: int = 0, saved_s: float | None = None
    ) -> set[int]:
        """Sender layers whose maps their first reader would wait for too long, in a step of such a size.

        Where all of them are late nothing will be copied and so nothing be learnt, so the link is then trusted a little
        more the next time.

        Args:
            wanted: in the order in which they will be copied.
            num_rows, context: as in `observe_layers`.
            begin: receiver layer from which on they are copied.
            saved_s: seconds that reuse saves in a layer; None for what it saves as a rule.
        """
        layer_s = self._layer_s.get(_kind(num_rows, context))
        if layer_s is None or self._bytes_per_s is None:
            return set()
        patience = _SAVED * layer_s if saved_s is None else max(saved_s, 0.0)
        found, copied_at, waited = set(), begin * layer_s, 0.0
        for one in wanted:
            done = copied_at + _SLACK * one.num_bytes / self._bytes_per_s
            wait = done - one.first_use * layer_s - waited
            if wait > patience:
                found.add(one.sender_layer)
            else:
                copied_at, waited = done, waited + max(wait, 0.0)
        if wanted and len(found) == len(wanted):
            self._bytes_per_s *= _FORGIVENESS
        return found


def running_mean(before: float | None, new: float) -> float:
    """The mean that `before` was, with a new observation in it."""
    return new if before is None else before + _WEIGHT * (new - before)


def _kind(num_rows: int, context: int) -> tuple[int, int]:
    """Steps of about the same cost, within a factor of two in each."""
    return max(num_rows, 1).bit_length(), max(context, 1).bit_length()
