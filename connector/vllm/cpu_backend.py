"""vLLM's CPU attention backend with reuse."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from mapflow.connector.vllm import compat_attention, query_skip
from mapflow.connector.vllm.attention import ReusingAttention
from mapflow.connector.vllm.batch import RowRange
from mapflow.kernels.paged import PagedKV


class MapFlowCPUMetadataBuilder(CPUAttentionMetadataBuilder):
    """Builds vLLM's metadata and remembers from what."""

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> CPUAttentionMetadata:
        """As vLLM's, plus the source that metadata of fewer rows is built from."""
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        compat_attention.remember_source(metadata, self, common_attn_metadata)
        return metadata


class MapFlowCPUImpl(ReusingAttention, CPUAttentionBackendImpl):
    """One attention layer."""

    def paged_kv(self, layer: Any, kv_cache: torch.Tensor) -> PagedKV | None:
        """The cache; None for an instruction set whose packing is unknown."""
        return compat_attention.cpu_paged_kv(kv_cache, layer.isa)

    def metadata_of_rows(self, metadata: Any, ranges: Sequence[RowRange], index: torch.Tensor | slice) -> Any:
        """Built by vLLM's own builder."""
        return compat_attention.cpu_metadata_of_rows(metadata, ranges, index)


class MapFlowCPUBackend(CPUAttentionBackend):
    """Registered in place of vLLM's CPU_ATTN."""

    @staticmethod
    def get_impl_cls() -> type[MapFlowCPUImpl]:
        """The layer above. A model is being built: from here on its QKV layers are looked at."""
        query_skip.install()
        return MapFlowCPUImpl

    @staticmethod
    def get_builder_cls() -> type[MapFlowCPUMetadataBuilder]:
        """The builder above."""
        return MapFlowCPUMetadataBuilder
