"""Where the maps of some sender layers go in a region of the staging buffer, and what is copied there from where.

First a table of sections for each layer, then the blobs chunk by chunk, in each chunk layer by layer: as publishers lay
them, so that what lies together at its source is one copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from mapflow.connector.vllm.map_reader import MapRun
from mapflow.kernels.blob_layout import align
from mapflow.kernels.blob_run import BlobRun
from mapflow.kernels.upload import pinned


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MapLayout:
    """One region.

    Attributes:
        parts: offset in the region and u8 bytes on the host, to be copied there.
        tables: for each layer the offset and shape of its table, i64 [blobs, heads, 4].
        num_bytes: of the region.
    """

    parts: Sequence[tuple[int, torch.Tensor]]
    tables: Sequence[tuple[int, tuple[int, ...]]]
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Blobs:
    """Of one layer, request and rank of the sender. copy_offsets: where they are on the GPU, if they are read there."""

    layer: int
    request: int
    rank: int
    run: BlobRun
    source: torch.Tensor
    copy_offsets: npt.NDArray[np.int64] | None


def layout(layers: Sequence[Sequence[MapRun]], in_place: Sequence[bool], device: torch.device) -> MapLayout:
    """A region for the runs of each of these layers, one a request.

    in_place: layers whose copies on the GPU are read where they are: their tables point there. device: where the region
    is.
    """
    blobs = [
        _Blobs(
            layer=number,
            request=request,
            rank=rank,
            run=run,
            source=maps.source,
            copy_offsets=maps.copy_offsets[rank] if here and maps.copy_offsets is not None else None,
        )
        for number, (layer, here) in enumerate(zip(layers, in_place))
        for request, maps in enumerate(layer)
        for rank, run in enumerate(maps.ranks)
    ]
    table_bytes = sum(one.run.sections.nbytes for one in blobs)
    starts, parts, num_bytes = _place([one for one in blobs if one.copy_offsets is None], align(table_bytes))
    tables, places, begin = [], [], 0
    for number, layer in enumerate(layers):
        rows = []
        for request in range(len(layer)):
            own = [one for one in blobs if (one.layer, one.request) == (number, request)]
            begins = [starts[id(one)] if one.copy_offsets is None else one.copy_offsets for one in own]
            heads = [one.run.sections + at[:, None, None] for one, at in zip(own, begins)]
            rows.append(np.concatenate(heads, axis=1))
        tables.append(np.concatenate(rows))
        places.append((begin, tables[-1].shape))
        begin += tables[-1].nbytes
    table = torch.from_numpy(np.concatenate([one.ravel() for one in tables]))
    return MapLayout(parts=[(0, pinned(table, device).view(torch.uint8)), *parts], tables=places, num_bytes=num_bytes)


def _place(
    blobs: Sequence[_Blobs], begin: int
) -> tuple[dict[int, npt.NDArray[np.int64]], list[tuple[int, torch.Tensor]], int]:
    """Where blobs begin, by identity; what to copy; and where the last one ends.

    As publishers lay them: chunk by chunk, in each layer by layer. Those that lie behind each other at their source are
    one part.
    """
    if not blobs:
        return {}, [], begin
    lengths = [one.run.num_chunks for one in blobs]
    chunk_of = np.concatenate([np.arange(length) for length in lengths])
    owner = np.repeat(np.arange(len(blobs)), lengths)
    rank_of, request_of = np.repeat(np.array([(one.rank, one.request) for one in blobs]), lengths, axis=0).T
    order = np.lexsort((owner, chunk_of, rank_of, request_of))
    sizes = np.concatenate([one.run.num_bytes for one in blobs])
    starts = np.empty_like(sizes)
    starts[order] = begin + sizes[order].cumsum() - sizes[order]
    sources = np.array([one.source.data_ptr() for one in blobs])[owner[order]]
    at = np.concatenate([one.run.offsets for one in blobs])[order]
    ends = at + sizes[order]
    cuts = np.flatnonzero((at[1:] != ends[:-1]) | (sources[1:] != sources[:-1])) + 1
    firsts, lasts = [0, *cuts.tolist()], [*(cuts - 1).tolist(), len(order) - 1]
    parts = [
        (int(starts[order[first]]), blobs[owner[order[first]]].source[at[first] : ends[last]])
        for first, last in zip(firsts, lasts)
    ]
    by_owner = np.split(starts, np.cumsum(lengths)[:-1])
    return {id(one): begins for one, begins in zip(blobs, by_owner)}, parts, begin + int(sizes.sum())
