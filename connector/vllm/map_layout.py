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


def layout(layers: Sequence[Sequence[MapRun]], in_place: Sequence[bool], device: torch.device) -> MapLayout:
    """A region for the runs of each of these layers, one a request.

    in_place: layers whose copies on the GPU are read where they are: their tables point there. device: where the region
    is.
    """
    runs = [run for layer in layers for run in layer]
    lengths = [one.run.num_chunks for one in runs]
    copied = np.repeat([not here for here, layer in zip(in_place, layers) for _ in layer], lengths)
    layer_of = np.repeat([number for number, layer in enumerate(layers) for _ in layer], lengths)
    request_of = np.repeat([number for layer in layers for number in range(len(layer))], lengths)
    chunk_of = np.concatenate([np.arange(length) for length in lengths])
    order = np.lexsort((layer_of, chunk_of, request_of))
    order = order[copied[order]]
    sections = np.concatenate([one.run.sections for one in runs])
    sizes = np.concatenate([one.run.num_bytes for one in runs])
    starts = np.concatenate([one.run.offsets if one.copy_offsets is None else one.copy_offsets for one in runs])
    starts[order] = align(sections.nbytes) + sizes[order].cumsum() - sizes[order]
    table = torch.from_numpy(sections + starts[:, None, None])
    ends = np.cumsum([sum(one.run.num_chunks for one in layer) for layer in layers]).tolist()
    return MapLayout(
        parts=[(0, pinned(table, device).view(-1).view(torch.uint8)), *_parts(runs, lengths, starts, order)],
        tables=[
            (begin * sections[0].nbytes, (end - begin, *sections.shape[1:])) for begin, end in zip([0, *ends], ends)
        ],
        num_bytes=int(align(sections.nbytes) + sizes[copied].sum()),
    )


def _parts(
    runs: Sequence[MapRun], lengths: Sequence[int], starts: npt.NDArray[np.int64], order: npt.NDArray[np.int64]
) -> list[tuple[int, torch.Tensor]]:
    """The blobs in `order`; those that lie behind each other at their source are one part."""
    if not len(order):
        return []
    run_of = np.repeat(np.arange(len(runs)), lengths)[order]
    source_of = np.array([one.source.data_ptr() for one in runs])[run_of]
    begins = np.concatenate([one.run.offsets for one in runs])[order]
    ends = begins + np.concatenate([one.run.num_bytes for one in runs])[order]
    cuts = np.flatnonzero((begins[1:] != ends[:-1]) | (source_of[1:] != source_of[:-1])) + 1
    firsts, lasts = [0, *cuts.tolist()], [*(cuts - 1).tolist(), len(begins) - 1]
    return [
        (int(starts[order[first]]), runs[run_of[first]].source[begins[first] : ends[last]])
        for first, last in zip(firsts, lasts)
    ]
