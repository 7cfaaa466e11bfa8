"""Which layers and heads somebody wants published, from plan files and from the interests that receivers registered.

Pure values in, pure values out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from mapflow.connector.messages import Interest, LayerInterest, TileDtype
from mapflow.connector.namespace import Namespace
from mapflow.connector.plan import Mode, Plan

_TILE_DTYPES = {"e4m3": TileDtype.E4M3, "bf16": TileDtype.BF16}


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWant:
    """What is wanted of one sender layer.

    Attributes:
        heads: sender heads, ascending; None for all of them.
        tile_top_p: probability mass that the tiles of a block row must hold; 0 for masses only.
        tile_dtype: "e4m3" or "bf16".
    """

    heads: tuple[int, ...] | None = None
    tile_top_p: float = 0.0
    tile_dtype: str = "e4m3"

    def union(self, other: LayerWant) -> LayerWant:
        """What serves both; bf16 tiles serve whoever asked for e4m3."""
        heads = None
        if self.heads is not None and other.heads is not None:
            heads = tuple(sorted({*self.heads, *other.heads}))
        dtypes = {want.tile_dtype for want in (self, other) if want.tile_top_p > 0}
        return LayerWant(
            heads=heads,
            tile_top_p=max(self.tile_top_p, other.tile_top_p),
            tile_dtype="bf16" if "bf16" in dtypes else "e4m3",
        )


def merge_wants(parts: Iterable[Mapping[int, LayerWant]]) -> dict[int, LayerWant]:
    """Union of wants, layer by layer."""
    merged: dict[int, LayerWant] = {}
    for part in parts:
        for layer, want in part.items():
            merged[layer] = merged[layer].union(want) if layer in merged else want
    return merged


def plan_wants(plan: Plan) -> dict[int, LayerWant]:
    """Sender layer -> what the plan's receiver layers read of it."""
    wants: list[dict[int, LayerWant]] = []
    for number, layer in enumerate(plan.layers):
        if layer.sender_layer is None:
            continue
        if layer.mode is Mode.TRANSLATE:
            used = plan.head_index[number][plan.head_weight[number] != 0]
            tiles = layer.top_p
        else:
            used = (plan.head_map[number] != 0).any(dim=0).nonzero().flatten()
            tiles = 0.0
        heads = tuple(sorted({int(head) for head in used.flatten()}))
        wants.append({layer.sender_layer: LayerWant(heads=heads, tile_top_p=tiles, tile_dtype=plan.tile_dtype)})
    return merge_wants(wants)


def interest_of(plan: Plan, namespace: Namespace) -> Interest:
    """What a receiver under this plan registers with the daemon."""
    layers = tuple(
        LayerInterest(
            layer=layer,
            heads=want.heads or (),
            tile_top_p=want.tile_top_p,
            tile_dtype=_TILE_DTYPES[want.tile_dtype] if want.tile_top_p else TileDtype.UNSPECIFIED,
        )
        for layer, want in sorted(plan_wants(plan).items())
    )
    return Interest(namespace=namespace, model=plan.sender.model_id, layers=layers)


def interest_wants(interest: Interest, num_layers: int, num_heads: int) -> dict[int, LayerWant]:
    """Read a registered interest; layers and heads that this model does not have are left out."""
    wants: list[dict[int, LayerWant]] = []
    for layer in interest.layers:
        heads = tuple(sorted({head for head in layer.heads if head < num_heads}))
        if layer.layer >= num_layers or bool(layer.heads) != bool(heads):
            continue
        dtype = "bf16" if layer.tile_dtype is TileDtype.BF16 else "e4m3"
        wants.append({layer.layer: LayerWant(heads=heads or None, tile_top_p=layer.tile_top_p, tile_dtype=dtype)})
    return merge_wants(wants)
