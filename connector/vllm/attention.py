"""An attention layer of vLLM with reuse: rows with maps go through ours, all others through vLLM's in one call.

`ReusingAttention` stands in front of the implementation of a platform (`cpu_backend.py`, `cuda_backend.py`). Without a
mapflow connector in the engine, or without orders in a step, each call passes straight through.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from mapflow.connector.vllm import compat, compat_attention
from mapflow.connector.vllm.batch import RowRange
from mapflow.kernels.paged import PagedKV

if TYPE_CHECKING:
    from mapflow.connector.vllm.worker import MapWorker

logger = logging.getLogger(__name__)

Plain = Callable[[torch.Tensor, Any, torch.Tensor], torch.Tensor]
"""vLLM's own attention of some rows: query, metadata, out."""


class ReusingAttention:
    """One attention layer; a mixin in front of an `AttentionImpl`."""

    num_heads: int
    head_size: int
    scale: float

    def paged_kv(self, layer: Any, kv_cache: torch.Tensor) -> PagedKV | None:
        """The layer's cache as the kernels see it; None where its layout is unknown."""
        raise NotImplementedError

    def metadata_of_rows(self, metadata: Any, ranges: Sequence[RowRange], index: torch.Tensor | slice) -> Any:
        """Metadata of a batch that holds only `ranges`, each a request of its own."""
        raise NotImplementedError

    def with_row_lse(self, attend: Callable[[], object]) -> torch.Tensor | None:
        """Run vLLM's attention; float32 [num_heads, rows] log2 of the sum of exp(score), where it says so."""
        attend()
        return None

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As vLLM's: query [num_tokens, num_heads, head_dim]; writes output and returns it."""

        def plain(rows: torch.Tensor, metadata: Any, out: torch.Tensor) -> torch.Tensor:
            scales = (output_scale, output_block_scale)
            inner: Any = super(ReusingAttention, self)
            result: torch.Tensor = inner.forward(layer, rows, key, value, kv_cache, metadata, out, *scales)
            return result

        connector = compat.active_connector() if attn_metadata is not None else None
        if connector is None:
            return plain(query, attn_metadata, output)
        worker: MapWorker = connector.map_worker
        number = compat.layer_number(layer.layer_name)
        tokens = attn_metadata.num_actual_tokens
        if number is not None:
            worker.layer_begins(number, tokens, attn_metadata.max_seq_len)
        if worker.has_work:
            self._with_orders(connector, layer, number, query, kv_cache, attn_metadata, output, plain)
        else:
            plain(query, attn_metadata, output)
        if number is not None:
            worker.layer_ends(number)
        return output

    def _with_orders(
        self,
        connector: Any,
        layer: Any,
        number: int | None,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        plain: Plain,
    ) -> None:
        """A layer of a step with orders, whether they are for this layer or not."""
        worker: MapWorker = connector.map_worker
        tokens = attn_metadata.num_actual_tokens
        kv = self.paged_kv(layer, kv_cache)
        if number is None or kv is None:  # a layer whose queries are always there
            worker.skip_layer("layer_name" if number is None else "kv_layout", layer.layer_name)
            plain(query, attn_metadata, output)
            return
        rows, out = query[:tokens], output.view(output.shape[0], self.num_heads, self.head_size)[:tokens]
        is_eligible = compat.is_plain_attention(self, attn_metadata)
        row_lse: torch.Tensor | None = None

        def whole() -> None:
            nonlocal row_lse
            if is_eligible and worker.takes_row_lse(number):
                row_lse = self.with_row_lse(lambda: plain(query, attn_metadata, output))
            else:
                plain(query, attn_metadata, output)

        done = is_eligible and not worker.may_reuse(number)
        if done:
            whole()
            if not worker.must_prepare(number):
                worker.queries.eligible.add(number)
                return
        if is_eligible:
            worker.queries.eligible.add(number)
            try:
                if not worker.is_placed:
                    worker.place(**compat_attention.batch_shape(attn_metadata, kv, connector.page_size))
                    # small copies to a GPU, which would wait behind those of maps
                    self._rest_metadata(worker, *worker.rest_as_a_rule(), attn_metadata, rows.device)
                done = self._reuse(worker, number, rows, kv, attn_metadata, out, plain) or done
            except Exception:
                logger.exception("mapflow: reuse failed in layer %d; vLLM computes it", number)
                worker.drop_reuse("internal")
        else:
            worker.skip_layer("attention_type", layer.layer_name)
        if not done:
            whole()
            if worker.queries.lacks(number):  # vLLM cannot compute those rows any more
                worker.queries.attend(number, rows, kv, self.scale, out)
        if is_eligible:
            self._measure(worker, number, rows, kv, row_lse)

    def _reuse(
        self,
        worker: MapWorker,
        number: int,
        query: torch.Tensor,
        kv: PagedKV,
        metadata: Any,
        out: torch.Tensor,
        plain: Plain,
    ) -> bool:
        """Attend the whole batch with reuse; False where this layer reuses nothing."""
        reused, ranges = worker.rest(number)
        if reused:
            worker.attend(number, query, kv, self.scale, out)
            if ranges:
                self._attend_rest(worker, reused, ranges, query, metadata, out, plain)
        worker.finish(number)
        return bool(reused)

    def _attend_rest(
        self,
        worker: MapWorker,
        reused: frozenset[int],
        ranges: Sequence[RowRange],
        query: torch.Tensor,
        metadata: Any,
        out: torch.Tensor,
        plain: Plain,
    ) -> None:
        index, rest = self._rest_metadata(worker, reused, ranges, metadata, query.device)
        if isinstance(index, slice):
            plain(query[index], rest, out[index])
        else:
            rest_out = torch.empty_like(out[index])
            plain(query[index], rest, rest_out)
            out[index] = rest_out

    def _rest_metadata(
        self,
        worker: MapWorker,
        reused: frozenset[int],
        ranges: Sequence[RowRange],
        metadata: Any,
        device: torch.device,
    ) -> tuple[torch.Tensor | slice, Any]:
        """Where the rows are that vLLM computes, and the metadata of a batch of them; made once a step."""
        if not reused or not ranges:
            return slice(0, 0), None
        index = worker.cached(("index", reused), lambda: compat_attention.row_index(ranges, device))
        return index, worker.cached(("metadata", reused), lambda: self.metadata_of_rows(metadata, ranges, index))

    def _measure(
        self, worker: MapWorker, number: int, query: torch.Tensor, kv: PagedKV, row_lse: torch.Tensor | None
    ) -> None:
        try:
            worker.measure(number, query, kv, self.scale, row_lse)
        except Exception:
            logger.exception("mapflow: layer %d could not be captured", number)
            worker.counters.add("capture_failed", "internal")
