"""The daemon's shared memory, mapped into this process, and views of its extents that cannot leave it.

The daemon alone creates, grows and removes segments. A mapping outlives its daemon: its bytes stay readable until the
mapping is closed and the last view is gone.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from mapflow.connector.messages import Extent
from mapflow.connector.reasons import Reason, Unavailable
from mapflow.v1 import cache_pb2

SHARED_MEMORY = Path("/dev/shm")


class Arena:
    """One mapped segment."""

    def __init__(self, arena_id: int, segment_name: str, num_bytes: int) -> None:
        """Map the segment for reading and writing.

        Args:
            arena_id: number that extents refer to.
            segment_name: name of the POSIX shared-memory object, with no leading slash.
            num_bytes: size that the daemon announced.

        Raises:
            Unavailable: no such segment here, or one that is not the daemon's (NO_SHARED_MEMORY).
        """
        self.arena_id = arena_id
        self.segment_name = segment_name
        self.num_bytes = num_bytes
        self._map: mmap.mmap | None = _map_segment(segment_name, num_bytes)
        self._view = memoryview(self._map)

    def view(self, extent: Extent) -> memoryview:
        """The bytes of an extent, in place, writable.

        Raises:
            ValueError: an extent of another arena or outside this one.
            Unavailable: the arena is closed (SESSION_LOST).
        """
        if self._map is None:
            raise Unavailable(Reason.SESSION_LOST, f"arena {self.segment_name} is closed")
        end = extent.offset + extent.num_bytes
        if extent.arena_id != self.arena_id or extent.offset < 0 or extent.num_bytes < 0 or end > self.num_bytes:
            raise ValueError(f"{extent} lies outside arena {self.arena_id} of {self.num_bytes} bytes")
        return self._view[extent.offset : end]

    def close(self) -> None:
        """Unmap; where views are still held, when the last of them is gone. May be called twice."""
        if self._map is None:
            return
        self._view.release()
        with contextlib.suppress(BufferError):  # views that are still held keep the mapping, and end it
            self._map.close()
        self._map = None


def _map_segment(segment_name: str, num_bytes: int) -> mmap.mmap:
    if not segment_name or "/" in segment_name or segment_name.startswith("."):
        raise Unavailable(Reason.NO_SHARED_MEMORY, f"{segment_name!r} is no name of a shared-memory segment")
    path = SHARED_MEMORY / segment_name
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        raise Unavailable(Reason.NO_SHARED_MEMORY, f"cannot open {path}: {error}") from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise Unavailable(Reason.NO_SHARED_MEMORY, f"{path} is no regular file")
        if status.st_uid not in (os.geteuid(), 0):
            raise Unavailable(
                Reason.NO_SHARED_MEMORY, f"{path} belongs to user {status.st_uid}, not to {os.geteuid()} or root"
            )
        if num_bytes <= 0 or status.st_size < num_bytes:
            raise Unavailable(
                Reason.NO_SHARED_MEMORY, f"{path} has {status.st_size} bytes, the daemon announced {num_bytes}"
            )
        return mmap.mmap(descriptor, num_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    except (OSError, ValueError) as error:
        raise Unavailable(Reason.NO_SHARED_MEMORY, f"cannot map {path}: {error}") from error
    finally:
        os.close(descriptor)


class ArenaSet:
    """The arenas of one boot; another boot replaces them all."""

    def __init__(self) -> None:
        """Start with none."""
        self.boot_id = b""
        self._arenas: dict[int, Arena] = {}

    def adopt(self, boot_id: bytes, messages: Iterable[cache_pb2.Arena]) -> list[Unavailable]:
        """Map what the daemon offers, unless it is mapped already; returns why some are not."""
        if boot_id != self.boot_id:
            self.close()
            self.boot_id = boot_id
        refusals = []
        for message in messages:
            if message.id in self._arenas:
                continue
            try:
                self._arenas[message.id] = Arena(message.id, message.segment_name, message.num_bytes)
            except Unavailable as error:
                refusals.append(error)
        return refusals

    def get(self, boot_id: bytes, arena_id: int) -> Arena | None:
        """The mapping of an arena of that boot, where there is one."""
        return self._arenas.get(arena_id) if boot_id == self.boot_id else None

    def mapped(self) -> list[tuple[bytes, Arena]]:
        """All of them, each with its boot."""
        return [(self.boot_id, arena) for arena in list(self._arenas.values())]

    def close(self) -> None:
        """Unmap all of them."""
        arenas, self._arenas, self.boot_id = self._arenas, {}, b""
        for arena in arenas.values():
            arena.close()
