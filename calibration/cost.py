"""What a receiver layer costs on a GPU in each mode: seconds of a prefill and bytes of maps, by arithmetic.

Rates were fitted to `benchmarks/results/kernels-nvidia-h200.json` (Qwen3-8B's heads, 8k to 64k tokens); they are ratios
to full attention, which other GPUs of its kind share more or less. A plan is chosen by what options cost relative to
each other, so the rates need not be those of the GPU that serves it; `benchmarks/ttft.py` measures that one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mapflow.connector.plan import LayerPlan, Mode, ModelSpec, Plan
from mapflow.kernels.tile_codec import TILE_DTYPE_BY_NAME


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRates:
    """One GPU; the defaults are an H200's.

    Attributes:
        attention_flops: of full attention, a second.
        matmul_flops: of matrix products, a second.
        link_bytes: of maps from pinned memory to the GPU, a second.
        masked_slope: time of attention inside a sparse mask, to full attention's, divided by the mask's density.
        masked_curve: what is added to it at density 1, where masks are slower than FlashAttention.
        masked_token_s: what a mask costs besides, seconds a token: packing keys, selecting blocks.
        translate_slope: as `masked_slope`, of translation from one sender head a receiver head.
        translate_head_slope: of every further sender head.
        translate_token_s: what translation costs besides, seconds a token.
    """

    attention_flops: float = 6.0e14
    matmul_flops: float = 6.9e14
    link_bytes: float = 5.3e10
    masked_slope: float = 0.82
    masked_curve: float = 0.25
    masked_token_s: float = 1.05e-8
    translate_slope: float = 0.33
    translate_head_slope: float = 0.30
    translate_token_s: float = 6.5e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """What else a receiver layer does: `hidden` is the residual's width, `mlp_params` the weights behind attention."""

    spec: ModelSpec
    hidden: int
    mlp_params: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Of one layer over one prefill. seconds: of the GPU. num_bytes: of maps that must arrive."""

    seconds: float
    num_bytes: int = 0


class CostModel:
    """Prefills of `context` tokens in one step."""

    def __init__(self, shape: LayerShape, sender: ModelSpec, context: int, rates: GpuRates | None = None) -> None:
        self._shape, self._sender, self._context = shape, sender, context
        self.rates = rates or GpuRates()

    @property
    def context(self) -> int:
        """Tokens of the prefill."""
        return self._context

    @property
    def full_attention_s(self) -> float:
        """Causal attention of one layer: 2 * 2 * head_dim * heads flops for each of context^2 / 2 pairs."""
        spec = self._shape.spec
        return 2.0 * spec.head_dim * spec.num_heads * self._context**2 / self.rates.attention_flops

    @property
    def rest_s(self) -> float:
        """A layer without its attention and its Q projection."""
        spec = self._shape.spec
        projections = self._shape.hidden * spec.head_dim * (2 * spec.num_kv_heads + spec.num_heads)
        return 2.0 * self._context * (projections + self._shape.mlp_params) / self.rates.matmul_flops

    @property
    def query_s(self) -> float:
        """A layer's Q projection."""
        spec = self._shape.spec
        return 2.0 * self._context * self._shape.hidden * spec.head_dim * spec.num_heads / self.rates.matmul_flops

    @property
    def layer_s(self) -> float:
        """A layer without reuse."""
        return self.rest_s + self.query_s + self.full_attention_s

    @property
    def full_s(self) -> float:
        """All layers without reuse."""
        return self._shape.spec.num_layers * self.layer_s

    def of_plan(self, plan: Plan, densities: Mapping[int, float]) -> Cost:
        """All layers under a plan; densities: of those that reuse."""
        found = [
            self.of_layer(plan, number, layer, density=densities.get(number, 1.0))
            for number, layer in enumerate(plan.layers)
        ]
        return Cost(seconds=sum(one.seconds for one in found), num_bytes=sum(one.num_bytes for one in found))

    def of_layer(self, plan: Plan, number: int, layer: LayerPlan, *, density: float) -> Cost:
        """The layer of this number, should it do what `layer` says with the plan's head maps."""
        heads = {}
        if layer.mode is Mode.TRANSLATE:
            index = plan.head_index[number]
            heads = {"num_heads": index.shape[-1], "tile_heads": len(set(index.flatten().tolist()))}
        return self.of(layer, density=density, block=plan.block, tile_dtype=plan.tile_dtype, **heads)

    def of(
        self,
        layer: LayerPlan,
        *,
        density: float,
        block: int,
        num_heads: int = 1,
        tile_heads: int | None = None,
        tile_dtype: str = "e4m3",
    ) -> Cost:
        """A layer that keeps `density` of the causal blocks, translated from `num_heads` sender heads each.

        tile_heads: sender heads that the layer reads in all; None for every one. A layer's maps arrive while the layer
        before it computes, so it takes the longer of both.
        """
        rates, full = self.rates, self.full_attention_s
        seconds = self.rest_s + (0.0 if layer.mode is Mode.TRANSLATE else self.query_s)
        if layer.mode is Mode.COMPUTE:
            seconds += full
        elif layer.mode is Mode.TRANSLATE:
            slope = rates.translate_slope + (num_heads - 1) * rates.translate_head_slope
            seconds += slope * density * full + rates.translate_token_s * self._context
        else:
            slope = rates.masked_slope + rates.masked_curve * density
            seconds += slope * density * full + rates.masked_token_s * self._context
        blocks, num_bytes = (self._context / block) ** 2 / 2, 0.0
        if layer.needs_map:
            num_bytes += blocks * self._sender.num_heads  # a byte for each one's mass
        if layer.mode is Mode.TRANSLATE:
            heads = self._sender.num_heads if tile_heads is None else tile_heads
            num_bytes += density * blocks * heads * block**2 * TILE_DTYPE_BY_NAME[tile_dtype].itemsize
        return Cost(seconds=max(seconds, num_bytes / rates.link_bytes), num_bytes=round(num_bytes))
