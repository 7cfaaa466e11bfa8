"""The figure of `docs/performance.md`: `python benchmarks/plot.py`, which needs `mapflow[plots]`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import pyplot

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "ttft-nvidia-h200.json"
RIVAL = RESULTS.with_name("rival-nvidia-h200.json")
FIGURE = ROOT / "docs" / "ttft.svg"

# mode, tier, what it is called, colour, and how its line is drawn
LINES = (
    ("translate", "gpu", "translate, maps on the GPU", "#1b6ca8", "-"),
    ("translate", "pinned", "translate, maps in pinned memory", "#1b6ca8", "--"),
    ("guide", "gpu", "guide, maps on the GPU", "#2a9d5c", "-"),
    ("guide", "pinned", "guide, maps in pinned memory", "#2a9d5c", "--"),
    ("online", "", "blocks estimated online", "#c0504d", ":"),
    ("miss", "", "miss", "#808080", ":"),
)


def main() -> None:
    """Draw the change of TTFT over the context; bars are the spread of the repeats."""
    report, rival = (json.loads(path.read_text()) for path in (RESULTS, RIVAL))
    matplotlib.rcParams |= {"svg.hashsalt": "mapflow", "svg.fonttype": "none", "font.family": "sans-serif"}
    figure, axes = pyplot.subplots(figsize=(7.5, 4.2), layout="constrained")
    for mode, tier, label, colour, style in LINES:
        source = rival if mode == "online" else report
        own = [case for case in source["cases"] if (case["mode"], case["tier"]) == (mode, tier)]
        cases = [case for case in own if case["r"] in (0, 3)]
        if cases:
            contexts = [case["context"] for case in cases]
            middle = [case["change_percent"] for case in cases]
            spread = list(zip(*(_spread(case) for case in cases)))
            axes.errorbar(contexts, middle, spread, label=label, color=colour, linestyle=style, marker="o", capsize=2)
    axes.axhline(0.0, color="black", linewidth=0.8)
    axes.set_xscale("log", base=2)
    ticks = sorted({case["context"] for case in report["cases"]})
    axes.set_xticks(ticks, [f"{one // 1024}k" for one in ticks])
    axes.set_xlabel("prompt, tokens")
    axes.set_ylabel("time to first token, change to plain vLLM, %")
    axes.set_title(f"{report['receiver']} shape on one {report['gpu']}, first reused layer 3", fontsize=10)
    axes.legend(fontsize=8)
    figure.savefig(FIGURE, metadata={"Date": None})


def _spread(case: dict[str, Any]) -> tuple[float, float]:
    """From the median down to the smallest repeat and up to the largest, in percent of plain vLLM."""
    low, high = min(case["samples"]), max(case["samples"])
    return 100 * (case["ttft_ms"] - low) / case["full_ms"], 100 * (high - case["ttft_ms"]) / case["full_ms"]


if __name__ == "__main__":
    main()
