"""vLLM's FlashAttention backend with reuse."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)

from mapflow.connector.vllm import compat_attention, query_skip
from mapflow.connector.vllm.attention import ReusingAttention
from mapflow.connector.vllm.batch import RowRange
from mapflow.kernels.paged import PagedKV


class MapFlowFlashMetadataBuilder(FlashAttentionMetadataBuilder):
    """Builds vLLM's metadata and remembers from what."""

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> FlashAttentionMetadata:
        """As vLLM's, plus the batch's shape on the host."""
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        compat_attention.remember_source(metadata, self, common_attn_metadata)
        return metadata


class MapFlowFlashImpl(ReusingAttention, FlashAttentionImpl):
    """One attention layer."""

    def paged_kv(self, layer: Any, kv_cache: torch.Tensor) -> PagedKV | None:
        """K and V lie next to each other in the cache's last dimension."""
        return compat_attention.flash_paged_kv(kv_cache, self.head_size)

    def with_row_lse(self, attend: Callable[[], object]) -> torch.Tensor | None:
        """FlashAttention computes it anyway."""
        return compat_attention.flash_row_lse(attend)

    def metadata_of_rows(self, metadata: Any, ranges: Sequence[RowRange], index: torch.Tensor | slice) -> Any:
        """Made here: vLLM's builder would overwrite buffers that belong to the whole batch's metadata."""
        return compat_attention.flash_metadata_of_rows(metadata, ranges)


class MapFlowFlashBackend(FlashAttentionBackend):
    """Registered in place of vLLM's FLASH_ATTN."""

    @staticmethod
    def get_impl_cls() -> type[MapFlowFlashImpl]:
        """The layer above. A model is being built: from here on its QKV layers are looked at."""
        query_skip.install()
        return MapFlowFlashImpl

    @staticmethod
    def get_builder_cls() -> type[MapFlowFlashMetadataBuilder]:
        """The builder above."""
        return MapFlowFlashMetadataBuilder
