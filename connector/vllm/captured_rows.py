"""Block rows measured on a GPU, on their way to a map: where they lie on the device, and what becomes of them.

A step at a layer leaves one `Piece`: what it measured of each chunk, laid out as the head sections of that chunk's
blob, in a room of the capture buffer. The publisher's thread learns where they end and their checksums. A chunk that
was measured whole stays where it is until it is copied, once, into the daemon's memory; of one that was measured in
several steps the parts come to the host and are joined there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mapflow.connector.vllm.capture import BlobSource, HostBlob
from mapflow.connector.vllm.capture_buffer import ALIGNMENT, CaptureBuffer, Room
from mapflow.kernels.attention_map import AttentionMap
from mapflow.kernels.blob import read_blob
from mapflow.kernels.blob_layout import Header, align
from mapflow.kernels.blob_writer import pack_prologues, seal, tile_code
from mapflow.kernels.checksum import section_checksums
from mapflow.kernels.head_sections import MeasuredRows
from mapflow.kernels.map_join import join_rows


@dataclass(slots=True, kw_only=True, eq=False)
class Part:
    """Rows of one request's chunk. is_cut: whether they found no room. found: what was fetched of them."""

    rows: MeasuredRows
    is_cut: bool = False
    found: DeviceBlob | AttentionMap | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layout:
    """Sections of a piece's room, for `num_rows` block rows (slots) in `num_parts` parts. tile_dtype: None without."""

    num_rows: int
    num_parts: int
    num_heads: int
    block: int
    chunk_rows: int
    tile_dtype: torch.dtype | None

    @property
    def num_bytes(self) -> int:
        """Of everything in front of the head sections."""
        return self._ends_at + align(8 * self.num_parts * self.num_heads, ALIGNMENT)

    @property
    def tile_bytes(self) -> int:
        """Of one tile; 0 without tiles."""
        return 0 if self.tile_dtype is None else self.block**2 * self.tile_dtype.itemsize

    def finite(self, data: torch.Tensor) -> torch.Tensor:
        """u8 [rows] of a room's bytes: whether the row's masses are finite, without which it was not measured."""
        return data[: self.num_rows]

    def ends(self, data: torch.Tensor) -> torch.Tensor:
        """i64 [parts, num_heads]: where in `sections` each head's section of each part ends."""
        size = 8 * self.num_parts * self.num_heads
        return data[self._ends_at : self._ends_at + size].view(torch.int64).view(self.num_parts, self.num_heads)

    def sections(self, data: torch.Tensor) -> torch.Tensor:
        """u8 [bytes]: head sections, part by part, up to the end of the room."""
        return data[self.num_bytes :]

    def header(self, chunk_index: int) -> Header:
        """Of a part's blob."""
        return Header(
            tile_dtype=tile_code(self.tile_dtype),
            flags=0,
            block=self.block,
            num_heads=self.num_heads,
            num_row_blocks=self.chunk_rows,
            num_col_blocks=(chunk_index + 1) * self.chunk_rows,
            chunk_index=chunk_index,
        )

    @property
    def _ends_at(self) -> int:
        return align(self.num_rows, ALIGNMENT)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeviceBlob:
    """A chunk's map whose head sections lie in a room on the device; a `capture.BlobSource`.

    prologue: u8 [prologue_bytes], to be sealed. is_measured: whether any row of it was. sections: u8 [bytes] of the
    room.
    """

    prologue: npt.NDArray[np.uint8]
    is_measured: bool
    sections: torch.Tensor
    room: Room
    buffer: CaptureBuffer

    @property
    def num_bytes(self) -> int:
        """Of the blob."""
        return len(self.prologue) + self.sections.shape[0]

    def begin(self, buffer: memoryview) -> None:
        """Start to copy the sections into page-locked memory."""
        count, begin = self.sections.shape[0], len(self.prologue)
        buffer[:begin] = bytes(begin)
        self.buffer.copy(self.sections, torch.frombuffer(buffer, dtype=torch.uint8, count=count, offset=begin))

    def end(self) -> None:
        """Wait for it."""
        self.buffer.wait()

    def write(self, buffer: memoryview, identity: int) -> int:
        """Write what makes the blob valid."""
        seal(self.prologue, identity)
        buffer[: len(self.prologue)] = self.prologue.data
        return self.num_bytes

    def on_host(self) -> AttentionMap:
        """The map itself; waits for the device."""
        seal(self.prologue, 0)
        return read_blob(self.prologue.tobytes() + self.sections.cpu().numpy().tobytes())


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
        """Learn where the parts lie; returns the bytes of their sections. For the publisher's thread."""
        data, layout = self._buffer.data(self._room), self._layout
        sections = layout.sections(data)
        with self._buffer.looking(self.ready):
            sums = section_checksums(sections, layout.ends(data))
            finite, ends, checksums = self._buffer.to_host(layout.finite(data), layout.ends(data), sums)
        begins = np.concatenate([[0], ends.reshape(-1)[:-1]]).reshape(ends.shape)
        row_counts = np.zeros((layout.num_parts, layout.chunk_rows), dtype=np.int32)
        for own, part in zip(row_counts, self._parts):
            rows = part.rows
            own[rows.row : rows.row + rows.num_rows] = finite[rows.slot : rows.slot + rows.num_rows]
        prologues = pack_prologues(
            [layout.header(part.rows.chunk_index) for part in self._parts],
            row_counts * np.int32(layout.block),
            (ends - begins).astype(np.uint64),
            checksums.view(np.uint64),
        )
        last = 0
        for number, (part, begin, end) in enumerate(zip(self._parts, begins[:, 0].tolist(), ends[:, -1].tolist())):
            part.is_cut = end > sections.shape[0]
            if part.is_cut:
                continue
            last = end
            blob = DeviceBlob(
                prologue=prologues[number],
                is_measured=bool(row_counts[number].any()),
                sections=sections[begin:end],
                room=self._room,
                buffer=self._buffer,
            )
            part.found = blob if part.rows.num_rows == layout.chunk_rows else blob.on_host()
        self._buffer.shrink(self._room, layout.num_bytes + last)
        return int(ends[-1, -1])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChunkParts:
    """A `capture.PendingMap`: one chunk's parts in the order in which they were measured."""

    parts: Sequence[Part]

    def source(self) -> BlobSource | None:
        """The chunk's map; of a row that was measured twice (after a preemption) the later measurement counts.

        Rows with tiles of another kind than the latest part's are left out, as are those never measured.
        """
        found = [part.found for part in self.parts if part.found is not None]
        if found and isinstance(found[-1], DeviceBlob):
            return found[-1] if found[-1].is_measured else None
        maps = [one.on_host() if isinstance(one, DeviceBlob) else one for one in found]
        if not any(bool(one.measured.any()) for one in maps):
            return None
        return HostBlob(join_rows([one for one in maps if one.tile_dtype == maps[-1].tile_dtype]))
