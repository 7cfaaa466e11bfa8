"""Mapped shared memory: views stay inside, and outlive their segment."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from mapflow.connector.arena import SHARED_MEMORY, Arena, ArenaSet
from mapflow.connector.messages import Extent
from mapflow.connector.reasons import Reason, Unavailable
from mapflow.v1 import cache_pb2

NUM_BYTES = 8192


@pytest.fixture
def segment() -> Iterator[Path]:
    path = SHARED_MEMORY / f"mapflow-test-{secrets.token_hex(8)}"
    path.write_bytes(bytes(range(256)) * (NUM_BYTES // 256))
    path.chmod(0o600)
    yield path
    path.unlink(missing_ok=True)


def test_writes_reach_the_segment(segment: Path) -> None:
    arena = Arena(3, segment.name, NUM_BYTES)
    view = arena.view(Extent(3, 64, 4))
    assert bytes(view) == bytes([64, 65, 66, 67])
    view[:] = b"abcd"
    assert segment.read_bytes()[60:70] == bytes([60, 61, 62, 63]) + b"abcd" + bytes([68, 69])
    arena.close()


@pytest.mark.parametrize(
    ("offset", "num_bytes"), [(0, NUM_BYTES + 1), (NUM_BYTES, 1), (NUM_BYTES - 4, 5), (-4, 4), (8, -4), (2**63, 4)]
)
def test_extents_outside_are_refused(segment: Path, offset: int, num_bytes: int) -> None:
    arena = Arena(3, segment.name, NUM_BYTES)
    with pytest.raises(ValueError, match="lies outside arena 3 of 8192 bytes"):
        arena.view(Extent(3, offset, num_bytes))
    arena.close()


def test_extents_at_the_edges_are_fine(segment: Path) -> None:
    arena = Arena(3, segment.name, NUM_BYTES)
    assert len(arena.view(Extent(3, 0, NUM_BYTES))) == NUM_BYTES
    assert len(arena.view(Extent(3, NUM_BYTES, 0))) == 0
    arena.close()


def test_extents_of_another_arena_are_refused(segment: Path) -> None:
    arena = Arena(3, segment.name, NUM_BYTES)
    with pytest.raises(ValueError, match="outside arena 3"):
        arena.view(Extent(4, 0, 4))
    arena.close()


def test_a_removed_segment_stays_readable_and_views_outlive_the_arena(segment: Path) -> None:
    arena = Arena(3, segment.name, NUM_BYTES)
    segment.unlink()
    view = arena.view(Extent(3, 1, 3))
    arena.close()
    arena.close()
    assert bytes(view) == bytes([1, 2, 3])
    with pytest.raises(Unavailable, match="is closed"):
        arena.view(Extent(3, 1, 3))


def test_closing_unmaps(segment: Path) -> None:
    arena = Arena(3, segment.name, NUM_BYTES)
    assert segment.name in Path("/proc/self/maps").read_text()
    arena.close()
    assert segment.name not in Path("/proc/self/maps").read_text()


def test_closing_under_views_unmaps_with_the_last_of_them(segment: Path) -> None:
    arena = Arena(3, segment.name, NUM_BYTES)
    view = arena.view(Extent(3, 0, 8))
    arena.close()
    assert segment.name in Path("/proc/self/maps").read_text()
    view.release()
    del view
    assert segment.name not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("name", ["mapflow-no-such-segment", "", "../etc/passwd", "..", ".", "a\0b"])
def test_segments_that_are_not_there(name: str) -> None:
    with pytest.raises(Unavailable) as caught:
        Arena(1, name, NUM_BYTES)
    assert caught.value.reason is Reason.NO_SHARED_MEMORY


@pytest.mark.parametrize("num_bytes", [NUM_BYTES + 1, 0])
def test_a_size_that_is_not_the_announced_one(segment: Path, num_bytes: int) -> None:
    with pytest.raises(Unavailable, match=f"has {NUM_BYTES} bytes, the daemon announced {num_bytes}"):
        Arena(1, segment.name, num_bytes)


def test_links_and_directories_are_refused(segment: Path) -> None:
    link = SHARED_MEMORY / f"{segment.name}-link"
    link.symlink_to(segment)
    directory = SHARED_MEMORY / f"{segment.name}-directory"
    directory.mkdir()
    try:
        for path in (link, directory):
            with pytest.raises(Unavailable, match="cannot open"):
                Arena(1, path.name, NUM_BYTES)
    finally:
        link.unlink()
        directory.rmdir()


def test_another_users_segment_is_refused(segment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = segment.stat().st_uid
    if owner == 0:
        os.chown(segment, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(Unavailable, match="belongs to user"):
        Arena(1, segment.name, NUM_BYTES)


def test_a_set_drops_the_arenas_of_another_boot(segment: Path) -> None:
    arenas = ArenaSet()
    message = cache_pb2.Arena(id=1, segment_name=segment.name, num_bytes=NUM_BYTES)
    assert arenas.adopt(b"a" * 16, [message]) == []
    first = arenas.get(b"a" * 16, 1)
    assert first is not None
    assert arenas.adopt(b"a" * 16, [message]) == []
    assert arenas.get(b"a" * 16, 1) is first
    assert arenas.get(b"b" * 16, 1) is None
    assert arenas.get(b"a" * 16, 2) is None
    missing = cache_pb2.Arena(id=2, segment_name="mapflow-no-such-segment", num_bytes=1)
    (refusal,) = arenas.adopt(b"b" * 16, [message, missing])
    assert refusal.reason is Reason.NO_SHARED_MEMORY
    assert arenas.get(b"a" * 16, 1) is None
    assert arenas.get(b"b" * 16, 1) not in (None, first)
    arenas.close()
    assert segment.name not in Path("/proc/self/maps").read_text()
