"""A number inside each blob that ties it to its entry, so that bytes that were replaced under a reader are noticed."""

from __future__ import annotations

import xxhash


def map_identity(key: bytes, producer: str, layer: int) -> int:
    """64-bit xxh3 of (chunk key, producer id, layer)."""
    return xxhash.xxh3_64_intdigest(key + b"\0" + producer.encode() + b"\0" + str(layer).encode())
