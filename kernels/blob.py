"""Read an `AttentionMap`, all heads or some, from bytes that `blob_writer.py` wrote and that others may be writing to.

It trusts nothing: it copies first, verifies checksums on the copy, and only then builds tensors, so an extent
that is torn, evicted or reused while it is read is detected and never used. It allocates no more than a small
multiple of the buffer. Format: `blob_layout.py`. No sockets, leases or shared-memory segments here.
"""

import enum
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from mapflow.kernels import blob_layout as layout
from mapflow.kernels.attention_map import MAX_CHUNK_INDEX, AttentionMap, TileSet
from mapflow.kernels.blob_layout import Header, HeadLayout
from mapflow.kernels.tensor_check import check_block, check_heads

TILE_DTYPES_BY_CODE = {layout.TILES_E4M3_256: torch.float8_e4m3fn, layout.TILES_BF16: torch.bfloat16}


class BlobErrorReason(enum.StrEnum):
    """Why bytes were refused; the values are fit for a metric label."""

    BAD_MAGIC = "bad_magic"  # not an attention map at all
    VERSION_SKEW = "version_skew"  # another format version
    TRUNCATED = "truncated"  # fewer bytes than the blob needs
    CHECKSUM = "checksum"  # torn, overwritten or damaged
    IDENTITY = "identity"  # sound, but of another entry than the one asked for
    MALFORMED = "malformed"  # intact bytes that make no valid map, or lack a head asked for


class BlobError(ValueError):
    """The bytes are not a usable blob; `reason` says why."""

    def __init__(self, reason: BlobErrorReason, message: str) -> None:
        super().__init__(f"{reason.value}: {message}")
        self.reason = reason


def read_blob(
    buffer: bytes | bytearray | memoryview, heads: Sequence[int] | None = None, *, identity: int = 0
) -> AttentionMap:
    """Copy an attention map out of the front of `buffer` (which may be longer), then verify the copy.

    `heads` picks the heads and their order in the result (default: all); only their bytes are read. Raises BlobError
    for anything wrong with the bytes, a head that the blob lacks or another `identity` included; TypeError or
    ValueError for a repeated or negative head.
    """
    view = memoryview(buffer).cast("B")
    header, prologue = read_prologue(view)
    if header.identity != identity:
        raise BlobError(BlobErrorReason.IDENTITY, f"expected {identity:016x}, the blob says {header.identity:016x}")
    wanted = check_heads(range(header.num_heads) if heads is None else heads, 2**32)
    if not wanted or max(wanted) >= header.num_heads:
        raise _malformed(f"expected one or more of the blob's {header.num_heads} heads, got {list(wanted)}")
    parts = [_read_head(view, header, prologue, head) for head in wanted]
    row_counts = np.frombuffer(prologue, dtype="<i4", count=header.num_row_blocks, offset=layout.HEADER_BYTES)
    try:
        return AttentionMap(
            chunk_index=header.chunk_index,
            block=header.block,
            mass=torch.stack([mass for mass, _, _, _ in parts]),
            row_counts=_tensor(row_counts),
            tiles=_join_tiles(header, parts) if header.tile_dtype != layout.TILES_NONE else None,
            approximate=bool(header.flags & layout.FLAG_APPROXIMATE),
        )
    except ValueError as error:
        raise _malformed(str(error)) from error


_Head = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]  # mass, indptr, indices, tile bits of one head
_Array = npt.NDArray[np.generic]


def _malformed(message: str) -> BlobError:
    return BlobError(BlobErrorReason.MALFORMED, message)


def read_prologue(view: memoryview) -> tuple[Header, bytearray]:
    """Copy header and tables, everything in front of head 0, and verify all about them; raises BlobError."""
    start = bytes(view[: layout.HEADER_BYTES])
    if start[:4] != layout.MAGIC[: len(start)]:
        raise BlobError(BlobErrorReason.BAD_MAGIC, f"expected {layout.MAGIC!r}, got {start[:4]!r}")
    if len(start) < layout.HEADER_BYTES:
        raise BlobError(BlobErrorReason.TRUNCATED, f"expected a header of 64 bytes, got {len(start)}")
    header = Header.unpack(start)
    if header.version != layout.FORMAT_VERSION:
        raise BlobError(
            BlobErrorReason.VERSION_SKEW,
            f"this build reads format version {layout.FORMAT_VERSION}, the blob is of version {header.version}",
        )
    needed = max(header.prologue_bytes, header.total_bytes)
    if needed > len(view):
        raise BlobError(BlobErrorReason.TRUNCATED, f"expected {needed} bytes, got {len(view)}")
    prologue = bytearray(start) + view[layout.HEADER_BYTES : header.prologue_bytes]
    prologue[layout.CHECKSUM_FIELD] = bytes(8)
    if layout.checksum(prologue) != header.checksum:
        raise BlobError(BlobErrorReason.CHECKSUM, "header and tables")
    _check_header(header)
    end = header.prologue_bytes
    for offset, num_bytes, _ in layout.HEAD_ENTRY.iter_unpack(_head_table(header, prologue)):
        if offset != end or num_bytes % 64:
            raise _malformed(f"head table: expected sections of whole 64 bytes without gaps, got offset {offset}")
        end += num_bytes
    if end != header.total_bytes:
        raise _malformed(f"total bytes: expected {end} as the head table says, got {header.total_bytes}")
    return header, prologue


def _head_table(header: Header, prologue: bytearray) -> memoryview:
    start = header.head_table_offset
    return memoryview(prologue)[start : start + layout.HEAD_ENTRY.size * header.num_heads]


def _check_header(header: Header) -> None:
    known = (layout.HEADER_BYTES, layout.KIND_MAP, layout.MASS_U8_SQRT, (0, 0))
    got = (header.header_bytes, header.kind, header.mass_dtype, header.reserved)
    if got != known or header.tile_dtype not in layout.TILE_ITEM_BYTES or header.flags & ~layout.FLAG_APPROXIMATE:
        raise _malformed(f"unknown kind, dtype, flag or reserved field in {header}")
    try:
        check_block(header.block)
    except ValueError as error:
        raise _malformed(str(error)) from error
    rows, columns, chunk_index = header.num_row_blocks, header.num_col_blocks, header.chunk_index
    if not header.num_heads or not rows or columns != (chunk_index + 1) * rows or chunk_index > MAX_CHUNK_INDEX:
        raise _malformed(f"{header.num_heads} heads of {rows} x {columns} blocks do not fit chunk {chunk_index}")


def _read_head(view: memoryview, header: Header, prologue: bytearray, head: int) -> _Head:
    """Copy one head's section, verify the copy, and return tensors that share its memory."""
    entry_offset = head * layout.HEAD_ENTRY.size
    offset, num_bytes, checksum = layout.HEAD_ENTRY.unpack_from(_head_table(header, prologue), entry_offset)
    data = bytearray(view[offset : offset + num_bytes])
    if layout.checksum(data) != checksum:
        raise BlobError(BlobErrorReason.CHECKSUM, f"head {head}")
    section = HeadLayout(header, 0)
    if section.num_bytes > num_bytes:
        raise _malformed(f"head {head}: expected at least {section.num_bytes} bytes, got {num_bytes}")
    rows = header.num_row_blocks
    indptr = np.zeros(rows + 1, dtype="<i4")
    if header.tile_dtype != layout.TILES_NONE:
        indptr = np.frombuffer(data, dtype="<i4", count=rows + 1, offset=section.indptr_offset)
        section = HeadLayout(header, max(int(indptr[-1]), 0))
    if section.num_bytes != num_bytes:
        raise _malformed(f"head {head}: expected {section.num_bytes} bytes, got {num_bytes}")
    mass = np.frombuffer(data, dtype=np.uint8, count=section.mass_bytes).reshape(rows, -1)
    if section.num_tiles == 0:
        return _tensor(mass), _tensor(indptr), torch.empty(0, dtype=torch.int32), _tensor(np.zeros(0, dtype=np.uint8))
    indices = np.frombuffer(data, dtype="<i4", count=section.num_tiles, offset=section.indices_offset)
    bits = np.frombuffer(data, dtype=np.uint8, count=section.tiles_bytes, offset=section.tiles_offset)
    return _tensor(mass), _tensor(indptr), _tensor(indices), _tensor(bits)


def _tensor(values: _Array) -> torch.Tensor:
    """A tensor in the host's byte order, without a copy where that is the blob's."""
    return torch.from_numpy(values.astype(values.dtype.newbyteorder("="), copy=False))


def _join_tiles(header: Header, parts: Sequence[_Head]) -> TileSet:
    dtype, block = TILE_DTYPES_BY_CODE[header.tile_dtype], header.block
    starts = np.cumsum([0] + [indices.shape[0] for _, _, indices, _ in parts[:-1]])
    bits = parts[0][3] if len(parts) == 1 else torch.cat([tile_bits for _, _, _, tile_bits in parts])
    if dtype == torch.bfloat16:
        bits = _tensor(bits.numpy().view("<i2"))
    return TileSet(
        indptr=torch.stack([indptr + int(start) for start, (_, indptr, _, _) in zip(starts, parts)]),
        indices=torch.cat([indices for _, _, indices, _ in parts]),
        values=bits.view(dtype).view(-1, block, block),
    )
