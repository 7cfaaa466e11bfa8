"""What a request may ask for: the numbers that a daemon was given, and the checks against them.

Looks at requests alone, never at the state of the cache.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mapflow.cache_service.core.errors import InvalidRequest, PreconditionFailed
from mapflow.cache_service.core.extents import ALIGNMENT
from mapflow.cache_service.core.peers import check_text
from mapflow.cache_service.core.values import NewEntry, Want

KEY_BYTES = (16, 32)
FORMAT_VERSIONS = (1,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the cache may use and grant; bytes and seconds.

    read_grace_s: how long what a session had leased stays when it ends: its GPU may still be reading it.
    device_arena_bytes: size of each device arena, numbered from 2.
    """

    arena_bytes: int
    session_timeout_s: float
    max_lease_s: float
    reservation_timeout_s: float
    max_keys: int
    read_grace_s: float = 0.0
    device_arena_bytes: tuple[int, ...] = ()

    @property
    def max_blob_bytes(self) -> int:
        """Largest blob that could ever fit: the arena, less a tail that alignment leaves over."""
        return self.arena_bytes // ALIGNMENT * ALIGNMENT

    def check_lookup(self, keys: Sequence[bytes], wants: Sequence[Want], lease_s: float) -> None:
        """Check a lookup.

        Raises:
            InvalidRequest: naming the field, the value and the limit.
        """
        if not 1 <= len(keys) <= self.max_keys:
            raise InvalidRequest(f"keys: 1 to {self.max_keys} in one request, got {len(keys)}")
        if len(set(keys)) != len(keys):
            raise InvalidRequest("keys: a chain never holds the same key twice")
        if not (math.isfinite(lease_s) and 0 <= lease_s <= self.max_lease_s):
            raise InvalidRequest(f"lease_s must be in [0, {self.max_lease_s}], got {lease_s}")
        for want in wants:
            check_text("want.model", want.model)
            if not want.layers or len(set(want.layers)) != len(want.layers):
                raise InvalidRequest(f"want.layers must name one layer or more, none twice, got {list(want.layers)}")

    def check_entries(self, entries: Sequence[NewEntry]) -> None:
        """Check the blobs that somebody wants room for.

        Raises:
            InvalidRequest: naming the field, the value and the limit.
        """
        if len(entries) > self.max_keys:
            raise InvalidRequest(f"entries: at most {self.max_keys} in one request, got {len(entries)}")
        for entry in entries:
            for name, key in (("key", entry.key), ("parent_key", entry.parent)):
                if key is not None and len(key) not in KEY_BYTES:
                    raise InvalidRequest(f"{name} must have 16 or 32 bytes, got {len(key)}")
            if not 1 <= entry.num_bytes <= self.max_blob_bytes:
                raise InvalidRequest(
                    f"num_bytes must be in [1, {self.max_blob_bytes}] (the arena), got {entry.num_bytes}"
                )


def check_formats(format_versions: Sequence[int]) -> None:
    """Make sure that a client speaks a blob format of this release, if it names any.

    Raises:
        PreconditionFailed: it names only others.
    """
    if format_versions and not set(format_versions) & set(FORMAT_VERSIONS):
        raise PreconditionFailed(
            f"format_versions {list(format_versions)} are none that this daemon speaks ({list(FORMAT_VERSIONS)}); "
            "install the same release on both sides"
        )
