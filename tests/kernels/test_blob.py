"""The wire format: golden bytes, an independent parse, and everything that must be refused."""

import dataclasses
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from mapflow.kernels import blob_layout
from mapflow.kernels.attention_map import AttentionMap
from mapflow.kernels.blob import BlobError, BlobErrorReason, read_blob
from mapflow.kernels.blob_layout import Header, HeadLayout
from mapflow.kernels.blob_writer import blob_num_bytes, write_blob
from mapflow.kernels.compress_reference import assemble_chunk, compress_rows

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
DATA = Path(__file__).parent / "data"
GOLDEN = {
    "attention_map_v1.bin": (E4M3, False),
    "attention_map_v1_bf16.bin": (BF16, True),
    "attention_map_v1_mass_only.bin": (None, False),
}
FixedMap = Callable[..., AttentionMap]
SameMap = Callable[[AttentionMap, AttentionMap], bool]


def blob_of(one: AttentionMap) -> bytearray:
    buffer = bytearray(b"\xa5" * blob_num_bytes(one))
    assert write_blob(one, memoryview(buffer)) == len(buffer)
    return buffer


def reason_of(data: bytes | bytearray, heads: list[int] | None = None) -> BlobErrorReason:
    with pytest.raises(BlobError) as caught:
        read_blob(data, heads)
    return caught.value.reason


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_bytes(fixed_map: FixedMap, same_map: SameMap, name: str) -> None:
    """Format 1 never changes. To make a new format, raise FORMAT_VERSION and add files; don't touch these."""
    wanted = (DATA / name).read_bytes()
    one = fixed_map(*GOLDEN[name])
    assert bytes(blob_of(one)) == wanted
    assert same_map(read_blob(wanted), one)


def test_golden_bytes_parsed_by_hand(fixed_map: FixedMap) -> None:
    """The documented offsets, with nothing of the package but the map to compare with."""
    data = (DATA / "attention_map_v1.bin").read_bytes()
    one = fixed_map(E4M3)
    assert one.tiles is not None
    magic, version, header_bytes, kind, mass_dtype, tile_dtype, zero = struct.unpack_from("<4sHHBBBB", data, 0)
    assert (magic, version, header_bytes, kind, mass_dtype, tile_dtype, zero) == (b"MFAM", 1, 64, 1, 1, 1, 0)
    flags, block, heads, rows, columns, chunk_index, zero = struct.unpack_from("<7I", data, 12)
    assert (flags, block, heads, rows, columns, chunk_index, zero) == (0, 8, 2, 2, 4, 1, 0)
    total, zero, checksum = struct.unpack_from("<3Q", data, 40)
    assert (total, zero) == (len(data), 0)
    assert struct.unpack_from("<2i", data, 64) == (8, 8)
    table = [struct.unpack_from("<3Q", data, 72 + 24 * head) for head in range(2)]
    assert table[0][0] == 128
    assert checksum == xxhash.xxh3_64_intdigest(data[:56] + bytes(8) + data[64:128])
    first_tile = 0
    for head, (offset, num_bytes, head_checksum) in enumerate(table):
        section = data[offset : offset + num_bytes]
        assert head_checksum == xxhash.xxh3_64_intdigest(section)
        assert list(section[:8]) == one.mass[head].flatten().tolist()
        indptr = struct.unpack_from("<3i", section, 64)
        assert list(indptr) == (one.tiles.indptr[head] - first_tile).tolist()
        num_tiles = indptr[-1]
        indices = struct.unpack_from(f"<{num_tiles}i", section, 128)
        assert list(indices) == one.tiles.indices[first_tile : first_tile + num_tiles].tolist()
        tiles = section[192 : 192 + 64 * num_tiles]
        values = one.tiles.values[first_tile : first_tile + num_tiles]
        assert list(tiles) == values.view(torch.uint8).flatten().tolist()
        assert num_bytes == 192 + 64 * num_tiles
        first_tile += num_tiles
    assert table[1][0] == table[0][0] + table[0][1]
    assert total == table[1][0] + table[1][1]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    heads=st.integers(1, 4),
    block=st.sampled_from([8, 16, 64]),
    chunk=st.integers(0, 2),
    p=st.sampled_from([None, 0.5, 1.0]),
    dtype=st.sampled_from([E4M3, BF16]),
    missing=st.booleans(),
    slack=st.integers(0, 100),
    seed=st.integers(0, 100),
)
def test_round_trip(
    make_dense: Callable[..., Any],
    same_map: SameMap,
    heads: int,
    block: int,
    chunk: int,
    p: float | None,
    dtype: torch.dtype,
    missing: bool,
    slack: int,
    seed: int,
) -> None:
    first, rows = 2 * chunk * block, (1 if missing else 2) * block
    one = make_dense(rows=rows, first_row=first, heads=heads, kv_heads=1, seed=seed)
    part = compress_rows(
        one.query,
        one.key,
        first_row=first,
        block=block,
        scale=one.scale,
        top_p=p,
        tile_dtype=dtype,
        heads=range(1, heads),
    )
    sent = assemble_chunk(
        [part], chunk_index=chunk, chunk_tokens=2 * block, block=block, num_heads=heads, approximate=missing
    )
    size = blob_num_bytes(sent)
    buffer = bytearray(b"\x5a" * (size + slack))
    assert write_blob(sent, memoryview(buffer)) == size
    assert buffer[size:] == b"\x5a" * slack
    assert same_map(read_blob(memoryview(buffer)), sent)


def test_reading_some_heads_in_any_order(fixed_map: FixedMap, same_map: SameMap) -> None:
    for dtype in (E4M3, BF16, None):
        whole = fixed_map(dtype)
        blob = blob_of(whole)
        both = read_blob(blob, [1, 0])
        assert torch.equal(both.mass, whole.mass[[1, 0]])
        for head in (0, 1):
            one = read_blob(blob, [head])
            assert torch.equal(one.mass, whole.mass[[head]])
            assert torch.equal(one.row_counts, whole.row_counts)
            if whole.tiles is not None:
                assert one.tiles is not None
                assert both.tiles is not None
                start, end = (0, 3) if head == 0 else (3, 5)
                assert torch.equal(one.tiles.indptr[0], whole.tiles.indptr[head] - start)
                assert torch.equal(one.tiles.indices, whole.tiles.indices[start:end])
                assert torch.equal(one.tiles.values.float(), whole.tiles.values[start:end].float())
                assert same_map(read_blob(blob_of(both), [1, 0]), whole)


def test_damage_to_a_head_not_asked_for_does_not_matter(fixed_map: FixedMap) -> None:
    blob = blob_of(fixed_map(E4M3))
    blob[-1] ^= 1
    assert torch.equal(read_blob(blob, [0]).mass, fixed_map(E4M3).mass[:1])
    assert reason_of(blob, [1]) == BlobErrorReason.CHECKSUM
    assert reason_of(blob) == BlobErrorReason.CHECKSUM


def test_the_result_does_not_share_the_buffer(fixed_map: FixedMap, same_map: SameMap) -> None:
    blob = blob_of(fixed_map(BF16))
    got = read_blob(memoryview(blob))
    blob[:] = bytes(len(blob))
    blob.append(0)  # raises BufferError if anything still looked into the buffer
    assert same_map(got, fixed_map(BF16))


@pytest.mark.parametrize("name", GOLDEN)
def test_every_truncation_is_refused(name: str) -> None:
    blob = (DATA / name).read_bytes()
    for length in range(len(blob)):
        assert reason_of(blob[:length]) == BlobErrorReason.TRUNCATED, length


@pytest.mark.parametrize("name", GOLDEN)
def test_every_flipped_bit_is_refused(name: str) -> None:
    blob = bytearray((DATA / name).read_bytes())
    for place in range(len(blob)):
        for bit in (1, 16, 128):
            blob[place] ^= bit
            with pytest.raises(BlobError):
                read_blob(blob)
            blob[place] ^= bit
    read_blob(blob)


def test_torn_extents_are_refused(fixed_map: FixedMap) -> None:
    """Half of one valid blob and half of another of the same size, at every 64 bytes."""
    one = fixed_map(E4M3)
    assert one.tiles is not None
    other = dataclasses.replace(
        one, mass=one.mass // 2, tiles=dataclasses.replace(one.tiles, values=one.tiles.values.flip(0))
    )
    first, second = blob_of(one), blob_of(other)
    assert len(first) == len(second)
    for cut in range(64, len(first), 64):
        for torn in (first[:cut] + second[cut:], second[:cut] + first[cut:]):
            if torn not in (first, second):
                assert reason_of(torn) == BlobErrorReason.CHECKSUM


@pytest.mark.parametrize("dtype", [E4M3, BF16, None])
def test_an_extent_overwritten_while_it_is_read(
    fixed_map: FixedMap, same_map: SameMap, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype | None
) -> None:
    """What was verified is what is used: scribbling right after each checksum changes nothing of the result."""
    buffer = blob_of(fixed_map(dtype))
    original, checksum = bytes(buffer), blob_layout.checksum

    def verify_then_scribble(data: Any) -> int:
        result = checksum(data)
        for entry in (72, 96):
            offset, num_bytes, wanted = struct.unpack_from("<3Q", original, entry)
            if result == wanted:
                buffer[offset : offset + num_bytes] = b"\xff" * num_bytes
        return result

    monkeypatch.setattr(blob_layout, "checksum", verify_then_scribble)
    assert same_map(read_blob(memoryview(buffer)), fixed_map(dtype))
    assert buffer[128:] == b"\xff" * (len(buffer) - 128)


def test_half_written_blobs_never_look_valid(fixed_map: FixedMap, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that dies in the middle leaves no magic, even where a valid blob was before."""
    buffer = blob_of(fixed_map(BF16))
    monkeypatch.setattr("mapflow.kernels.blob_writer._write_tiles", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        write_blob(fixed_map(E4M3), memoryview(buffer))
    assert reason_of(buffer) == BlobErrorReason.BAD_MAGIC


@settings(max_examples=200, deadline=None, derandomize=True)
@given(data=st.binary(max_size=600), prefix=st.sampled_from([b"", b"MFAM", b"MFAM\x01\x00\x40\x00\x01\x01\x01\x00"]))
def test_random_bytes_never_crash(data: bytes, prefix: bytes) -> None:
    with pytest.raises(BlobError):
        read_blob(prefix + data)


def forge(blob: bytearray, changes: dict[int, bytes], *, heads: bool = True) -> bytearray:
    """Overwrite bytes, then make every checksum right again, as a broken or hostile writer would."""
    forged = bytearray(blob)
    for offset, data in changes.items():
        forged[offset : offset + len(data)] = data
    for head in range(2) if heads else ():
        entry = 72 + 24 * head
        offset, num_bytes, _ = struct.unpack_from("<3Q", forged, entry)
        struct.pack_into("<Q", forged, entry + 16, xxhash.xxh3_64_intdigest(forged[offset : offset + num_bytes]))
    struct.pack_into("<Q", forged, 56, 0)
    struct.pack_into("<Q", forged, 56, xxhash.xxh3_64_intdigest(forged[:128]))
    return forged


def u32(value: int) -> bytes:
    return value.to_bytes(4, "little")


HEAD_0 = 128
FORGERIES = {
    "header size": {6: b"\x80\x00"},
    "kind": {8: b"\x02"},
    "mass dtype": {9: b"\x00"},
    "tile dtype": {10: b"\x09"},
    "another tile dtype": {10: b"\x02"},
    "reserved byte": {11: b"\x01"},
    "flags": {12: u32(2)},
    "block 0": {16: u32(0)},
    "block 7": {16: u32(7)},
    "block 2**31": {16: u32(2**31)},
    "block 16": {16: u32(16)},
    "columns": {28: u32(6)},
    "chunk index": {32: u32(2)},
    "reserved word": {36: u32(1)},
    "total below": {40: u32(192)},
    "negative row count": {64: b"\xff\xff\xff\xff"},
    "row count over the block": {64: u32(9)},
    "head offset": {72: u32(192)},
    "head size": {80: u32(64)},
    "odd head size": {80: u32(383)},
    "mass above the diagonal": {HEAD_0 + 3: b"\x01"},
    "indptr begins late": {HEAD_0 + 64: u32(1)},
    "indptr descends": {HEAD_0 + 68: u32(4)},
    "indptr negative": {HEAD_0 + 72: b"\xff\xff\xff\xff"},
    "indptr enormous": {HEAD_0 + 72: u32(2**31 - 1)},
    "index negative": {HEAD_0 + 128: b"\xff\xff\xff\xff"},
    "index above the diagonal": {HEAD_0 + 132: u32(3)},
    "index twice": {HEAD_0 + 132: u32(0)},
    "tile NaN": {HEAD_0 + 192: b"\x7f"},
    "tile negative": {HEAD_0 + 192: b"\x81"},
    "tile above 1": {HEAD_0 + 192: b"\x79"},
}


@pytest.mark.parametrize("name", FORGERIES)
def test_forged_blobs_are_malformed(fixed_map: FixedMap, name: str) -> None:
    """Checksums right, contents wrong."""
    blob = blob_of(fixed_map(E4M3))
    read_blob(forge(blob, {}))
    in_table = any(72 <= offset < 120 for offset in FORGERIES[name])
    assert reason_of(forge(blob, FORGERIES[name], heads=not in_table)) == BlobErrorReason.MALFORMED


def test_a_head_too_small_for_its_masses_is_malformed(fixed_map: FixedMap) -> None:
    """Sections that follow each other without gaps, but the first one ends after 64 bytes."""
    blob = blob_of(fixed_map(E4M3))
    split = {
        80: (64).to_bytes(8, "little"),
        96: (192).to_bytes(8, "little"),
        104: (len(blob) - 192).to_bytes(8, "little"),
    }
    assert reason_of(forge(blob, split)) == BlobErrorReason.MALFORMED


def test_sections_of_real_sizes() -> None:
    """Offsets where the masses fill whole 64 bytes, as they do in every chunk of 8 x 64 tokens."""
    header = Header(
        tile_dtype=1, flags=0, block=64, num_heads=9, num_row_blocks=8, num_col_blocks=16, chunk_index=1, total_bytes=0
    )
    assert (header.head_table_offset, header.prologue_bytes) == (96, 320)
    section = HeadLayout(header, 20)
    assert (section.mass_bytes, section.indptr_offset, section.indices_offset) == (128, 128, 192)
    assert (section.tiles_offset, section.num_bytes) == (320, 320 + 20 * 4096)
    assert HeadLayout(dataclasses.replace(header, tile_dtype=2), 16).num_bytes == 256 + 16 * 8192
    assert HeadLayout(dataclasses.replace(header, tile_dtype=0), 0).num_bytes == 128


@pytest.mark.parametrize("offset", [20, 24, 40, 44])
def test_sizes_beyond_the_buffer_allocate_nothing(fixed_map: FixedMap, offset: int) -> None:
    """num_heads, num_row_blocks or total bytes of billions: refused by the buffer's length alone."""
    blob = blob_of(fixed_map(E4M3))
    blob[offset : offset + 4] = u32(2**32 - 1)
    assert reason_of(blob) == BlobErrorReason.TRUNCATED


@settings(max_examples=300, deadline=None, derandomize=True)
@given(edits=st.dictionaries(st.integers(4, 700), st.binary(min_size=1, max_size=4), max_size=4))
def test_forged_at_random_never_crashes(fixed_map: FixedMap, edits: dict[int, bytes]) -> None:
    blob = blob_of(fixed_map(E4M3))
    try:
        got = read_blob(forge(blob, {at: data for at, data in edits.items() if at + len(data) <= len(blob)}))
    except BlobError:
        return
    assert got.tiles is not None
    assert got.tiles.values.shape == (got.tiles.num_tiles, 8, 8)


def test_version_and_magic_come_first(fixed_map: FixedMap) -> None:
    blob = blob_of(fixed_map(None))
    blob[4] = 2
    assert reason_of(blob) == BlobErrorReason.VERSION_SKEW
    with pytest.raises(BlobError, match="reads format version 1, the blob is of version 2"):
        read_blob(blob)
    blob[0] = 0
    assert reason_of(blob) == BlobErrorReason.BAD_MAGIC
    assert reason_of(bytes(4096)) == BlobErrorReason.BAD_MAGIC
    assert reason_of(b"") == BlobErrorReason.TRUNCATED


def test_heads_that_the_blob_lacks(fixed_map: FixedMap) -> None:
    blob = blob_of(fixed_map(E4M3))
    assert reason_of(blob, [0, 2]) == BlobErrorReason.MALFORMED
    assert reason_of(blob, []) == BlobErrorReason.MALFORMED
    with pytest.raises(ValueError, match="each head once"):
        read_blob(blob, [1, 1])
    with pytest.raises(ValueError, match="at least 0, got -1"):
        read_blob(blob, [-1])


def test_buffers_that_cannot_hold_the_blob(fixed_map: FixedMap) -> None:
    one = fixed_map(E4M3)
    size = blob_num_bytes(one)
    small = bytearray(b"\x01" * (size - 1))
    with pytest.raises(ValueError, match=f"at least {size} bytes, got {size - 1}"):
        write_blob(one, memoryview(small))
    assert small == b"\x01" * (size - 1)
    with pytest.raises(ValueError, match="read-only"):
        write_blob(one, memoryview(bytes(size)))


def test_a_typed_view_of_memory_will_do(fixed_map: FixedMap, same_map: SameMap) -> None:
    one = fixed_map(E4M3)
    words = np.zeros(blob_num_bytes(one) // 8, dtype="<u8")
    write_blob(one, words.data)
    assert same_map(read_blob(words.data), one)


def test_a_blob_of_another_entry_is_refused(fixed_map: FixedMap, same_map: SameMap) -> None:
    one = fixed_map(E4M3)
    data = bytearray(blob_num_bytes(one))
    write_blob(one, data, identity=2**64 - 3)
    assert same_map(read_blob(data, identity=2**64 - 3), one)
    for other in (0, 1, 2**64 - 4):
        with pytest.raises(BlobError) as caught:
            read_blob(data, identity=other)
        assert caught.value.reason is BlobErrorReason.IDENTITY
