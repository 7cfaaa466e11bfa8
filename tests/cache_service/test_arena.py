"""The shared-memory segment: made, locked, written, removed, and cleared away after a crash."""

from __future__ import annotations

import ctypes
import os
import stat
from pathlib import Path

import pytest

from mapflow.cache_service import arena as module
from mapflow.cache_service.arena import Arena, remove_stale_segments
from mapflow.cache_service.errors import StartupError


def allocate(arena: Arena) -> list[int]:
    return list(arena.allocate())


def test_a_segment_is_private_locked_backed_and_removed(tmp_path: Path) -> None:
    with Arena(200_000, tmp_path) as arena:
        assert allocate(arena) == [200_000]
        path = tmp_path / arena.segment_name
        status = path.stat()
        assert stat.S_IMODE(status.st_mode) == 0o600
        assert status.st_size == 200_000
        assert status.st_blocks * 512 >= 200_000, "memory must be there before the first write"
        assert arena.segment_name.startswith(f"mapflow-{os.getuid()}-")
        assert remove_stale_segments(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_memory_is_fetched_piece_by_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PIECE_BYTES", 4096)
    with Arena(10_000, tmp_path) as arena:
        assert allocate(arena) == [4096, 8192, 10_000]


def test_bytes_written_are_what_others_see(tmp_path: Path) -> None:
    with Arena(4096, tmp_path) as arena:
        allocate(arena)
        arena.write(100, b"hello")
        assert arena.read(98, 9) == b"\0\0hello\0\0"
        assert (tmp_path / arena.segment_name).read_bytes()[100:105] == b"hello"


def test_segments_of_the_dead_are_removed_and_those_of_the_living_stay(tmp_path: Path) -> None:
    stale = tmp_path / f"mapflow-{os.getuid()}-0123456789abcdef"
    stale.write_bytes(b"left behind")
    others = [tmp_path / f"mapflow-{os.getuid() + 1}-0123456789abcdef", tmp_path / "something-else"]
    for path in others:
        path.write_bytes(b"")
    with Arena(4096, tmp_path) as arena:
        assert remove_stale_segments(tmp_path) == [stale.name]
        assert sorted(tmp_path.iterdir()) == sorted([*others, tmp_path / arena.segment_name])


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"precious")
    link = tmp_path / f"mapflow-{os.getuid()}-link"
    link.symlink_to(target)
    assert remove_stale_segments(tmp_path) == []
    assert target.read_bytes() == b"precious"


def test_an_arena_larger_than_free_memory_names_both(tmp_path: Path) -> None:
    much = 1 << 60
    with pytest.raises(
        StartupError, match=r"arena needs \d+ bytes of shared memory but .* \d+ bytes free; choose"
    ) as refused:
        Arena(much, tmp_path)
    assert str(much) in str(refused.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("_MEMINFO", "MemTotal:  900 kB\nMemAvailable:    4 kB\n", "8192 bytes .* this host has 4096 bytes free"),
        ("_CGROUP_LIMIT", "4096\n", "8192 bytes .* this control group allows 4096 bytes free"),
    ],
)
def test_memory_that_is_not_there_is_not_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str, message: str
) -> None:
    """Asking for it would not fail: the kernel would kill somebody instead."""
    (tmp_path / "limit").write_text(text)
    monkeypatch.setattr(module, name, tmp_path / "limit")
    with pytest.raises(StartupError, match=message):
        Arena(8192, tmp_path)
    Arena(4096, tmp_path).close()


def test_limits_that_are_not_set_do_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "limit").write_text("max\n")
    monkeypatch.setattr(module, "_CGROUP_LIMIT", tmp_path / "limit")
    monkeypatch.setattr(module, "_MEMINFO", tmp_path / "missing")
    Arena(4096, tmp_path).close()


def test_memory_that_runs_out_while_it_is_fetched_is_an_error_at_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with Arena(4096, tmp_path) as arena:
        monkeypatch.setattr(os, "posix_fallocate", refuse)
        with pytest.raises(StartupError, match="ran out at 0 of 4096 bytes: No space left"):
            allocate(arena)
    assert list(tmp_path.iterdir()) == []


def test_no_folder_for_shared_memory(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="mount a tmpfs"):
        Arena(4096, tmp_path / "missing")


def test_the_mapping_lies_at_its_address(tmp_path: Path) -> None:
    with Arena(4096, tmp_path) as arena:
        list(arena.allocate())
        arena.write(100, b"here")
        assert ctypes.string_at(arena.address + 100, 4) == b"here"
