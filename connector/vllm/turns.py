"""Which unfinished chunk of an earlier turn a new prompt goes on from.

A prompt rarely ends on a chunk's boundary. The next turn's prompt continues it, but the engine has the rows in its KV
cache and computes only what is new. So the worker keeps what it measured of the last, unfinished chunk, and this room
names it: by the key of the chunk before and the tokens since. Names only; the measurements are the worker's.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Sequence

from mapflow.connector.namespace import Namespace


class UnfinishedChunks:
    """Names of the unfinished chunks that workers keep, the latest for each prefix."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._by_prefix: OrderedDict[bytes, tuple[int, bytes]] = OrderedDict()

    def name(self, namespace: Namespace, keys: Sequence[bytes], token_ids: Sequence[int]) -> bytes:
        """Name of a prompt's unfinished chunk, which is remembered; empty when the prompt ends on a boundary."""
        tail = token_ids[len(keys) * namespace.chunk_tokens :]
        if not tail:
            return b""
        prefix = keys[-1] if keys else namespace.root_key
        name = _digest(namespace, prefix, tail)
        self._by_prefix[prefix] = (len(tail), name)
        self._by_prefix.move_to_end(prefix)
        while len(self._by_prefix) > self._capacity:
            self._by_prefix.popitem(last=False)
        return name

    def find(self, namespace: Namespace, keys: Sequence[bytes], token_ids: Sequence[int]) -> bytes:
        """Name of the longest remembered unfinished chunk that a prompt continues, or empty."""
        for index in range(len(keys), -1, -1):
            prefix = keys[index - 1] if index else namespace.root_key
            if prefix not in self._by_prefix:
                continue
            length, name = self._by_prefix[prefix]
            start = index * namespace.chunk_tokens
            if _digest(namespace, prefix, token_ids[start : start + length]) == name:
                return name
        return b""


def _digest(namespace: Namespace, prefix: bytes, token_ids: Sequence[int]) -> bytes:
    return namespace.key_hash.digest(b"unfinished" + prefix + struct.pack(f"<{len(token_ids)}I", *token_ids))
