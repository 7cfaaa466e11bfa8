"""Shows a plan to a person: `mapflow inspect PLAN`. Reads the plan alone; needs no model."""

from __future__ import annotations

from rich.table import Table

from mapflow.connector.plan import LayerPlan, Mode, ModelSpec, Plan


def plan_table(plan: Plan) -> Table:
    """One row a receiver layer, what the plan is about above it."""
    title = "\n".join(
        (
            f"plan {plan.name}  (digest {plan.digest})",
            f"sender    {_describe(plan.sender)}",
            f"receiver  {_describe(plan.receiver)}",
            f"tokenizer {plan.tokenizer_fingerprint}",
            f"chunk {plan.chunk_tokens} tokens, block {plan.block} tokens, tiles {plan.tile_dtype}",
        )
    )
    layers = Table()
    for name in ("layer", "mode", "sender\nlayer", "top-p", "sender\nheads", "floor", "error"):
        layers.add_column(name, justify="left" if name == "mode" else "right", no_wrap=True)
    for number, layer in enumerate(plan.layers):
        layers.add_row(str(number), layer.mode.value, *_cells(plan, number, layer))
    page = Table.grid()
    page.add_row(title)
    page.add_row(layers)
    page.add_row("floor: sink + local blocks that are always kept; error: of translated attention")
    return page


def _describe(model: ModelSpec) -> str:
    return (
        f"{model.model_id}: {model.num_layers} layers, {model.num_heads} heads on {model.num_kv_heads} KV heads "
        f"of {model.head_dim}"
    )


def _cells(plan: Plan, number: int, layer: LayerPlan) -> tuple[str, str, str, str, str]:
    """The columns after the mode; a dash where the mode has no use for a value."""
    floor = f"{layer.sink_blocks}+{layer.local_blocks}" if layer.mode in (Mode.GUIDE, Mode.STATIC) else "-"
    if layer.sender_layer is None:
        return "-", "-", "-", floor, "-"
    weights = plan.head_weight[number] if layer.mode is Mode.TRANSLATE else plan.head_map[number]
    heads = str(weights.shape[1])
    return str(layer.sender_layer), f"{layer.top_p:g}", heads, floor, f"{layer.error:.3f}"
