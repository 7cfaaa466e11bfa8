"""One page about a plan, to look at: `mapflow report PLAN`. A single HTML file that needs nothing else.

What is there goes in: the plan itself, the frontier that `calibrate` wrote beside it, figures of `evaluate`, and maps
of a text, if models and texts are given.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from mapflow.calibration.config import CalibrationError, first_line
from mapflow.calibration.example_maps import ExampleMap, dense_weights
from mapflow.calibration.report_figures import COLORS, Dot, frontier_svg, layer_map_svg, mass_png, weights_png
from mapflow.connector.plan import Mode, Plan

Json = Mapping[str, Any]


def render(
    plan: Plan, file: Path, *, frontier: Json | None, quality: Sequence[Json], examples: Sequence[ExampleMap]
) -> str:
    """The page.

    Args:
        plan: what it is about.
        file: the plan's file, for the commands at its end.
        frontier: what `calibrate` wrote beside it, if it did.
        quality: this plan's cases of what `evaluate --out` wrote.
        examples: maps of a text.
    """
    environment = Environment(
        loader=PackageLoader("mapflow.calibration"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    answered = [case for case in quality if case["retrieval"]]
    return environment.get_template("report.html.j2").render(
        plan=plan,
        cards=_cards(plan, frontier, quality),
        context=frontier["context"] if frontier else 0,
        frontier=frontier_svg(_dots(frontier)) if frontier else None,
        quality=quality,
        retrieval=_answers(answered),
        methods=[case["method"] for case in answered],
        layer_map=layer_map_svg(plan),
        colors={mode.value: color for mode, color in COLORS.items()},
        layers=[_row(plan, number, frontier) for number in range(len(plan.layers))],
        head_maps=[
            (number, weights_png(dense_weights(plan, number).numpy()))
            for number in plan.reusing_layers
            if plan.layers[number].needs_map
        ],
        examples=[_example(one) for one in examples],
        commands=_commands(plan, file),
    )


def read_json(path: Path, wanted: str) -> Json:
    """A JSON file that has `wanted` in it.

    Raises:
        CalibrationError: the file cannot be read, or is another one.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CalibrationError(f"{path} cannot be read as JSON: {first_line(error)}") from error
    if not isinstance(found, dict) or wanted not in found:
        raise CalibrationError(f"{path} holds no {wanted!r}; give what mapflow calibrate or evaluate wrote")
    return found


def _cards(plan: Plan, frontier: Json | None, quality: Sequence[Json]) -> list[tuple[str, str]]:
    reusing = plan.reusing_layers
    found = [(f"{len(reusing)} of {len(plan.layers)}", "receiver layers reuse")]
    own = next((case for case in quality if "estimated_share" in case), None)
    if own is not None:
        found.append((f"{own['prefix_kl']:.4f}", f"prefix KL in nats, {own['num_documents']} held-out texts"))
        share, num_bytes, context = own["estimated_share"], own["map_bytes"], own["context"]
    elif frontier is not None:
        chosen = frontier["chosen"]
        found.append((f"{chosen['measured_kl']:.4f}", "prefix KL in nats, held-out texts"))
        share, num_bytes = chosen["prefill_ms"] / frontier["full_prefill_ms"], chosen["map_bytes"]
        context = frontier["context"]
    else:
        return found
    found.append((f"{share:.0%}", f"of a prefill's time at {context:,} tokens, estimated"))
    found.append((f"{num_bytes / 1e6:,.1f} MB", "of maps for it"))
    return found


def _dots(frontier: Json) -> list[Dot]:
    full, chosen = frontier["full_prefill_ms"], frontier["chosen"]
    return [
        Dot(
            share=one["prefill_ms"] / full,
            expected=one["expected_kl"],
            measured=one["measured_kl"],
            is_chosen=one == chosen,
        )
        for one in frontier["frontier"]
    ]


def _answers(answered: Sequence[Json]) -> dict[str, dict[str, Any]]:
    """By task: samples, right answers and right tokens without reuse, and those of each method."""
    found: dict[str, dict[str, Any]] = {}
    for case in answered:
        for task, one in case["retrieval"].items():
            row = found.setdefault(task, {"samples": one["samples"], "full": _score(one, "full"), "right": {}})
            row["right"][case["method"]] = _score(one, "right")
    return found


def _score(answers: Json, whose: str) -> str:
    return f"{answers[whose]:.0%} ({answers[whose + '_tokens']:.0%})"


def _row(plan: Plan, number: int, frontier: Json | None) -> dict[str, Any]:
    layer = plan.layers[number]
    measured = _measured(plan, number, frontier)
    return {
        "number": number,
        "mode": layer.mode.value,
        "color": COLORS[layer.mode],
        "sender_layer": "" if layer.sender_layer is None else layer.sender_layer,
        "top_p": f"{layer.top_p:g}" if layer.needs_map else "",
        "error": layer.error if layer.needs_map else None,
        "density": measured.get("density"),
        "damage": measured.get("damage"),
    }


def _measured(plan: Plan, number: int, frontier: Json | None) -> Json:
    """What `calibrate` measured of the option that a layer has; empty where it did not."""
    layer = plan.layers[number]
    options = (frontier or {"options": {}})["options"].get(str(number), [])
    wanted = {"mode": layer.mode.value, "top_p": layer.top_p, "local_blocks": layer.local_blocks}
    return next((one for one in options if all(one[name] == value for name, value in wanted.items())), {})


def _example(one: ExampleMap) -> dict[str, Any]:
    images = {name: mass_png(getattr(one, name)) for name in ("sender", "translated", "own")}
    return {
        "layer": one.layer,
        "head": one.head,
        "sender_layer": one.sender_layer,
        "sender_head": one.sender_head,
        **images,
    }


def _commands(plan: Plan, file: Path) -> str:
    """What serves the pair."""
    sender = json.dumps({"kv_connector": "mapflow", "kv_role": "kv_producer"})
    extra: dict[str, Any] = {"plan": str(file)}
    receiver = json.dumps({"kv_connector": "mapflow", "kv_role": "kv_consumer", "kv_connector_extra_config": extra})
    gpu = " --gpu-arena 0:8GiB" if any(layer.mode is Mode.TRANSLATE for layer in plan.layers) else ""
    return "\n".join(
        (
            f"mapflow serve --arena 16GiB{gpu}",
            f"vllm serve {plan.sender.name} --kv-transfer-config '{sender}'",
            f"vllm serve {plan.receiver.name} --kv-transfer-config '{receiver}'",
        )
    )
