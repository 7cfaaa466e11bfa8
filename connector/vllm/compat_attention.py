"""vLLM's attention backends as they are inside: metadata, batches made of rows, caches, and log-sum-exps.

Goes with `compat`, which see for versions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from mapflow.connector.vllm.batch import RowRange
from mapflow.kernels.paged import PagedKV
from mapflow.kernels.upload import upload

_SOURCE = "_mapflow_source"


def remember_source(metadata: Any, builder: Any, common: CommonAttentionMetadata) -> None:
    """Keep with a step's metadata what it was built from, so that metadata of fewer rows can be built later."""
    setattr(metadata, _SOURCE, (builder, common))


def batch_shape(metadata: Any, kv: PagedKV, scheduler_page: int) -> dict[str, Any]:
    """Arguments of `MapWorker.place` from a step's metadata."""
    _, common = getattr(metadata, _SOURCE)
    return {
        "query_start": common.query_start_loc_cpu.tolist(),
        "seq_lens": _host_seq_lens(common),
        "block_table": common.block_table_tensor,
        "page_size": kv.page_size,
        "pages_per_block": max(scheduler_page // kv.page_size, 1),
    }


def _host_seq_lens(common: CommonAttentionMetadata) -> list[int]:
    """Without waiting for a GPU: exact for prefill, at least as much for decodes that are still being verified."""
    if common.seq_lens.device.type == "cpu":
        return common.seq_lens.tolist()
    bound = common.seq_lens_cpu_upper_bound
    if bound is None:
        bound = common.seq_lens.cpu()
    return bound[: common.num_reqs].tolist()


def row_index(ranges: Sequence[RowRange], device: torch.device) -> torch.Tensor | slice:
    """The rows of `ranges` as positions in the batch: a slice where they follow each other, else i64 [rows]."""
    first, last = ranges[0], ranges[-1]
    if all(a.query_begin + a.num_rows == b.query_begin for a, b in pairwise(ranges)):
        return slice(first.query_begin, last.query_begin + last.num_rows)
    parts = [torch.arange(one.query_begin, one.query_begin + one.num_rows) for one in ranges]
    return upload(torch.cat(parts), device)


def _hidden_rows(common: CommonAttentionMetadata, ranges: Sequence[RowRange]) -> list[int]:
    """Rows of the step that come behind each range in its request: its last row sees that many tokens less."""
    starts = common.query_start_loc_cpu.tolist()
    return [starts[one.entry + 1] - (one.query_begin + one.num_rows) for one in ranges]


def cpu_metadata_of_rows(metadata: Any, ranges: Sequence[RowRange], index: torch.Tensor | slice) -> Any:
    """Attention metadata of a batch that holds only `ranges` of this one, each a request of its own.

    Args:
        metadata: the whole batch's.
        ranges: rows to keep, in order.
        index: the same rows as positions in the batch.
    """
    builder, common = getattr(metadata, _SOURCE)
    lengths = [rows.num_rows for rows in ranges]
    entries = torch.tensor([rows.entry for rows in ranges])
    seq_lens = common.seq_lens[entries] - torch.tensor(_hidden_rows(common, ranges), dtype=common.seq_lens.dtype)
    query_start = torch.zeros(len(ranges) + 1, dtype=common.query_start_loc_cpu.dtype)
    query_start[1:] = torch.tensor(lengths).cumsum(0)
    optional = {field.name: None for field in fields(common) if field.default is None}
    smaller = replace(
        common,
        **optional,
        query_start_loc=query_start,
        query_start_loc_cpu=query_start,
        seq_lens=seq_lens,
        num_reqs=len(ranges),
        num_actual_tokens=sum(lengths),
        max_query_len=max(lengths),
        max_seq_len=int(seq_lens.max()),
        block_table_tensor=common.block_table_tensor[entries].contiguous(),
        slot_mapping=common.slot_mapping[index],
    )
    return builder.build(0, smaller)


def flash_metadata_of_rows(metadata: Any, ranges: Sequence[RowRange]) -> Any:
    """As `cpu_metadata_of_rows`, for FlashAttention, which schedules by itself where no schedule is given."""
    _, common = getattr(metadata, _SOURCE)
    lengths = [rows.num_rows for rows in ranges]
    starts = [0, *accumulate(lengths)]
    device = metadata.seq_lens.device
    numbers = [[one.entry for one in ranges], _hidden_rows(common, ranges)]
    entries, hidden = upload(torch.tensor(numbers, dtype=torch.int32), device)
    cascade = {"use_cascade": False, "common_prefix_len": 0, "prefix_scheduler_metadata": None}  # of 0.26
    known = {field.name for field in fields(metadata)}
    return replace(
        metadata,
        num_actual_tokens=starts[-1],
        max_query_len=max(lengths),
        query_start_loc=upload(torch.tensor(starts, dtype=torch.int32), device),
        seq_lens=metadata.seq_lens[entries] - hidden,
        block_table=metadata.block_table[entries],
        scheduler_metadata=None,
        max_num_splits=0,
        **{name: value for name, value in cascade.items() if name in known},
    )


def flash_paged_kv(kv_cache: torch.Tensor, head_dim: int) -> PagedKV:
    """View of FlashAttention's cache [pages, kv_heads, page, 2 * head_dim], whatever its strides."""
    return PagedKV(key_cache=kv_cache[..., :head_dim], value_cache=kv_cache[..., head_dim:])


def cpu_paged_kv(kv_cache: torch.Tensor, isa: str) -> PagedKV | None:
    """View of the CPU backend's cache [pages, kv_heads, page, 2 * head_dim]; None where its packing is unknown.

    A page holds the keys first, each head's as [head_dim, page] for the instruction set "vec", then the values as
    [page, head_dim].
    """
    if isa != "vec":
        return None
    pages, heads, page, width = kv_cache.shape
    head_dim = width // 2
    halves = kv_cache.view(pages, heads, 2, page * head_dim)
    keys = halves[:, :, 0].unflatten(-1, (head_dim, page)).transpose(-1, -2)
    values = halves[:, :, 1].unflatten(-1, (page, head_dim))
    return PagedKV(key_cache=keys, value_cache=values)


def flash_row_lse(attend: Callable[[], object]) -> torch.Tensor | None:
    """Run an attention layer of FlashAttention; float32 [num_heads, rows], log2 of the sum of exp(score).

    None where the layer did not call the kernel just once for all rows, as with a cascade.
    """
    from vllm.v1.attention.backends import flash_attn

    kernel = flash_attn.flash_attn_varlen_func
    found: list[torch.Tensor | None] = []

    def with_lse(**options: Any) -> Any:
        if options.get("return_softmax_lse"):
            found.append(None)
            return kernel(**options)
        out, lse, *_ = kernel(**options, return_softmax_lse=True)
        found.append(lse)
        return out

    flash_attn.flash_attn_varlen_func = with_lse
    try:
        attend()
    finally:
        flash_attn.flash_attn_varlen_func = kernel
    lse = found[0] if len(found) == 1 else None
    return None if lse is None else lse * math.log2(math.e)
