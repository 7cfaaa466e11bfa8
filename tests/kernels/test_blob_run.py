"""Prologues of many blobs at once, against the reader of one."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from mapflow.kernels import blob_layout as layout
from mapflow.kernels.attention_map import AttentionMap
from mapflow.kernels.blob import BlobError
from mapflow.kernels.blob_run import BlobRun, read_runs
from mapflow.kernels.blob_writer import blob_num_bytes, write_blob
from mapflow.kernels.compress_reference import assemble_chunk, compress_rows

IDENTITIES = [7, 8, 2**64 - 1]


@pytest.fixture(params=[None, torch.float8_e4m3fn, torch.bfloat16], ids=["masses", "e4m3", "bf16"])
def maps(request: pytest.FixtureRequest) -> list[AttentionMap]:
    """Chunks 1 to 3 of a prompt of which the last block row is not measured; head 1 was not asked for."""
    generator = torch.Generator().manual_seed(3)
    query = torch.randn(3 * 128 - 64, 3, 16, generator=generator)
    keys = torch.randn(4 * 128 - 64, 3, 16, generator=generator)
    tiles = {} if request.param is None else {"top_p": 0.6, "tile_dtype": request.param}
    part = compress_rows(query, keys, first_row=128, block=64, scale=0.3, heads=(0, 2), **tiles)
    return [assemble_chunk([part], chunk_index=c, chunk_tokens=128, block=64, num_heads=3) for c in (1, 2, 3)]


@pytest.fixture
def blobs(maps: list[AttentionMap]) -> list[bytearray]:
    """Each with a few bytes behind it, as in an extent."""
    found = []
    for one, identity in zip(maps, IDENTITIES):
        found.append(bytearray(blob_num_bytes(one) + 64))
        write_blob(one, found[-1], identity=identity)
    return found


def _joined(blobs: list[bytearray]) -> np.ndarray:
    return np.frombuffer(b"".join(blobs), dtype=np.uint8)


def _read(blobs: list[bytearray], identities: list[int], layers: int = 1) -> list[BlobRun]:
    sizes = np.array([len(blob) for blob in blobs], dtype=np.int64).reshape(layers, -1)
    offsets = (sizes.cumsum() - sizes.ravel()).reshape(layers, -1)
    return read_runs(_joined(blobs), offsets, sizes, np.array(identities, dtype=np.uint64).reshape(layers, -1))


def test_sections_are_where_the_parts_lie(maps: list[AttentionMap], blobs: list[bytearray]) -> None:
    (run,) = _read(blobs, IDENTITIES)
    assert (run.block, run.num_heads, run.chunk_blocks, run.first_chunk, run.num_chunks) == (64, 3, 2, 1, 3)
    assert run.measured.tolist() == [True, True, True, True, True, False]
    assert not run.approximate
    for chunk, (one, blob) in enumerate(zip(maps, blobs)):
        assert run.num_bytes[chunk] == blob_num_bytes(one)
        tiles = one.tiles
        assert run.tile_dtype == (None if tiles is None else tiles.values.dtype)
        for head in range(3):
            mass_at, indptr_at, indices_at, tiles_at = run.sections[chunk, head].tolist()
            mass = np.frombuffer(blob, dtype=np.uint8, count=one.mass[head].numel(), offset=mass_at)
            assert (mass.reshape(one.mass[head].shape) == one.mass[head].numpy()).all()
            if tiles is None:
                continue
            begin, end = int(tiles.indptr[head, 0]), int(tiles.indptr[head, -1])
            assert run.num_tiles[chunk, head] == end - begin
            indptr = np.frombuffer(blob, dtype="<i4", count=3, offset=indptr_at)
            assert (indptr == (tiles.indptr[head] - begin).numpy()).all()
            indices = np.frombuffer(blob, dtype="<i4", count=end - begin, offset=indices_at)
            assert (indices == tiles.indices[begin:end].numpy()).all()
            bits = tiles.values[begin:end].contiguous().view(torch.uint8).numpy().tobytes()
            assert bytes(blob[tiles_at : tiles_at + len(bits)]) == bits


def test_heads_that_nobody_asked_for(blobs: list[bytearray]) -> None:
    (run,) = _read(blobs, IDENTITIES)
    assert run.has_heads(_joined(blobs), [0, 2])
    assert not run.has_heads(_joined(blobs), [0, 1])


def test_several_layers_at_once(maps: list[AttentionMap], blobs: list[bytearray]) -> None:
    """Each as if it had been read alone."""
    others = [bytearray(len(blob)) for blob in blobs]
    for one, into in zip(maps, others):
        write_blob(one, into, identity=5)
    identities = [*IDENTITIES, 5, 5, 5]
    runs = _read(blobs + others, identities, layers=2)
    begin = sum(map(len, blobs))
    for run, alone, skipped in zip(runs, [_read(blobs, IDENTITIES)[0], _read(others, [5] * 3)[0]], (0, begin)):
        assert (run.offsets == alone.offsets + skipped).all() and (run.sections == alone.sections).all()
        assert (run.first_chunk, run.num_chunks, run.num_bytes.tolist()) == (1, 3, alone.num_bytes.tolist())
        assert run.has_heads(_joined(blobs + others), [0, 2]) and not run.has_heads(_joined(blobs + others), [1])
    others[1][100] ^= 1
    with pytest.raises(BlobError) as error:
        _read(blobs + others, identities, layers=2)
    assert error.value.reason == "checksum"


def _flip(at: int) -> Callable[[list[bytearray]], None]:
    def edit(blobs: list[bytearray]) -> None:
        blobs[1][at] ^= 1

    return edit


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (_flip(0), "bad_magic"),
        (_flip(4), "version_skew"),
        (_flip(20), "malformed"),  # the number of heads
        (_flip(28), "checksum"),
        (_flip(layout.HEADER_BYTES), "checksum"),
        (_flip(100), "checksum"),
        (lambda blobs: blobs.reverse(), "identity"),
        (lambda blobs: blobs.__setitem__(2, blobs[2][:-128]), "truncated"),
        (lambda blobs: blobs.__setitem__(2, blobs[2][:40]), "truncated"),
    ],
)
def test_refuses(edit: Callable[[list[bytearray]], None], reason: str, blobs: list[bytearray]) -> None:
    edit(blobs)
    with pytest.raises(BlobError) as error:
        _read(blobs, IDENTITIES)
    assert error.value.reason == reason


def test_refuses_chunks_out_of_order(blobs: list[bytearray]) -> None:
    with pytest.raises(BlobError, match="do not follow"):
        _read([blobs[0], blobs[2]], [IDENTITIES[0], IDENTITIES[2]])


def test_refuses_bytes_outside_the_source(blobs: list[bytearray]) -> None:
    source, identities = _joined(blobs), np.array([IDENTITIES], dtype=np.uint64)
    sizes = np.array([[len(blob) for blob in blobs]], dtype=np.int64)
    for offsets in (np.cumsum(sizes, axis=1), np.array([[-1, 0, 0]])):
        with pytest.raises(ValueError, match="outside their source"):
            read_runs(source, offsets, sizes, identities)
