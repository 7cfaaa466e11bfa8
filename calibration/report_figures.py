"""Figures of the report: SVG and PNG as text that stands inside an HTML page. Numbers in, markup out."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from markupsafe import Markup
from PIL import Image

from mapflow.connector.plan import Mode, Plan

COLORS = {Mode.COMPUTE: "#9aa4b2", Mode.STATIC: "#c58b2a", Mode.GUIDE: "#2a78c5", Mode.TRANSLATE: "#8a3fc5"}
_RAMP = np.array([[255, 255, 255], [190, 215, 240], [70, 140, 205], [20, 70, 140], [5, 15, 50]], dtype=np.float64)
_SIGNED = np.array([[160, 60, 20], [255, 255, 255], [20, 70, 140]], dtype=np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dot:
    """A choice of all layers: share of a full prefill's time, prefix KL expected and measured (None: it was not)."""

    share: float
    expected: float
    measured: float | None
    is_chosen: bool = False


def frontier_svg(dots: Sequence[Dot]) -> Markup:
    """Damage over time: what single layers let expect as a line, what was measured as dots, the choice ringed."""
    width, height, left, bottom, top = 760, 340, 70, 50, 20
    damages = [value for dot in dots for value in (dot.expected, dot.measured) if value is not None and value > 0]
    low, high = math.floor(math.log10(min(damages, default=1e-3))), math.ceil(math.log10(max(damages, default=1.0)))
    high = max(high, low + 1)
    first = min(0.1 * math.floor(10 * min((dot.share for dot in dots), default=0.0)), 0.9)

    def x(share: float) -> float:
        return left + (share - first) / (1.0 - first) * (width - left - 20)

    def y(damage: float) -> float:
        place = (math.log10(damage) - low) / (high - low) if damage > 0 else 0.0
        return height - bottom - max(0.0, place) * (height - bottom - top)

    parts = [f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="prefix KL over time of a prefill">']
    for decade in range(low, high + 1):
        at = y(10.0**decade)
        parts.append(f'<line class="grid" x1="{left}" x2="{width - 20}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text class="tick" x="{left - 8}" y="{at + 4:.1f}" text-anchor="end">{10.0**decade:g}</text>')
    for tenth in range(round(10 * first), 11):
        at = x(tenth / 10)
        parts.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{top}" y2="{height - bottom}"/>')
        parts.append(
            f'<text class="tick" x="{at:.1f}" y="{height - bottom + 18}" text-anchor="middle">{10 * tenth} %</text>'
        )
    line = " ".join(f"{x(dot.share):.1f},{y(dot.expected):.1f}" for dot in dots)
    parts.append(f'<polyline class="expected" points="{line}"/>')
    for dot in dots:
        if dot.measured is None:
            continue
        place = f'cx="{x(dot.share):.1f}" cy="{y(dot.measured):.1f}"'
        title = f"<title>{dot.share:.1%} of the time, prefix KL {dot.measured:.4f} nats</title>"
        parts.append(f'<circle class="measured" {place} r="5">{title}</circle>')
        if dot.is_chosen:
            parts.append(f'<circle class="chosen" {place} r="10"/>')
    middle = (left + width - 20) / 2
    parts.append(
        f'<text class="axis" x="{middle}" y="{height - 8}" text-anchor="middle">'
        "estimated time of a prefill, of one without reuse</text>"
    )
    upright = f'transform="rotate(-90)" x="{-(height - bottom + top) / 2:.0f}" y="16" text-anchor="middle"'
    parts.append(f'<text class="axis" {upright}>prefix KL, nats</text></svg>')
    return Markup("".join(parts))


def layer_map_svg(plan: Plan) -> Markup:
    """Which sender layer each receiver layer reads, as lines between two rows of layers."""
    width, height, sides = 760, 170, (30, 130)
    counts = (plan.sender.num_layers, plan.receiver.num_layers)

    def x(layer: int, count: int) -> float:
        return 90 + (layer + 0.5) * (width - 110) / count

    parts = [f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="layer map">']
    for number, layer in enumerate(plan.layers):
        if layer.sender_layer is not None:
            ends = (x(layer.sender_layer, counts[0]), sides[0] + 8, x(number, counts[1]), sides[1] - 8)
            place = 'x1="{:.1f}" y1="{}" x2="{:.1f}" y2="{}"'.format(*ends)
            title = f"<title>receiver layer {number} reads sender layer {layer.sender_layer}</title>"
            parts.append(f'<line {place} stroke="{COLORS[layer.mode]}" stroke-width="2">{title}</line>')
    for name, side, count in zip(("sender", "receiver"), sides, counts):
        parts.append(f'<text class="axis" x="4" y="{side + 4}">{name}</text>')
        for index in range(count):
            fill = COLORS[plan.layers[index].mode] if name == "receiver" else "#56606e"
            parts.append(f'<circle cx="{x(index, count):.1f}" cy="{side}" r="6" fill="{fill}"/>')
            if count <= 24 or index % 4 == 0:
                at = side - 12 if name == "sender" else side + 22
                label = f'x="{x(index, count):.1f}" y="{at}" text-anchor="middle"'
                parts.append(f'<text class="tick" {label}>{index}</text>')
    return Markup("".join([*parts, "</svg>"]))


def mass_png(mass: npt.NDArray[np.float32]) -> str:
    """A data URI of masses [R, C] in [0, 1]; square roots, as they are stored, so that small ones show."""
    return _png(_colors(np.sqrt(np.clip(mass, 0.0, 1.0)), _RAMP))


def weights_png(weights: npt.NDArray[np.float32]) -> str:
    """A data URI of a head map [receiver heads, sender heads]; white is 0, blue positive, brown negative."""
    largest = max(float(np.abs(weights).max(initial=0.0)), 1e-9)
    return _png(_colors(0.5 + 0.5 * weights / largest, _SIGNED))


def _colors(values: npt.NDArray[np.floating], ramp: npt.NDArray[np.float64]) -> npt.NDArray[np.uint8]:
    place = np.linspace(0.0, 1.0, len(ramp))
    return np.stack([np.interp(values, place, ramp[:, channel]) for channel in range(3)], axis=-1).astype(np.uint8)


def _png(pixels: npt.NDArray[np.uint8]) -> str:
    out = io.BytesIO()
    Image.fromarray(pixels, mode="RGB").save(out, format="PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()
