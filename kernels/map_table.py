"""Attention maps where the kernels read them: blobs in one byte arena on the device, and where each head's parts lie.

The kernels read the wire format of `blob_layout.py` in place, so a map that was copied to the GPU needs no unpacking.
Offsets are 64-bit: an arena may well exceed 2**31 bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mapflow.kernels.attention_map import AttentionMap
from mapflow.kernels.blob_layout import HEAD_ENTRY, HEADER_BYTES, TILES_NONE, Header, HeadLayout
from mapflow.kernels.blob_writer import blob_num_bytes, write_blob
from mapflow.kernels.block_rows import BlockRows, ChunkSpan, check_kernel_block
from mapflow.kernels.mask import check_consecutive
from mapflow.kernels.tensor_check import check_tensor
from mapflow.kernels.tile_codec import TILE_DTYPES, TILE_SCALE


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MapTable:
    """The maps of one sender layer for all segments of a step.

    Attributes:
        arena: u8 [bytes], where the blobs lie; each starts at a multiple of 64.
        sections: i64 [num chunks, num_heads, 4]: byte offsets of a head's mass, indptr, indices and tiles.
        spans: which chunks each segment has, in the order of the segments.
        block, chunk_blocks: tokens of a block, block rows of a chunk; the same for all.
        tile_dtype: e4m3 or bf16, None for masses only.
    """

    arena: torch.Tensor
    sections: torch.Tensor
    spans: tuple[ChunkSpan, ...]
    block: int
    chunk_blocks: int
    tile_dtype: torch.dtype | None

    def __post_init__(self) -> None:
        check_kernel_block(self.block)
        check_tensor("arena", self.arena, shape=("bytes",), dtypes=(torch.uint8,))
        device = self.arena.device
        check_tensor("sections", self.sections, shape=("chunks", "heads", 4), dtypes=(torch.int64,), device=device)
        if self.tile_dtype is not None and self.tile_dtype not in TILE_DTYPES:
            raise ValueError(f"tile_dtype: expected e4m3, bf16 or None, got {self.tile_dtype}")
        if self.arena.data_ptr() % 16:
            raise ValueError("arena: expected an address that is a multiple of 16")

    @classmethod
    def from_maps(cls, maps: Sequence[Sequence[AttentionMap]], device: torch.device) -> "MapTable":
        """Copy the consecutive chunks of each segment into a new arena.

        Raises ValueError for chunks that don't follow each other, or for segments whose maps differ in block, heads,
        chunk size or tile dtype.
        """
        spans: list[ChunkSpan] = []
        offsets: list[list[list[int]]] = []
        data = bytearray()
        for chunks in maps:
            check_consecutive(chunks)
            spans.append(ChunkSpan(first_chunk=chunks[0].chunk_index, num_chunks=len(chunks), slot=len(offsets)))
            for chunk in chunks:
                if _kind(chunk) != _kind(maps[0][0]):
                    names = "(block, num_heads, block rows, tile dtype)"
                    raise ValueError(f"maps: expected {names} {_kind(maps[0][0])}, got {_kind(chunk)}")
                start = len(data)
                data += bytes(blob_num_bytes(chunk))
                with memoryview(data) as view:
                    write_blob(chunk, view[start:])
                offsets.append(_section_offsets(data, start))
        block, _, chunk_blocks, tile_dtype = _kind(maps[0][0])
        return cls(
            arena=torch.frombuffer(data, dtype=torch.uint8).to(device, copy=True),
            sections=torch.tensor(offsets, dtype=torch.int64, device=device),
            spans=tuple(spans),
            block=block,
            chunk_blocks=chunk_blocks,
            tile_dtype=tile_dtype,
        )

    @property
    def tile_scale(self) -> float:
        """What a stored value is of its probability."""
        return TILE_SCALE if self.tile_dtype == torch.float8_e4m3fn else 1.0

    @property
    def num_heads(self) -> int:
        """Sender heads held (Hs)."""
        return self.sections.shape[1]

    def check_fits(self, rows: BlockRows) -> None:
        """Raise ValueError unless `rows` was built for these chunks: same block, device and number of segments."""
        got = (rows.block, rows.device, len(rows.segments))
        wanted = (self.block, self.arena.device, len(self.spans))
        if got != wanted:
            raise ValueError(f"rows: expected (block, device, segments) {wanted} as in the maps, got {got}")


def _kind(one: AttentionMap) -> tuple[int, int, int, torch.dtype | None]:
    return one.block, one.num_heads, one.num_row_blocks, one.tile_dtype


def _section_offsets(data: bytearray, start: int) -> list[list[int]]:
    """Byte offsets of mass, indptr, indices and tiles of every head of the blob at `start`."""
    header = Header.unpack(bytes(data[start : start + HEADER_BYTES]))
    offsets = []
    for head in range(header.num_heads):
        entry = start + header.head_table_offset + head * HEAD_ENTRY.size
        at, _, _ = HEAD_ENTRY.unpack_from(data, entry)
        section = HeadLayout(header, _num_tiles(header, data, start + at))
        parts = (0, section.indptr_offset, section.indices_offset, section.tiles_offset)
        offsets.append([start + at + part for part in parts])
    return offsets


def _num_tiles(header: Header, data: bytearray, section: int) -> int:
    """How many tiles the head's section at `section` holds: the end of its indptr."""
    if header.tile_dtype == TILES_NONE:
        return 0
    end = section + HeadLayout(header, 0).indptr_offset + 4 * header.num_row_blocks
    return int.from_bytes(data[end : end + 4], "little")
