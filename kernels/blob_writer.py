"""Write an `AttentionMap` that lies on the host into bytes. On a GPU `head_sections.py` does most of it.

Format: `blob_layout.py`; `blob.py` reads it. No sockets, leases or shared-memory segments here.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt
import torch

from mapflow.kernels import blob_layout as layout
from mapflow.kernels.attention_map import AttentionMap, TileSet
from mapflow.kernels.blob import TILE_DTYPES_BY_CODE
from mapflow.kernels.blob_layout import Header, HeadLayout
from mapflow.kernels.tile_codec import TILE_BITS

_TILE_CODES = {dtype: code for code, dtype in TILE_DTYPES_BY_CODE.items()}
_Array = npt.NDArray[np.generic]


def blob_num_bytes(attention_map: AttentionMap) -> int:
    """Bytes that `write_blob` will write, a multiple of 64."""
    header = _header_of(attention_map)
    return header.prologue_bytes + int(HeadLayout(header, _tiles_per_head(attention_map)).num_bytes.sum())


def write_blob(attention_map: AttentionMap, buffer: memoryview | bytearray, *, identity: int = 0) -> int:
    """Serialise into the front of `buffer` (writable, contiguous); return the bytes written.

    `identity`: 64 bits that tie the blob to its place in the cache, so that a reader whose bytes were replaced by
    another sound blob notices.

    The header goes last and the magic is wiped first, so that a half-written buffer never looks valid. Raises
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
    checksums = np.array([layout.checksum(data) for data in heads], dtype=np.uint64)
    row_counts = attention_map.row_counts.cpu().numpy()
    sizes = sections.num_bytes.astype(np.uint64)
    (prologue,) = pack_prologues([header], row_counts[None], sizes[None], checksums[None])
    seal(prologue, identity)
    out[layout.HEADER_BYTES : header.prologue_bytes] = prologue[layout.HEADER_BYTES :]
    out[: layout.HEADER_BYTES] = prologue[: layout.HEADER_BYTES]
    return total


def pack_prologues(
    headers: Sequence[Header],
    row_counts: npt.NDArray[np.int32],
    sizes: npt.NDArray[np.uint64],
    checksums: npt.NDArray[np.uint64],
) -> npt.NDArray[np.uint8]:
    """Everything in front of head 0 of several blobs, u8 [blobs, prologue_bytes]; valid when `seal` has been called.

    headers: alike in `num_heads` and `num_row_blocks`; without total, identity and checksum. row_counts: [blobs,
    num_row_blocks]. sizes, checksums: [blobs, num_heads], of the sections.
    """
    first = headers[0]
    ends = first.prologue_bytes + sizes.cumsum(axis=1, dtype=np.uint64)
    table = np.stack([ends - sizes, sizes, checksums], axis=2).astype("<u8").reshape(len(headers), -1).view(np.uint8)
    out = np.zeros((len(headers), first.prologue_bytes), dtype=np.uint8)
    for row, header, total in zip(out, headers, ends[:, -1].tolist()):
        row[: layout.HEADER_BYTES] = np.frombuffer(replace(header, total_bytes=total).pack(), dtype=np.uint8)
    out[:, layout.HEADER_BYTES :][:, : 4 * first.num_row_blocks] = row_counts.astype("<i4").view(np.uint8)
    out[:, first.head_table_offset :][:, : table.shape[1]] = table
    return out


def seal(prologue: npt.NDArray[np.uint8], identity: int) -> None:
    """Enter the identity and the checksum, which takes its own field as zero, in u8 [prologue_bytes]."""
    prologue[layout.IDENTITY_FIELD] = np.frombuffer(identity.to_bytes(8, "little"), dtype=np.uint8)
    prologue[layout.CHECKSUM_FIELD] = 0
    prologue[layout.CHECKSUM_FIELD] = np.frombuffer(layout.checksum(prologue).to_bytes(8, "little"), dtype=np.uint8)


def tile_code(dtype: torch.dtype | None) -> int:
    """`blob_layout.TILES_*` of tiles of this dtype; None: there are none."""
    return layout.TILES_NONE if dtype is None else _TILE_CODES[dtype]


def _header_of(attention_map: AttentionMap) -> Header:
    return Header(
        tile_dtype=tile_code(attention_map.tile_dtype),
        flags=layout.FLAG_APPROXIMATE if attention_map.approximate else 0,
        block=attention_map.block,
        num_heads=attention_map.num_heads,
        num_row_blocks=attention_map.num_row_blocks,
        num_col_blocks=attention_map.num_col_blocks,
        chunk_index=attention_map.chunk_index,
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
    kind = "u1" if values.dtype == torch.float8_e4m3fn else "<i2"
    (stored,) = _bytes(values.view(TILE_BITS[values.dtype]), kind, 1)
    for data, (first, count, at) in zip(heads, spans):
        data[at : at + count * size] = stored[first * size : (first + count) * size]
        data[at + count * size :] = 0


def _bytes(tensor: torch.Tensor, dtype: str, rows: int) -> _Array:
    """u8 [rows, bytes] of a tensor's values as the blob has them."""
    return np.ascontiguousarray(tensor.cpu().numpy(), dtype=dtype).reshape(-1).view(np.uint8).reshape(rows, -1)
