"""What sessions tell each other through the daemon: who publishes, and what is wanted.

Values and their checks. The daemon compares nothing here: whether two namespaces can meet is for the engines to say,
and for that each is passed on as it was announced.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from mapflow.cache_service.core.errors import InvalidRequest
from mapflow.cache_service.core.values import model_of

_SHARD = re.compile(r"tp\d+of\d+")
_MAX_TEXT = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """What two engines must agree on; fields as in the protocol, `key_hash` its enum's number."""

    format_version: int
    tokenizer_fingerprint: str
    chunk_tokens: int
    block: int
    tenant: str
    key_hash: int

    def __post_init__(self) -> None:
        """Check what no version of the protocol would send.

        Raises:
            InvalidRequest: a field that is missing or too long.
        """
        check_text("namespace.tokenizer_fingerprint", self.tokenizer_fingerprint)
        if len(self.tenant) > _MAX_TEXT:
            raise InvalidRequest(f"namespace.tenant: at most {_MAX_TEXT} characters, got {len(self.tenant)}")
        for name in ("format_version", "chunk_tokens", "block", "key_hash"):
            if getattr(self, name) < 1:
                raise InvalidRequest(f"namespace.{name} must be set")


@dataclass(frozen=True, slots=True)
class Publisher:
    """A session that publishes: its producer id, and the namespace of its keys."""

    producer: str
    namespace: Namespace

    def __post_init__(self) -> None:
        """Check the form of the producer id.

        Raises:
            InvalidRequest: it is not `<model>/<dtype>/tp<rank>of<size>`.
        """
        check_text("producer.id", self.producer)
        parts = self.producer.rsplit("/", 2)
        if len(parts) != 3 or not all(parts) or not _SHARD.fullmatch(parts[2]):
            raise InvalidRequest(f"producer.id must look like <model>/<dtype>/tp<rank>of<size>, got {self.producer!r}")

    @property
    def model(self) -> str:
        """Model id of the producer."""
        return model_of(self.producer)


@dataclass(frozen=True, slots=True)
class LayerInterest:
    """One wanted sender layer; fields as in the protocol, `tile_dtype` its enum's number."""

    layer: int
    heads: tuple[int, ...]
    tile_top_p: float
    tile_dtype: int

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            InvalidRequest: heads that are not ascending, or a tile_top_p outside [0, 1].
        """
        if any(low >= high for low, high in zip(self.heads, self.heads[1:])):
            raise InvalidRequest(f"heads of layer {self.layer} must be ascending, got {list(self.heads)}")
        if not (math.isfinite(self.tile_top_p) and 0 <= self.tile_top_p <= 1):
            raise InvalidRequest(f"tile_top_p of layer {self.layer} must be in [0, 1], got {self.tile_top_p}")


@dataclass(frozen=True, slots=True)
class Interest:
    """What one receiver wants from one sender model, in its own namespace."""

    namespace: Namespace
    model: str
    layers: tuple[LayerInterest, ...]

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            InvalidRequest: no model, or a layer named twice.
        """
        check_text("interest.model", self.model)
        numbers = [layer.layer for layer in self.layers]
        if len(set(numbers)) != len(numbers):
            raise InvalidRequest(f"interest in {self.model!r} names a layer twice: {numbers}")


@dataclass(frozen=True, slots=True)
class Peers:
    """Everyone who publishes or wants something now; a higher version is a later state."""

    version: int
    publishers: tuple[Publisher, ...]
    interests: tuple[Interest, ...]


def check_text(name: str, text: str) -> None:
    """Require a text that is there and not endless.

    Raises:
        InvalidRequest: naming the field.
    """
    if not 1 <= len(text) <= _MAX_TEXT:
        raise InvalidRequest(f"{name} must have 1 to {_MAX_TEXT} characters, got {len(text)}")
