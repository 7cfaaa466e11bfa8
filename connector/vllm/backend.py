"""vLLM's CPU attention backend with reuse: rows with maps go through ours, all others through vLLM's in one call.

Without a mapflow connector in the engine, or without orders in a step, each call passes straight through.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from mapflow.connector.vllm import compat
from mapflow.kernels.paged import PagedKV

if TYPE_CHECKING:
    from mapflow.connector.vllm.worker import MapWorker

logger = logging.getLogger(__name__)


class MapFlowCPUMetadataBuilder(CPUAttentionMetadataBuilder):
    """Builds vLLM's metadata and remembers from what."""

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> CPUAttentionMetadata:
        """As vLLM's, plus the source that metadata of fewer rows is built from."""
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        compat.remember_source(metadata, self, common_attn_metadata)
        return metadata


class MapFlowCPUImpl(CPUAttentionBackendImpl):
    """One attention layer."""

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As vLLM's: query [num_tokens, num_heads, head_dim]; writes output and returns it."""

        def plain(rows: torch.Tensor, metadata: CPUAttentionMetadata | None, out: torch.Tensor) -> torch.Tensor:
            scales = (output_scale, output_block_scale)
            return super(MapFlowCPUImpl, self).forward(layer, rows, key, value, kv_cache, metadata, out, *scales)

        connector = compat.active_connector() if attn_metadata is not None else None
        if connector is None or attn_metadata is None or not connector.map_worker.has_work:
            return plain(query, attn_metadata, output)
        worker: MapWorker = connector.map_worker
        number = compat.layer_number(layer.layer_name)
        kv = compat.cpu_paged_kv(kv_cache, layer.isa)
        if number is None or kv is None or not compat.is_plain_attention(self):
            reason = "layer_name" if number is None else "attention_type" if kv is not None else "kv_layout"
            worker.skip_layer(reason, f"{layer.layer_name} on {layer.isa}")
            return plain(query, attn_metadata, output)
        tokens = attn_metadata.num_actual_tokens
        rows, out = query[:tokens], output.view(output.shape[0], self.num_heads, self.head_size)[:tokens]
        try:
            if not worker.is_placed:
                worker.place(**compat.batch_shape(attn_metadata, kv, connector.page_size))
            done = self._reuse(worker, number, rows, kv, attn_metadata, out, plain)
        except Exception:
            logger.exception("mapflow: reuse failed in layer %d; vLLM computes it", number)
            worker.drop_reuse("internal")
            done = False
        if not done:
            plain(query, attn_metadata, output)
        self._measure(worker, number, rows, kv)
        return output

    def _reuse(
        self,
        worker: MapWorker,
        number: int,
        query: torch.Tensor,
        kv: PagedKV,
        metadata: CPUAttentionMetadata,
        out: torch.Tensor,
        plain: Any,
    ) -> bool:
        """Attend the whole batch with reuse; False where this layer reuses nothing."""
        reused, ranges = worker.rest(number)
        if not reused:
            return False
        worker.attend(number, query, kv, self.scale, out)
        if ranges:
            index = torch.cat([torch.arange(r.query_begin, r.query_begin + r.num_rows) for r in ranges])
            rest_metadata = worker.cached(
                ("metadata", reused), lambda: compat.metadata_of_rows(metadata, ranges, index)
            )
            rest_out = torch.empty_like(out[index])
            plain(query[index], rest_metadata, rest_out)
            out[index] = rest_out
        return True

    def _measure(self, worker: MapWorker, number: int, query: torch.Tensor, kv: PagedKV) -> None:
        try:
            worker.measure(number, query, kv, self.scale)
        except Exception:
            logger.exception("mapflow: layer %d could not be captured", number)
            worker.counters.add("capture_failed", "internal")


class MapFlowCPUBackend(CPUAttentionBackend):
    """Registered in place of vLLM's CPU_ATTN."""

    @staticmethod
    def get_impl_cls() -> type[MapFlowCPUImpl]:
        """The layer above."""
        return MapFlowCPUImpl

    @staticmethod
    def get_builder_cls() -> type[MapFlowCPUMetadataBuilder]:
        """The builder above."""
        return MapFlowCPUMetadataBuilder
