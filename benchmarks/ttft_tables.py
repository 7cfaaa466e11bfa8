"""Tables of the end-to-end results, for `tables.py`: `ttft-*.json`, `rival-*.json` and others."""

from __future__ import annotations

from typing import Any

Case = dict[str, Any]

# mode, tier, and the aim for each context: change of TTFT against plain vLLM, in percent (r = 3)
AIMS: tuple[tuple[str, str, dict[int, float]], ...] = (
    ("translate", "gpu", {8192: -19.0, 16384: -29.0, 32768: -40.0}),
    ("translate", "pinned", {8192: -18.0, 16384: -28.0, 32768: -37.0}),
    ("guide", "pinned", {8192: -13.0, 16384: -21.5, 32768: -33.0}),
)
NAMES = {
    "plain": "plain vLLM",
    "exact": "plugin, request opts out",
    "miss": "plugin, miss",
    "online": "blocks estimated online",
}


def ttft_aims(report: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and rows: what was aimed at, and what was reached."""
    rows = []
    for mode, tier, aims in AIMS:
        for context, aim in aims.items():
            found = [one for one in report["cases"] if (one["mode"], one["tier"]) == (mode, tier) and one["r"] == 3]
            for case in (one for one in found if one["context"] == context):
                change = case["change_percent"]
                verdict = "yes" if change <= aim else "**no**"
                name = f"{mode}, density {case['density']:g}"
                rows.append([f"{context:,}", name, tier, f"{aim:+.1f} %", f"{change:+.1f} %", verdict])
    return ["context", "", "tier", "aim", "TTFT", "met"], rows


def ttft(report: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and rows: every case, in the order in which they were measured."""
    rows = []
    for case in report["cases"]:
        name = NAMES.get(case["mode"], case["mode"])
        where = f"{case['tier']}, r = {case['r']}" if case["tier"] else f"r = {case['r']}" if case["r"] else ""
        spread = f"{min(case['samples']):.1f} to {max(case['samples']):.1f}"
        change = "" if case["mode"] == "plain" else f"{case['change_percent']:+.1f} %"
        density = f"{case['density']:.2f}" if case["density"] < 1 else ""
        rows.append(
            [f"{case['context']:,}", name, where, density, f"{case['ttft_ms']:.1f}", spread, change, _how(case)]
        )
    return ["context", "", "", "density", "median, ms", "of repeats", "to plain", "layers that reuse"], rows


def _how(case: Case) -> str:
    if "layers" not in case:
        return ""
    reasons = ", ".join(f"{count} {name}" for name, count in case["reasons"].items())
    return f"{sum(case['layers'].values())}" + (f" ({reasons})" if reasons else "")


def rival(report: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and rows: guide beside the same attention over blocks that the receiver estimates itself."""
    rows = []
    for case in report["cases"]:
        if (case["mode"], case["tier"]) != ("guide", "pinned"):
            continue
        same = [one for one in report["cases"] if one["mode"] == "online" and one["r"] == case["r"]]
        for other in (one for one in same if one["context"] == case["context"]):
            times = [f"{other['ttft_ms']:.1f}", f"{case['ttft_ms']:.1f}"]
            faster = f"{100 * (1 - case['ttft_ms'] / other['ttft_ms']):.1f} %"
            rows.append([f"{case['context']:,}", str(case["r"]), *times, faster])
    return ["context", "r", "estimated online, ms", "guide, ms", "faster by"], rows


def decode(report: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and row: a decoded token, which nothing should change."""
    plain, plugin = (report["decode_ms_per_token"][name] for name in ("plain", "pinned"))
    row = [f"{plain:.2f}", f"{plugin:.2f}", f"{100 * (plugin / plain - 1):+.1f} %"]
    return ["a decoded token, ms", "with the plugin", "change"], [row]


def publishing(report: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and rows: a sender's prefill, by whom it publishes for."""
    names = {
        "plain again": "plain vLLM, another engine",
        "nobody": "a sender, for nobody",
        "guide": "for guide: masses",
        "translate": f"for translate: tiles, top-p {report['top_p']:g}",
    }
    idle = {case["context"]: case["prefill_ms"] for case in report["cases"] if case["mode"] == "nobody"}
    rows = []
    for case in report["cases"]:
        times = [f"{case[name]:.1f}" for name in ("full_ms", "prefill_ms")]
        row = [f"{case['context']:,}", names[case["mode"]], *times, f"{case['change_percent']:+.1f} %"]
        if case["published_mb"]:
            row.append(f"{100 * (case['prefill_ms'] / idle[case['context']] - 1):+.1f} %")
            row += [f"{100 * case[name]:.0f} %" for name in ("published_share", "reusable_share")]
            row.append(f"{case['published_mb']:,.0f}")
        rows.append(row + [""] * (9 - len(row)))
    changes = ["to plain", "to the same engine for nobody"]
    columns = ["published of what is wanted", "of the prompt, from its start, in all layers", "MB a prompt"]
    return ["context", "", "plain, ms", "median, ms", *changes, *columns], rows


def trace(report: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and rows: where the GPU's time goes in a prefill. Copies run beside the rest, so rows do not add up."""
    kinds = sorted({kind for case in report["cases"] for kind in case["kinds"]})
    plain = {case["context"]: case["busy_ms"] for case in report["cases"] if case["mode"] == "plain"}
    rows = []
    for case in report["cases"]:
        change = 100 * (case["busy_ms"] / plain[case["context"]] - 1)
        times = [f"{case['busy_ms']:.1f}", f"{change:+.1f} %" if case["mode"] != "plain" else ""]
        idle = f"{case['span_ms'] - case['busy_ms']:.1f}"
        cells = [f"{case['kinds'].get(kind, 0.0):.1f}" for kind in kinds]
        rows.append([f"{case['context']:,}", case["mode"], *times, idle, *cells])
    return ["context", "", "GPU busy, ms", "to plain", "idle in between", *kinds], rows


TTFT = {"aims": ttft_aims, "all": ttft, "decode": decode}
"""Tables of one `ttft-*.json`, by the name of their place in the documentation."""
