"""Where the parts of consecutive chunks' blobs lie, read from their prologues alone, all blobs of some layers at once.

For a reader that copies whole blobs to an accelerator and lets the kernels read them in place (`MapTable`): the host
sees a few hundred bytes of each blob and none of its masses and tiles. Verified are header, tables and their checksum,
which pins every offset that the kernels start from; the heads' own checksums are not, because no host reads tiles as
fast as a GPU takes them in. That the bytes stay what they are until they are copied is the caller's lease's business.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from mapflow.kernels import blob_layout as layout
from mapflow.kernels.blob import TILE_DTYPES_BY_CODE, BlobError, BlobErrorReason, read_prologue
from mapflow.kernels.blob_layout import Header, HeadLayout

Bytes: TypeAlias = npt.NDArray[np.uint8]
Numbers: TypeAlias = npt.NDArray[np.int64]

_FIELDS = np.dtype(
    {
        "names": ["alike", "num_col_blocks", "chunk_index", "reserved", "total_bytes", "identity"],
        "formats": ["V28", "<u4", "<u4", "<u4", "<u8", "<u8"],
        "offsets": [0, 28, 32, 36, 40, 48],
        "itemsize": layout.HEADER_BYTES,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlobRun:
    """Blobs of consecutive chunks, alike in all but their chunk.

    Attributes:
        block, num_heads, chunk_blocks: tokens of a block, sender heads, block rows of a chunk.
        tile_dtype: e4m3 or bf16, None for masses only.
        first_chunk: index of the first blob's chunk.
        approximate: whether the rows were computed with reuse themselves.
        measured: bool [chunks * chunk_blocks], block rows that were measured whole.
        offsets: i64 [chunks]: where each blob begins in the source that it was read from.
        num_bytes: i64 [chunks], of each blob.
        sections: i64 [chunks, heads, 4]: offsets of a head's mass, indptr, indices and tiles in its own blob.
        num_tiles: i64 [chunks, heads].
    """

    block: int
    num_heads: int
    chunk_blocks: int
    tile_dtype: torch.dtype | None
    first_chunk: int
    approximate: bool
    measured: npt.NDArray[np.bool_]
    offsets: Numbers
    num_bytes: Numbers
    sections: Numbers
    num_tiles: Numbers

    @property
    def num_chunks(self) -> int:
        """Blobs of the run."""
        return len(self.num_bytes)

    def has_heads(self, source: Bytes, heads: Sequence[int]) -> bool:
        """Whether these heads were measured in every blob, told by their mass on the diagonal.

        A head that nobody had asked for has masses of zero. A measured one whose diagonal rounds to zero is taken for
        absent, which is the safe side.
        """
        row = self.measured.reshape(self.num_chunks, -1).argmax(1)
        width = (self.first_chunk + np.arange(self.num_chunks) + 1) * self.chunk_blocks
        diagonal = self.offsets + row * width + width - self.chunk_blocks + row
        return bool(source[self.sections[:, list(heads), 0] + diagonal[:, None]].all())


def read_runs(source: Bytes, offsets: Numbers, sizes: Numbers, identities: npt.NDArray[np.uint64]) -> list[BlobRun]:
    """Read the prologues of consecutive chunks' blobs, of one layer or of several that are alike.

    Args:
        source: u8 [bytes] that hold all of them.
        offsets, sizes: i64 [layers, chunks]: where each blob begins, and how many bytes it may have.
        identities: u64 [layers, chunks], see `write_blob`.

    Raises:
        BlobError: anything is wrong with one of them, or they are not alike or don't follow each other.
        ValueError: there are none, or bytes outside the source.
    """
    layers, num_chunks = offsets.shape
    at, room = offsets.ravel(), sizes.ravel()
    if not at.size or not offsets.shape == sizes.shape == identities.shape:
        raise ValueError(f"expected offsets, sizes and identities of a blob or more, got {offsets.shape}")
    if (at < 0).any() or (room < 0).any() or (at + room > len(source)).any():
        raise ValueError(f"blobs: some lie outside their source of {len(source)} bytes")
    first = read_prologue(source[at[0] : at[0] + room[0]].data)[0]
    prologues = _copy_prologues(source, at, room, first)
    fields = prologues[:, : layout.HEADER_BYTES].copy().view(_FIELDS)[:, 0]
    chunks = np.tile(np.arange(num_chunks, dtype=np.int64) + first.chunk_index, layers)
    _check(fields["alike"] == fields["alike"][0], prologues, "another kind of map than the first")
    _check(fields["identity"] == identities.ravel(), prologues, "", BlobErrorReason.IDENTITY)
    _check(_checksums(prologues) == _stored_checksums(prologues), prologues, "", BlobErrorReason.CHECKSUM)
    _check(fields["chunk_index"] == chunks, prologues, "chunks that do not follow each other")
    columns = (chunks + 1) * first.num_row_blocks
    _check((fields["num_col_blocks"] == columns) & (fields["reserved"] == 0), prologues, "columns of another chunk")
    table = _head_tables(prologues, first)
    sections, spans = table[:, :, 0], table[:, :, 1]
    ends = sections + spans
    gapless = (sections[:, 0] == first.prologue_bytes) & (sections[:, 1:] == ends[:, :-1]).all(1)
    total = fields["total_bytes"].astype(np.int64)
    _check(gapless & (ends[:, -1] == total), prologues, "sections with gaps")
    _check(room >= total, prologues, "", BlobErrorReason.TRUNCATED)
    parts, num_tiles, fits = _sections(spans, columns, first)
    _check(fits.all(1), prologues, "sections of another size than their tiles need")
    counts = prologues[:, layout.HEADER_BYTES : layout.HEADER_BYTES + 4 * first.num_row_blocks].copy().view("<i4")
    starts = sections[:, :, None] + parts
    return [
        BlobRun(
            block=first.block,
            num_heads=first.num_heads,
            chunk_blocks=first.num_row_blocks,
            tile_dtype=TILE_DTYPES_BY_CODE.get(first.tile_dtype),
            first_chunk=first.chunk_index,
            approximate=bool(first.flags & layout.FLAG_APPROXIMATE),
            measured=(counts[one] == first.block).reshape(-1),
            offsets=at[one],
            num_bytes=total[one],
            sections=starts[one],
            num_tiles=num_tiles[one],
        )
        for one in (slice(begin, begin + num_chunks) for begin in range(0, at.size, num_chunks))
    ]


def _copy_prologues(source: Bytes, at: Numbers, room: Numbers, first: Header) -> Bytes:
    """u8 [blobs, bytes of a prologue]."""
    if (room < first.prologue_bytes).any():
        raise BlobError(BlobErrorReason.TRUNCATED, f"{room.min()} bytes for header and tables")
    windows = np.lib.stride_tricks.as_strided(
        source, (len(source) - first.prologue_bytes + 1, first.prologue_bytes), (1, 1), writeable=False
    )
    copied: Bytes = windows[at]
    return copied


def _check(
    good: npt.ArrayLike,
    prologues: Bytes,
    message: str,
    reason: BlobErrorReason = BlobErrorReason.MALFORMED,
) -> None:
    if bool(np.all(good)):
        return
    number = int(np.argmin(good))
    start = prologues[number, :8].tobytes()
    if start[:4] != layout.MAGIC:
        raise BlobError(BlobErrorReason.BAD_MAGIC, f"blob {number}: {start[:4]!r}")
    if start[4:6] != layout.FORMAT_VERSION.to_bytes(2, "little"):
        raise BlobError(BlobErrorReason.VERSION_SKEW, f"blob {number} is of version {start[4] + 256 * start[5]}")
    raise BlobError(reason, f"blob {number}: {message}" if message else f"blob {number}")


def _checksums(prologues: Bytes) -> npt.NDArray[np.uint64]:
    blank = prologues.copy()
    blank[:, layout.CHECKSUM_FIELD] = 0
    return np.array([xxhash.xxh3_64_intdigest(one.data) for one in blank], dtype=np.uint64)


def _stored_checksums(prologues: Bytes) -> npt.NDArray[np.uint64]:
    return prologues[:, layout.CHECKSUM_FIELD].copy().view("<u8")[:, 0]


def _head_tables(prologues: Bytes, first: Header) -> Numbers:
    """i64 [chunks, heads, 3]: offset, bytes, checksum."""
    start, size = first.head_table_offset, layout.HEAD_ENTRY.size * first.num_heads
    table = prologues[:, start : start + size].copy().view("<i8")
    return table.reshape(len(prologues), first.num_heads, 3)


def _sections(sizes: Numbers, columns: Numbers, first: Header) -> tuple[Numbers, Numbers, npt.NDArray[np.bool_]]:
    """Offsets inside each head's section [chunks, heads, 4], its tiles [chunks, heads], and whether they fill it."""
    indptr = layout.align(first.num_row_blocks * columns)[:, None]
    if first.tile_dtype == layout.TILES_NONE:
        num_tiles = np.zeros_like(sizes)
        at = [np.zeros_like(sizes), *[np.broadcast_to(indptr, sizes.shape)] * 3]
        return np.stack(at, axis=2), num_tiles, sizes == indptr
    indices = layout.align(indptr + 4 * (first.num_row_blocks + 1))
    tile_bytes = HeadLayout(first, 1).tiles_bytes
    num_tiles = (sizes - indices) // (tile_bytes + 4)  # what alignment adds is less than one tile
    tiles = layout.align(indices + 4 * num_tiles)
    fits = (num_tiles >= 0) & (sizes == layout.align(tiles + num_tiles * tile_bytes))
    at = [np.zeros_like(sizes), np.broadcast_to(indptr, sizes.shape), np.broadcast_to(indices, sizes.shape), tiles]
    return np.stack(at, axis=2), num_tiles, fits
