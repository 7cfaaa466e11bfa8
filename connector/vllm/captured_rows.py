"""Block rows measured on a GPU, on their way to a map: where they lie on the device, and what becomes of them.

A step at a layer leaves one `Piece`: the rows of all its requests, in a room of the capture buffer. The publisher's
thread fetches it, which cuts it into the `Part`s that chunks are made of, and later puts a chunk's parts together. The
tiles of a part that is a whole chunk stay where they are until they are written into the daemon's memory: they lie
there as a blob has them, and gigabytes of them are copied but once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch

from mapflow.connector.vllm.capture_buffer import ALIGNMENT, CaptureBuffer, Room
from mapflow.kernels.attention_map import AttentionMap, TileSet
from mapflow.kernels.blob_layout import align


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PartTiles:
    """Kept blocks of a part's rows, head by head, rows inside.

    counts: i64 [rows, num_heads]. columns: i32 [rows, num_heads, columns], undefined behind the counts. values: u8
    [tiles, bytes of a tile], of dtype `dtype`; on the host, or in `room` on the device.
    """

    counts: torch.Tensor
    columns: torch.Tensor
    values: torch.Tensor
    dtype: torch.dtype
    room: Room | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PartRows:
    """mass: u8 [rows, num_heads, columns]. measured: whether a row's masses are finite and its tiles found room."""

    mass: torch.Tensor
    measured: list[bool]
    tiles: PartTiles | None


@dataclass(slots=True, kw_only=True, eq=False)
class Part:
    """`num_rows` block rows of a request from `first_block_row` on, at `slot` of a piece; `rows` once fetched.

    is_chunk: whether they are all rows of a chunk. is_cut: whether their tiles found no room.
    """

    first_block_row: int
    num_rows: int
    slot: int
    is_chunk: bool = False
    is_cut: bool = False
    rows: PartRows | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class Layout:
    """Sections of a piece's room, for `num_rows` block rows (slots) of `num_columns` columns.

    tile_dtype: None without tiles; their sections are `counts`, `columns` and, behind all others, the tiles.
    """

    num_rows: int
    num_heads: int
    num_columns: int
    block: int
    tile_dtype: torch.dtype | None
    _ends: list[int] = field(init=False)

    def __post_init__(self) -> None:
        """Place the sections."""
        cells = self.num_rows * self.num_heads
        sizes = [self.num_rows, cells * self.num_columns]
        if self.tile_dtype is not None:
            sizes += [4 * cells, 4 * cells * self.num_columns]
        self._ends = list(accumulate((align(size, ALIGNMENT) for size in sizes), initial=0))

    @property
    def num_bytes(self) -> int:
        """Of everything in front of the tiles."""
        return self._ends[-1]

    @property
    def tile_bytes(self) -> int:
        """Of one tile; 0 without tiles."""
        return 0 if self.tile_dtype is None else self.block**2 * self.tile_dtype.itemsize

    def finite(self, data: torch.Tensor) -> torch.Tensor:
        """u8 [rows] of a room's bytes: whether the row's masses are finite."""
        return data[: self.num_rows]

    def mass(self, data: torch.Tensor) -> torch.Tensor:
        """u8 [rows, num_heads, columns], as `attention_map.encode_mass` encodes means."""
        return self._section(data, 1, torch.uint8, self.num_columns)

    def counts(self, data: torch.Tensor) -> torch.Tensor:
        """i32 [rows, num_heads]: kept blocks, 0 for heads that nobody wants."""
        return self._section(data, 2, torch.int32, 1)[..., 0]

    def columns(self, data: torch.Tensor) -> torch.Tensor:
        """i32 [rows, num_heads, columns]: which ones."""
        return self._section(data, 3, torch.int32, self.num_columns)

    def tiles(self, data: torch.Tensor) -> torch.Tensor:
        """u8 [bytes]: the tiles part by part, in each head by head, rows inside, up to the end of the room."""
        return data[self.num_bytes :]

    def _section(self, data: torch.Tensor, number: int, dtype: torch.dtype, width: int) -> torch.Tensor:
        begin, shape = self._ends[number], (self.num_rows, self.num_heads, width)
        size = self.num_rows * self.num_heads * width * dtype.itemsize
        return data[begin : begin + size].view(dtype).view(shape)


class Piece:
    """A room of the buffer that a step's kernels have been told to fill, and the parts to cut it into."""

    def __init__(self, buffer: CaptureBuffer, room: Room, layout: Layout, parts: Sequence[Part]) -> None:
        """To be made when all kernels that fill the room have been launched on the current stream.

        `ready` is an event: they are done.
        """
        self._buffer, self._room, self._layout = buffer, room, layout
        self._parts = parts
        self.ready: Any = buffer.ready()

    def fetch(self) -> int:
        """Copy to the host and cut into parts; returns bytes of all tiles. For the publisher's thread."""
        data, layout, begin = self._buffer.data(self._room), self._layout, 0
        host = self._buffer.to_host(data[: layout.num_bytes], self.ready)
        finite, mass = layout.finite(host).bool(), layout.mass(host)
        for part in self._parts:
            own = slice(part.slot, part.slot + part.num_rows)
            columns = part.first_block_row + part.num_rows
            tiles, fits = None, True
            if layout.tile_dtype is not None:
                end = begin + int(layout.counts(host)[own].sum()) * layout.tile_bytes
                fits = end <= layout.tiles(data).shape[0]
                values = layout.tiles(data)[begin : end if fits else begin]
                tiles = PartTiles(
                    counts=layout.counts(host)[own].long() * fits,
                    columns=layout.columns(host)[own, :, :columns].clone(),
                    values=(values if part.is_chunk else self._buffer.to_host(values, self.ready)).view(
                        -1, layout.tile_bytes
                    ),
                    dtype=layout.tile_dtype,
                    room=self._room if part.is_chunk else None,
                )
                begin = end
            part.is_cut = not fits
            measured = (finite[own] & fits).tolist()
            part.rows = PartRows(mass=mass[own, :, :columns].clone(), measured=measured, tiles=tiles)
        self._buffer.shrink(self._room, layout.num_bytes + begin)
        return begin


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChunkParts:
    """A `capture.PendingMap`: one chunk's parts in the order in which they were measured."""

    chunk_index: int
    chunk_rows: int  # block rows of a chunk
    block: int
    parts: Sequence[Part]

    def attention_map(self) -> AttentionMap | None:
        """The chunk's map; of a row that was measured twice (after a preemption) the later measurement counts.

        Rows with tiles of another kind than the latest part's are left out, as are those never measured.
        """
        fetched = [(part, part.rows) for part in self.parts if part.rows is not None]
        if not fetched:
            return None
        kind = _kind(fetched[-1][1])
        first = self.chunk_index * self.chunk_rows
        found: dict[int, tuple[PartRows, int]] = {}
        for part, rows in fetched:
            for place, is_measured in enumerate(rows.measured):
                if is_measured and _kind(rows) == kind:
                    found[part.first_block_row + place - first] = (rows, place)
        if not found:
            return None
        num_heads = fetched[-1][1].mass.shape[1]
        mass = torch.zeros(num_heads, self.chunk_rows, first + self.chunk_rows, dtype=torch.uint8)
        row_counts = torch.zeros(self.chunk_rows, dtype=torch.int32)
        for own_row, (rows, place) in found.items():
            mass[:, own_row, : rows.mass.shape[2]] = rows.mass[place]
            row_counts[own_row] = self.block
        return AttentionMap(
            chunk_index=self.chunk_index,
            block=self.block,
            mass=mass,
            row_counts=row_counts,
            tiles=None if kind is None else _tile_set(found, mass.shape, self.block, kind),
        )


def _kind(rows: PartRows) -> torch.dtype | None:
    return None if rows.tiles is None else rows.tiles.dtype


def _tile_set(found: dict[int, tuple[PartRows, int]], shape: Sequence[int], block: int, dtype: torch.dtype) -> TileSet:
    """The tiles of a chunk's rows, heads first. shape: of its masses."""
    num_heads, num_rows, num_columns = shape
    counts = torch.zeros(num_heads, num_rows, dtype=torch.int64)
    columns = torch.zeros(num_heads, num_rows, num_columns, dtype=torch.int32)
    for own_row, (rows, place) in found.items():
        assert rows.tiles is not None
        counts[:, own_row] = rows.tiles.counts[place]
        columns[:, own_row, : rows.tiles.columns.shape[2]] = rows.tiles.columns[place]
    ends = counts.flatten().cumsum(0)
    indptr = torch.zeros(num_heads, num_rows + 1, dtype=torch.int32)
    indptr[:, 1:] = ends.view_as(counts)
    indptr[1:, 0] = indptr[:-1, -1]
    kept = torch.arange(num_columns) < counts[..., None]
    values = _values(found, counts, ends)
    return TileSet(indptr=indptr, indices=columns[kept], values=values.view(dtype).view(-1, block, block))


def _values(found: dict[int, tuple[PartRows, int]], counts: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """u8 [tiles, bytes of a tile] in a blob's order: as they lie, where they are all of one part's."""
    parts = list({id(rows): rows.tiles for rows, _ in found.values() if rows.tiles is not None}.values())
    if len(parts) == 1 and parts[0].values.shape[0] == int(ends[-1]):
        return parts[0].values
    base = dict(zip(map(id, parts), accumulate((one.values.shape[0] for one in parts), initial=0)))
    starts = torch.zeros_like(counts)
    for own_row, (rows, place) in found.items():
        assert rows.tiles is not None
        by_head = rows.tiles.counts.T.contiguous()
        before = by_head.flatten().cumsum(0).view_as(by_head) - by_head
        starts[:, own_row] = before[:, place] + base[id(rows.tiles)]
    index = torch.arange(int(ends[-1])) + (starts.flatten() - ends + counts.flatten()).repeat_interleave(
        counts.flatten()
    )
    return torch.cat([one.values.cpu() for one in parts]).index_select(0, index)
