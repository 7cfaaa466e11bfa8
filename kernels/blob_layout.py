"""Offsets and fields of the serialised attention map, format 1: what both the writer and the reader in `blob.py` know.

All integers little-endian. Every section starts at a multiple of 64 bytes; the gaps are zero.

    offset              bytes  what
    0                      64  header, see `Header`
    64                    4*R  row_counts, i32
    align8(64 + 4*R)     24*H  head table: u64 offset, u64 num_bytes, u64 xxh3_64 of those bytes; one entry a head
    align64(...)               head 0, then head 1, ... without gaps; each one:
                          R*C  mass, u8
                      4*(R+1)  indptr, i32, local to the head      } only if tiles
                        4*nnz  indices, i32                        } are stored
                      nnz*b*b  tiles, one byte (e4m3) or two (bf16) }

The header's checksum covers everything in front of head 0 (its own field taken as zero), so that a reader that
verifies the header and the heads it takes has verified every byte it used. No torch here, and no I/O.
"""

import struct
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
import xxhash

_Offset = TypeVar("_Offset", int, npt.NDArray[np.int64])

MAGIC = b"MFAM"
FORMAT_VERSION = 1
KIND_MAP = 1
MASS_U8_SQRT = 1  # of masses as `attention_map.py` has them
TILES_NONE, TILES_E4M3_256, TILES_BF16 = 0, 1, 2
TILE_ITEM_BYTES = {TILES_NONE: 0, TILES_E4M3_256: 1, TILES_BF16: 2}
FLAG_APPROXIMATE = 1

HEADER_BYTES = 64
HEAD_ENTRY = struct.Struct("<QQQ")
IDENTITY_FIELD, CHECKSUM_FIELD = slice(48, 56), slice(56, 64)
# magic, version, header bytes, kind, mass dtype, tile dtype, 0,
# flags, block, num_heads, num_row_blocks, num_col_blocks, chunk_index, 0, total bytes, identity, checksum
_HEADER = struct.Struct("<4sHHBBBBIIIIIIIQQQ")


def checksum(data: npt.NDArray[np.generic] | bytearray) -> int:
    """xxh3_64 of bytes."""
    return int(xxhash.xxh3_64_intdigest(data if isinstance(data, bytearray) else data.data))


def align(offset: _Offset, to: int = 64) -> _Offset:
    """`offset`, a number or an array of them, rounded up to a multiple of `to`."""
    return -(-offset // to) * to


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The fixed header, 64 bytes."""

    tile_dtype: int  # TILES_*
    flags: int  # FLAG_* bits
    block: int  # tokens along one side of a block
    num_heads: int
    num_row_blocks: int
    num_col_blocks: int
    chunk_index: int
    total_bytes: int = 0  # of the whole blob, a multiple of 64
    identity: int = 0  # what the writer tied the blob to, 0 for nothing
    checksum: int = 0  # xxh3_64 of the prologue with this field zero
    version: int = FORMAT_VERSION
    header_bytes: int = HEADER_BYTES
    kind: int = KIND_MAP
    mass_dtype: int = MASS_U8_SQRT
    reserved: tuple[int, int] = (0, 0)

    def pack(self) -> bytes:
        """The 64 bytes of the header."""
        return _HEADER.pack(
            MAGIC,
            self.version,
            self.header_bytes,
            self.kind,
            self.mass_dtype,
            self.tile_dtype,
            self.reserved[0],
            self.flags,
            self.block,
            self.num_heads,
            self.num_row_blocks,
            self.num_col_blocks,
            self.chunk_index,
            self.reserved[1],
            self.total_bytes,
            self.identity,
            self.checksum,
        )

    @classmethod
    def unpack(cls, data: bytes) -> "Header":
        """Read 64 bytes; nothing is validated, and the magic is the caller's to look at."""
        fields = _HEADER.unpack(data)
        return cls(
            version=fields[1],
            header_bytes=fields[2],
            kind=fields[3],
            mass_dtype=fields[4],
            tile_dtype=fields[5],
            reserved=(fields[6], fields[13]),
            identity=fields[15],
            flags=fields[7],
            block=fields[8],
            num_heads=fields[9],
            num_row_blocks=fields[10],
            num_col_blocks=fields[11],
            chunk_index=fields[12],
            total_bytes=fields[14],
            checksum=fields[16],
        )

    @property
    def head_table_offset(self) -> int:
        """Where the head table begins, behind the header and row_counts."""
        return align(HEADER_BYTES + 4 * self.num_row_blocks, 8)

    @property
    def prologue_bytes(self) -> int:
        """Header, tables and the gap behind them: everything in front of head 0."""
        return align(self.head_table_offset + HEAD_ENTRY.size * self.num_heads)


@dataclass(frozen=True, slots=True)
class HeadLayout(Generic[_Offset]):
    """Offsets inside one head's section, from its own beginning; of several heads, where `num_tiles` is an array."""

    header: Header
    num_tiles: _Offset

    @property
    def mass_bytes(self) -> int:
        """Bytes of the masses, without padding; they begin at 0."""
        return self.header.num_row_blocks * self.header.num_col_blocks

    @property
    def indptr_offset(self) -> int:
        """Where indptr begins."""
        return align(self.mass_bytes)

    @property
    def indices_offset(self) -> int:
        """Where indices begin."""
        return align(self.indptr_offset + 4 * (self.header.num_row_blocks + 1))

    @property
    def tiles_offset(self) -> _Offset:
        """Where the tiles begin."""
        return align(self.indices_offset + 4 * self.num_tiles)

    @property
    def tiles_bytes(self) -> _Offset:
        """Bytes of the tiles, without padding."""
        return self.num_tiles * self.header.block**2 * TILE_ITEM_BYTES[self.header.tile_dtype]

    @property
    def num_bytes(self) -> _Offset:
        """Bytes of the whole section, padding included."""
        if self.header.tile_dtype == TILES_NONE:
            return align(self.mass_bytes) + 0 * self.num_tiles
        return align(self.tiles_offset + self.tiles_bytes)
