"""Compile before serving: run every kernel that an engine will use once, on inputs as small as can be.

What a kernel is compiled for are its constants (block, head_dim, heads of a group, page size, dtypes, and the width of
a selection, a power of two), never sizes of a step. After it no call with the same constants compiles; a test counts.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch

from mapflow.kernels.attention_map import AttentionMap, TileSet
from mapflow.kernels.block_rows import BlockRows
from mapflow.kernels.checksum import section_checksums
from mapflow.kernels.compress import block_masses
from mapflow.kernels.guide import guide_attention
from mapflow.kernels.head_sections import MeasuredRows, SectionTable, lay_out_sections
from mapflow.kernels.map_table import MapTable
from mapflow.kernels.mass_tasks import MassTasks
from mapflow.kernels.paged import PagedKV
from mapflow.kernels.row_segment import RowSegment
from mapflow.kernels.select import select_blocks, select_by_mass, select_static
from mapflow.kernels.tensor_check import check_group, check_int
from mapflow.kernels.tiles import store_tiles
from mapflow.kernels.translate import translate_attention
from mapflow.kernels.translate_dense import translate_all_heads


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Warmer:
    """One engine's constants.

    Attributes:
        kv: one layer of the engine's own cache, whose page size and strides are compiled in; only read, on page 0.
        num_heads: query heads of that layer on this GPU.
        block, chunk_tokens: of the maps.
        max_tokens: longest prompt.
    """

    kv: PagedKV
    num_heads: int
    block: int
    chunk_tokens: int
    max_tokens: int

    def __post_init__(self) -> None:
        check_group(self.num_heads, self.kv.num_kv_heads)
        check_int("max_tokens", self.max_tokens, minimum=1)
        check_int("chunk_tokens", self.chunk_tokens, minimum=self.block)

    def warm_receiver(self, tile_dtypes: Collection[torch.dtype] = (), *, all_heads: bool = False) -> None:
        """Guide and static; translate with tiles of these dtypes (and all heads at once, if asked for)."""
        query, out = self._rows(), self._rows()
        for tokens in self._lengths():
            maps = self._maps(tokens, None)
            rows = self._block_rows(tokens, maps)
            head_map = torch.ones(self.num_heads, 1, device=self.kv.device)
            select_static(rows, self.num_heads, sink_blocks=1, local_blocks=1)
            index = select_blocks(maps, rows, head_map, 0.5, sink_blocks=1, local_blocks=1)
        guide_attention(query, self.kv, rows, index, scale=1.0, out=out)
        for tile_dtype in tile_dtypes:
            maps = self._maps(1, tile_dtype)
            rows = self._block_rows(1, maps)
            heads = torch.zeros(self.num_heads, 1, dtype=torch.int32, device=self.kv.device)
            own = self.kv.value_cache.dtype
            for value_dtype in (own, tile_dtype) if tile_dtype == torch.float8_e4m3fn else (own,):
                translate_attention(
                    self.kv, rows, maps, head_index=heads, head_weight=heads.float(), out=out, value_dtype=value_dtype
                )
                if all_heads:
                    translate_all_heads(self.kv, rows, maps, head_map=heads.float(), out=out, value_dtype=value_dtype)

    def warm_sender(self, tile_dtypes: Collection[torch.dtype] = (), *, row_strides: Collection[int] = (1,)) -> None:
        """Masses at these strides, and tiles of these dtypes."""
        query = self._rows(self.block)
        lse = torch.zeros(self.num_heads, self.block, device=self.kv.device)
        group = self.num_heads // self.kv.num_kv_heads
        for tokens in self._lengths():
            rows = self._block_rows(tokens)
            mass = torch.zeros(rows.num_lines, self.num_heads, rows.num_columns, device=self.kv.device)
            select_by_mass(mass, rows, 0.5)
        segment = RowSegment(row_begin=0, row_end=self.block, out_begin=0, block_table=self._table(self.block))
        rows = BlockRows.from_segments([segment], block=self.block, num_batch_rows=self.block, device=self.kv.device)
        mass = torch.zeros(1, self.num_heads, 1, device=self.kv.device)
        for row_stride in row_strides:
            tasks = MassTasks.build(rows, group=group, row_stride=row_stride)
            options: dict[str, Any] = {"scale": 1.0, "mass": mass, "row_lse": lse}
            for key_dtype in (None, torch.float8_e4m3fn):
                block_masses(query, self.kv, tasks, **options, key_dtype=key_dtype)
            block_masses(query, self.kv, tasks, **options, is_lse_known=True)
        for tile_dtype in tile_dtypes:
            size = self.block**2 * tile_dtype.itemsize
            arena = torch.empty(self.num_heads * size, dtype=torch.uint8, device=self.kv.device)
            offsets = torch.arange(self.num_heads, device=self.kv.device)[None] * size
            index = select_static(rows, self.num_heads, sink_blocks=0, local_blocks=0)
            store_tiles(
                query, self.kv, rows, index, lse, scale=1.0, tile_dtype=tile_dtype, arena=arena, offsets=offsets
            )
        self._warm_sections(rows)

    def _warm_sections(self, rows: BlockRows) -> None:
        """What lays maps out as blobs; rows: one block row."""
        one = MeasuredRows(chunk_index=0, row=0, num_rows=1, slot=0)
        mass = torch.zeros(1, self.num_heads, 1, device=self.kv.device)
        finite = torch.ones(1, dtype=torch.uint8, device=self.kv.device)
        factors = torch.ones(self.num_heads, device=self.kv.device)
        ends = torch.zeros(1, self.num_heads, dtype=torch.int64, device=self.kv.device)
        arena = torch.empty(self.num_heads * 4096, dtype=torch.uint8, device=self.kv.device)
        for tiled in (False, True):
            chunk_rows = self.chunk_tokens // self.block
            sizes = {"num_heads": self.num_heads, "chunk_rows": chunk_rows}
            table = SectionTable.build([one], rows.lines[:, 6], **sizes, tiled=tiled)
            index = select_static(rows, self.num_heads, sink_blocks=0, local_blocks=0) if tiled else None
            places: dict[str, Any] = {"finite": finite, "ends": ends, "arena": arena}
            lay_out_sections(table, mass, factors, index, tile_bytes=64 * tiled, **places)
        section_checksums(arena, ends)

    def _lengths(self) -> list[int]:
        """Prompt lengths whose selections have each width once, shortest first."""
        width, lengths = 16, []
        while width * self.block < self.max_tokens:
            lengths.append(width * self.block)
            width *= 2
        return [*lengths, self.max_tokens]

    def _rows(self, num_rows: int = 1) -> torch.Tensor:
        shape = (num_rows, self.num_heads, self.kv.head_dim)
        return torch.zeros(shape, dtype=self.kv.key_cache.dtype, device=self.kv.device)

    def _table(self, tokens: int) -> torch.Tensor:
        """Page 0 for all of them."""
        return torch.zeros(-(-tokens // self.kv.page_size), dtype=torch.int32)

    def _block_rows(self, tokens: int, maps: MapTable | None = None) -> BlockRows:
        """The last row of a prompt of `tokens`."""
        segment = RowSegment(row_begin=tokens - 1, row_end=tokens, out_begin=0, block_table=self._table(tokens))
        return BlockRows.from_segments(
            [segment],
            block=self.block,
            num_batch_rows=1,
            device=self.kv.device,
            chunk_blocks=1 if maps is None else maps.chunk_blocks,
            spans=None if maps is None else maps.spans,
        )

    def _maps(self, tokens: int, tile_dtype: torch.dtype | None) -> MapTable:
        """The last chunk of a prompt of `tokens`, one head; with tiles, the diagonal ones."""
        rows, chunk = self.chunk_tokens // self.block, (tokens - 1) // self.chunk_tokens
        columns = (chunk + 1) * rows
        tiles = None
        if tile_dtype is not None:
            tiles = TileSet(
                indptr=torch.arange(rows + 1, dtype=torch.int32)[None],
                indices=torch.arange(columns - rows, columns, dtype=torch.int32),
                values=torch.zeros(rows, self.block, self.block).to(tile_dtype),
            )
        one = AttentionMap(
            chunk_index=chunk,
            block=self.block,
            mass=torch.zeros(1, rows, columns, dtype=torch.uint8),
            row_counts=torch.full((rows,), self.block, dtype=torch.int32),
            tiles=tiles,
        )
        return MapTable.from_maps([[one]], self.kv.device)
