"""What two engines must agree on before their chunk keys can mean the same, and the keys themselves.

Pure functions over token ids: no model, no tokenizer object and no socket. Never Python's `hash()` and never vLLM's
block hashes: the former changes with every process, the latter know nothing of the tokenizer.
"""

from __future__ import annotations

import hashlib
import json
import sys
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum

import xxhash

from mapflow.v1 import cache_pb2

FORMAT_VERSION = 1


class KeyHash(StrEnum):
    """Hash of the key chain: 16 bytes of xxh3-128, or 32 of SHA-256 where tenants don't trust each other."""

    XXH3_128 = "xxh3_128"
    SHA256 = "sha256"

    @property
    def key_bytes(self) -> int:
        """Length of one key in bytes."""
        return 16 if self is KeyHash.XXH3_128 else 32

    def digest(self, data: bytes) -> bytes:
        """Hash `data` to one key."""
        return xxhash.xxh3_128_digest(data) if self is KeyHash.XXH3_128 else hashlib.sha256(data).digest()


_PROTO_KEY_HASH = {
    KeyHash.XXH3_128: cache_pb2.KEY_HASH_XXH3_128,
    KeyHash.SHA256: cache_pb2.KEY_HASH_SHA256,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """Everything that is hashed in front of the first chunk."""

    tokenizer_fingerprint: str
    chunk_tokens: int = 512
    block: int = 64
    tenant: str = ""
    key_hash: KeyHash = KeyHash.XXH3_128
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ValueError: a size that the block and chunk arithmetic cannot use, an empty fingerprint, or a tenant that is
                no text.
        """
        if self.block not in (64, 128):
            raise ValueError(f"block must be 64 or 128 tokens, got {self.block}")
        if self.chunk_tokens <= 0 or self.chunk_tokens % self.block:
            raise ValueError(
                f"chunk_tokens must be a positive multiple of the block ({self.block}), got {self.chunk_tokens}"
            )
        if not self.tokenizer_fingerprint:
            raise ValueError("tokenizer_fingerprint must not be empty")
        try:
            self.tenant.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"tenant {self.tenant!r} is not valid Unicode text") from error

    @property
    def root_key(self) -> bytes:
        """The key before the first chunk."""
        return self.key_hash.digest(b"mapflow namespace\0" + self._canonical())

    def _canonical(self) -> bytes:
        # JSON, because it quotes: no tenant can spell out another field.
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":")).encode()

    def chunk_keys(self, token_ids: Sequence[int]) -> list[bytes]:
        """Keys of the complete chunks of a prompt, in order; a trailing partial chunk has none."""
        return self.extend_keys([], token_ids)

    def extend_keys(self, keys: Sequence[bytes], token_ids: Sequence[int]) -> list[bytes]:
        """Keys of `token_ids`, of which `keys` are already known; hashes the new chunks only.

        Raises:
            ValueError: a token id that is no unsigned 32-bit integer.
        """
        result, size = list(keys), self.chunk_tokens
        key = result[-1] if result else self.root_key
        for start in range(len(result) * size, len(token_ids) - size + 1, size):
            try:
                packed = _packed(token_ids[start : start + size])
            except (OverflowError, TypeError) as error:
                raise ValueError(f"chunk {len(result)} holds a token id outside [0, 2**32): {error}") from error
            key = self.key_hash.digest(key + packed)
            result.append(key)
        return result

    def difference(self, other: Namespace) -> str | None:
        """Name of the first field in which two namespaces differ, or None; for counters and log lines."""
        order = ("format_version", "tokenizer_fingerprint", "chunk_tokens", "block", "tenant", "key_hash")
        return next((name for name in order if getattr(self, name) != getattr(other, name)), None)

    def to_proto(self) -> cache_pb2.Namespace:
        """The message that announces this namespace to the daemon."""
        return cache_pb2.Namespace(
            format_version=self.format_version,
            tokenizer_fingerprint=self.tokenizer_fingerprint,
            chunk_tokens=self.chunk_tokens,
            block=self.block,
            tenant=self.tenant,
            key_hash=_PROTO_KEY_HASH[self.key_hash],
        )

    @classmethod
    def from_proto(cls, message: cache_pb2.Namespace) -> Namespace:
        """Read a peer's announcement.

        Raises:
            ValueError: values that no version of ours would send.
        """
        hashes = {number: name for name, number in _PROTO_KEY_HASH.items()}
        if message.key_hash not in hashes:
            raise ValueError(f"unknown key hash {message.key_hash}")
        return cls(
            format_version=message.format_version,
            tokenizer_fingerprint=message.tokenizer_fingerprint,
            chunk_tokens=message.chunk_tokens,
            block=message.block,
            tenant=message.tenant,
            key_hash=hashes[message.key_hash],
        )


def _packed(token_ids: Sequence[int]) -> bytes:
    """u32, little-endian."""
    numbers = array("I", token_ids)  # a quarter of what struct.pack takes
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()
