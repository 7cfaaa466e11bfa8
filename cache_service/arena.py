"""The arena: one POSIX shared-memory segment that engines of the same user map and read and write in place.

Owns the segment's file from creation to removal, and clears away those of daemons that were killed. Which bytes belong
to whom is the core's affair.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from mapflow.cache_service.errors import StartupError

SEGMENT_FOLDER = Path("/dev/shm")
_PIECE_BYTES = 64 << 20
_MEMINFO = Path("/proc/meminfo")
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


class Arena:
    """A segment `mapflow-<uid>-<random>`, 0600, locked with `flock` for as long as the daemon lives.

    Made in two steps, so that a stop in between is noticed: the constructor creates the file, then `allocate` must be
    run to its end before anything else.
    """

    def __init__(self, num_bytes: int, folder: Path = SEGMENT_FOLDER) -> None:
        """Create the segment, with no memory in it yet.

        Args:
            num_bytes: size of the arena.
            folder: where the system keeps shared memory.

        Raises:
            StartupError: less memory is free than asked for, or the file cannot be created.
        """
        self.num_bytes = num_bytes
        self._mapping: mmap.mmap | None = None
        _require_free(num_bytes, folder)
        self._path, self._fd = _create_locked(folder)

    @property
    def segment_name(self) -> str:
        """Name of the shared-memory object, with no leading slash."""
        return self._path.name

    @property
    def address(self) -> int:
        """Where the daemon's own mapping begins, until `close`."""
        assert self._mapping is not None, "address before allocate"
        return ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))

    def allocate(self) -> Iterator[int]:
        """Back the segment with memory, piece by piece; yields the bytes done so far.

        After it no write can fail for lack of memory, and no first touch is left to be paid for.

        Raises:
            StartupError: the system has no memory left.
        """
        for start in range(0, self.num_bytes, _PIECE_BYTES):
            size = min(_PIECE_BYTES, self.num_bytes - start)
            try:
                os.posix_fallocate(self._fd, start, size)
            except OSError as error:
                done = f"{start} of {self.num_bytes} bytes"
                raise StartupError(
                    f"shared memory ran out at {done}: {error.strerror}; choose a smaller arena"
                ) from error
            yield start + size
        self._mapping = mmap.mmap(self._fd, self.num_bytes)

    def read(self, offset: int, num_bytes: int) -> bytes:
        """A copy of bytes [offset, offset + num_bytes)."""
        assert self._mapping is not None, "read before allocate"
        return self._mapping[offset : offset + num_bytes]

    def write(self, offset: int, data: bytes) -> None:
        """Put bytes at an offset."""
        assert self._mapping is not None, "write before allocate"
        self._mapping[offset : offset + len(data)] = data

    def unlink(self) -> None:
        """Remove the segment's name; memory goes when the last process unmaps it. May be called twice."""
        self._path.unlink(missing_ok=True)

    def close(self) -> None:
        """Remove the segment and give up the daemon's own mapping of it."""
        self.unlink()
        if self._mapping is not None:
            self._mapping.close()
        os.close(self._fd)

    def __enter__(self) -> Arena:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def remove_stale_segments(folder: Path = SEGMENT_FOLDER) -> list[str]:
    """Remove this user's segments that no living daemon holds the lock of; returns their names."""
    removed = []
    for path in sorted(folder.glob(f"mapflow-{os.getuid()}-*")):
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue  # removed in the meantime, or not ours after all
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
            removed.append(path.name)
        except BlockingIOError:
            pass  # its daemon lives
        finally:
            os.close(fd)
    return removed


def _require_free(num_bytes: int, folder: Path) -> None:
    try:
        room = os.statvfs(folder)
    except OSError as error:
        raise StartupError(
            f"shared memory at {folder} cannot be used: {error.strerror}; mount a tmpfs there"
        ) from error
    limits = [(room.f_bavail * room.f_frsize, f"{folder} has", f"enlarge {folder}")]
    if (available := _number_after("MemAvailable:", _MEMINFO)) is not None:
        limits.append((available * 1024, "this host has", "free some memory"))
    if (allowed := _number_after("", _CGROUP_LIMIT)) is not None:
        limits.append((allowed, "this control group allows", "raise its limit"))
    free, holder, way_out = min(limits)
    if num_bytes > free:
        raise StartupError(
            f"arena needs {num_bytes} bytes of shared memory but {holder} {free} bytes free; "
            f"choose a smaller arena or {way_out}"
        )


def _number_after(label: str, path: Path) -> int | None:
    """The number behind a label in one of the kernel's files; None where there is no such file, label or number."""
    try:
        match = re.search(rf"^{label}\s*(\d+)", path.read_text(), re.MULTILINE)
    except OSError:
        return None
    return None if match is None else int(match[1])


def _create_locked(folder: Path) -> tuple[Path, int]:
    while True:
        path = folder / f"mapflow-{os.getuid()}-{secrets.token_hex(8)}"
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StartupError(f"shared-memory segment {path} cannot be created: {error.strerror}") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists():
                return path, fd
        except BlockingIOError:
            pass
        os.close(fd)  # another daemon took it for stale before it was locked: try again
