"""Write an `AttentionMap` into bytes, on the host or in page-locked memory straight from a GPU.

The sections of all heads are laid out at once: a sender writes thousands of blobs a second. Format: `blob_layout.py`;
`blob.py` reads it. No sockets, leases or shared-memory segments here.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt
import torch

from mapflow.kernels import blob_layout as layout
from mapflow.kernels.attention_map import AttentionMap, TileSet
from mapflow.kernels.blob import TILE_DTYPES_BY_CODE
from mapflow.kernels.blob_layout import Header, HeadLayout

_TILE_CODES = {dtype: code for code, dtype in TILE_DTYPES_BY_CODE.items()}
_BYTE_VIEWS = {torch.float8_e4m3fn: torch.uint8, torch.bfloat16: torch.int16}
_Array = npt.NDArray[np.generic]


def blob_num_bytes(attention_map: AttentionMap) -> int:
    """Bytes that `write_blob` will write, a multiple of 64."""
    header = _header_of(attention_map)
    return header.prologue_bytes + int(HeadLayout(header, _tiles_per_head(attention_map)).num_bytes.sum())


def write_blob(attention_map: AttentionMap, buffer: memoryview | bytearray, *, identity: int = 0) -> int:
    """Serialise into the front of `buffer` (writable, contiguous); return the bytes written.

    `identity`: 64 bits that tie the blob to its place in the cache, so that a reader whose bytes were replaced by
    another sound blob notices.

    The header goes last and the magic is wiped first, so that a half-written buffer never looks valid. What lies on a
    GPU is copied to the host; its tiles go straight into `buffer`, on the current stream, which is waited for. Raises
    ValueError, and writes nothing, if the buffer is read-only or too small.
    """
    view = memoryview(buffer).cast("B")
    header = _header_of(attention_map)
    sections = HeadLayout(header, _tiles_per_head(attention_map))
    ends = list(accumulate(sections.num_bytes.tolist(), initial=header.prologue_bytes))
    total = int(ends[-1])
    if view.readonly:
        raise ValueError("buffer: expected a writable buffer, got a read-only one")
    if len(view) < total:
        raise ValueError(f"buffer: expected at least {total} bytes, got {len(view)}")
    out = np.frombuffer(view, dtype=np.uint8, count=total)
    out[: layout.HEADER_BYTES] = 0
    heads = [out[begin:end] for begin, end in pairwise(ends)]
    mass = _bytes(attention_map.mass, "u1", len(heads))
    for data, own in zip(heads, mass):
        data[: sections.mass_bytes] = own
        data[sections.mass_bytes : sections.indptr_offset] = 0
    if attention_map.tiles is not None:
        _write_tiles(attention_map.tiles, sections, heads)
    table = b"".join(
        layout.HEAD_ENTRY.pack(begin, len(data), layout.checksum(data)) for begin, data in zip(ends, heads)
    )
    prologue = np.zeros(header.prologue_bytes, dtype=np.uint8)
    row_counts = _bytes(attention_map.row_counts, "<i4", 1)[0]
    prologue[layout.HEADER_BYTES : layout.HEADER_BYTES + len(row_counts)] = row_counts
    table_end = header.head_table_offset + len(table)
    prologue[header.head_table_offset : table_end] = np.frombuffer(table, dtype=np.uint8)
    prologue[: layout.HEADER_BYTES] = np.frombuffer(_header_of(attention_map, total, identity).pack(), dtype=np.uint8)
    prologue[layout.CHECKSUM_FIELD] = np.frombuffer(layout.checksum(prologue).to_bytes(8, "little"), dtype=np.uint8)
    out[layout.HEADER_BYTES : header.prologue_bytes] = prologue[layout.HEADER_BYTES :]
    out[: layout.HEADER_BYTES] = prologue[: layout.HEADER_BYTES]
    return total


def _header_of(attention_map: AttentionMap, total_bytes: int = 0, identity: int = 0) -> Header:
    tiles = attention_map.tiles
    return Header(
        tile_dtype=layout.TILES_NONE if tiles is None else _TILE_CODES[tiles.values.dtype],
        flags=layout.FLAG_APPROXIMATE if attention_map.approximate else 0,
        block=attention_map.block,
        num_heads=attention_map.num_heads,
        num_row_blocks=attention_map.num_row_blocks,
        num_col_blocks=attention_map.num_col_blocks,
        chunk_index=attention_map.chunk_index,
        total_bytes=total_bytes,
        identity=identity,
    )


def _tiles_per_head(attention_map: AttentionMap) -> npt.NDArray[np.int64]:
    if attention_map.tiles is None:
        return np.zeros(attention_map.num_heads, dtype=np.int64)
    indptr = attention_map.tiles.indptr
    return (indptr[:, -1] - indptr[:, 0]).cpu().numpy().astype(np.int64)


def _write_tiles(tiles: TileSet, sections: HeadLayout[npt.NDArray[np.int64]], heads: Sequence[_Array]) -> None:
    counts = sections.num_tiles
    firsts = counts.cumsum() - counts
    indptr = _bytes(tiles.indptr.cpu() - torch.from_numpy(firsts)[:, None], "<i4", len(heads))
    indices = _bytes(tiles.indices, "<i4", 1)[0]
    begin, end = sections.indptr_offset, sections.indices_offset
    places = zip(firsts.tolist(), counts.tolist(), sections.tiles_offset.tolist())
    spans = []
    for data, own, (first, count, at) in zip(heads, indptr, places):
        data[begin : begin + len(own)] = own
        data[begin + len(own) : end] = 0
        data[end : end + 4 * count] = indices[4 * first : 4 * (first + count)]
        data[end + 4 * count : at] = 0
        spans.append((first, count, at))
    _write_values(tiles.values, spans, heads)


def _write_values(values: torch.Tensor, spans: Sequence[tuple[int, int, int]], heads: Sequence[_Array]) -> None:
    """Tiles [first, first + count) of each head, to `at` of its section."""
    size = values[0].nbytes if len(values) else 0
    if values.device.type == "cuda":  # GPUs store bf16 as the blob does
        source = values.reshape(-1).view(torch.uint8)
        for data, (first, count, at) in zip(heads, spans):
            target = torch.from_numpy(data[at : at + count * size])
            target.copy_(source[first * size : (first + count) * size], non_blocking=True)
            data[at + count * size :] = 0
        torch.cuda.current_stream(values.device).synchronize()
        return
    kind = "u1" if values.dtype == torch.float8_e4m3fn else "<i2"
    (stored,) = _bytes(values.view(_BYTE_VIEWS[values.dtype]), kind, 1)
    for data, (first, count, at) in zip(heads, spans):
        data[at : at + count * size] = stored[first * size : (first + count) * size]
        data[at + count * size :] = 0


def _bytes(tensor: torch.Tensor, dtype: str, rows: int) -> _Array:
    """u8 [rows, bytes] of a tensor's values as the blob has them."""
    return np.ascontiguousarray(tensor.cpu().numpy(), dtype=dtype).reshape(-1).view(np.uint8).reshape(rows, -1)
