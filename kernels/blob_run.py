"""Where the parts of consecutive chunks' blobs lie, read from their prologues alone, all blobs at once.

For a reader that copies whole blobs to an accelerator and lets the kernels read them in place (`MapTable`): the host
sees a few hundred bytes of each blob and none of its masses and tiles. Verified are header, tables and their checksum,
which pins every offset that the kernels start from; the heads' own checksums are not, because no host reads tiles as
fast as a GPU takes them in. That the bytes stay what they are until they are copied is the caller's lease's business.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from mapflow.kernels import blob_layout as layout
from mapflow.kernels.blob import TILE_DTYPES_BY_CODE, BlobError, BlobErrorReason, read_prologue
from mapflow.kernels.blob_layout import Header, HeadLayout

Buffer = bytes | bytearray | memoryview

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
    num_bytes: npt.NDArray[np.int64]
    sections: npt.NDArray[np.int64]
    num_tiles: npt.NDArray[np.int64]

    @property
    def num_chunks(self) -> int:
        """Blobs of the run."""
        return len(self.num_bytes)

    def has_heads(self, buffers: Sequence[Buffer], heads: Sequence[int]) -> bool:
        """Whether these heads were measured in every blob, told by their mass on the diagonal.

        A head that nobody had asked for has masses of zero. A measured one whose diagonal rounds to zero is taken for
        absent, which is the safe side.
        """
        measured = self.measured.reshape(self.num_chunks, -1)
        row = measured.argmax(1)
        width = (self.first_chunk + np.arange(self.num_chunks) + 1) * self.chunk_blocks
        diagonal = row * width + width - self.chunk_blocks + row
        at = self.sections[:, list(heads), 0] + diagonal[:, None]
        found = (np.frombuffer(buffer, dtype=np.uint8)[places] for buffer, places in zip(buffers, at))
        return all(bool(values.all()) for values in found)


def read_run(buffers: Sequence[Buffer], identities: Sequence[int]) -> BlobRun:
    """Read the prologues of consecutive chunks' blobs.

    `identities`: of each blob, see `write_blob`. Raises BlobError for anything wrong with one of them, or if they are
    not alike or don't follow each other; ValueError for no buffers.
    """
    if not buffers or len(buffers) != len(identities):
        raise ValueError(f"buffers: expected one or more and as many identities, got {len(buffers)}, {len(identities)}")
    views = [memoryview(buffer).cast("B") for buffer in buffers]
    first = read_prologue(views[0])[0]
    prologues = _copy_prologues(views, first)
    fields = prologues[:, : layout.HEADER_BYTES].copy().view(_FIELDS)[:, 0]
    chunks = np.arange(len(buffers), dtype=np.int64) + first.chunk_index
    _check(fields["alike"] == fields["alike"][0], prologues, "another kind of map than the first")
    _check(fields["identity"] == np.array(identities, dtype=np.uint64), prologues, "", BlobErrorReason.IDENTITY)
    _check(_checksums(prologues) == _stored_checksums(prologues), prologues, "", BlobErrorReason.CHECKSUM)
    _check(fields["chunk_index"] == chunks, prologues, "chunks that do not follow each other")
    columns = (chunks + 1) * first.num_row_blocks
    _check((fields["num_col_blocks"] == columns) & (fields["reserved"] == 0), prologues, "columns of another chunk")
    table = _head_tables(prologues, first)
    offsets, sizes = table[:, :, 0], table[:, :, 1]
    ends = offsets + sizes
    gapless = (offsets[:, 0] == first.prologue_bytes) & (offsets[:, 1:] == ends[:, :-1]).all(1)
    total = fields["total_bytes"].astype(np.int64)
    _check(gapless & (ends[:, -1] == total), prologues, "sections with gaps")
    _check(np.array([len(view) for view in views]) >= total, prologues, "", BlobErrorReason.TRUNCATED)
    parts, num_tiles, fits = _sections(sizes, columns, first)
    _check(fits.all(1), prologues, "sections of another size than their tiles need")
    counts = prologues[:, layout.HEADER_BYTES : layout.HEADER_BYTES + 4 * first.num_row_blocks].copy().view("<i4")
    return BlobRun(
        block=first.block,
        num_heads=first.num_heads,
        chunk_blocks=first.num_row_blocks,
        tile_dtype=TILE_DTYPES_BY_CODE.get(first.tile_dtype),
        first_chunk=first.chunk_index,
        approximate=bool(first.flags & layout.FLAG_APPROXIMATE),
        measured=(counts == first.block).reshape(-1),
        num_bytes=total,
        sections=offsets[:, :, None] + parts,
        num_tiles=num_tiles,
    )


def _copy_prologues(views: Sequence[memoryview], first: Header) -> npt.NDArray[np.uint8]:
    prologues = np.empty((len(views), first.prologue_bytes), dtype=np.uint8)
    for number, view in enumerate(views):
        if len(view) < first.prologue_bytes:
            raise BlobError(BlobErrorReason.TRUNCATED, f"blob {number}: {len(view)} bytes")
        prologues[number] = np.frombuffer(view, dtype=np.uint8, count=first.prologue_bytes)
    return prologues


def _check(
    good: npt.ArrayLike,
    prologues: npt.NDArray[np.uint8],
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


def _checksums(prologues: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
    blank = prologues.copy()
    blank[:, layout.CHECKSUM_FIELD] = 0
    return np.array([xxhash.xxh3_64_intdigest(one.data) for one in blank], dtype=np.uint64)


def _stored_checksums(prologues: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
    return prologues[:, layout.CHECKSUM_FIELD].copy().view("<u8")[:, 0]


def _head_tables(prologues: npt.NDArray[np.uint8], first: Header) -> npt.NDArray[np.int64]:
    """i64 [chunks, heads, 3]: offset, bytes, checksum."""
    start, size = first.head_table_offset, layout.HEAD_ENTRY.size * first.num_heads
    table = prologues[:, start : start + size].copy().view("<i8")
    return table.reshape(len(prologues), first.num_heads, 3)


def _sections(
    sizes: npt.NDArray[np.int64], columns: npt.NDArray[np.int64], first: Header
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
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
