"""What the plugin must know of the engine that it runs in. Plain values; compat.py reads them out of vLLM."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What compat.py reads from vLLM's configuration.

    Attributes:
        model: path or hub name of the weights.
        revision, tokenizer_revision: hub revisions, or None.
        tokenizer: path of the tokenizer's directory, or hub name.
        dtype: precision of the weights, such as "bfloat16".
        num_heads, num_kv_heads: of the whole model, over all tensor-parallel ranks.
        page_size: tokens per KV block of the scheduler.
        publishes, reuses: from `kv_role`.
        device_uuid: of the GPU that the engine, or this rank of it, computes on; empty on a CPU.
        unsupported: why maps cannot work in this engine, or None.
    """

    model: str
    revision: str | None
    tokenizer: str
    tokenizer_revision: str | None
    dtype: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    tp_rank: int
    tp_size: int
    page_size: int
    publishes: bool
    reuses: bool
    device_uuid: str = ""
    unsupported: str | None = None
