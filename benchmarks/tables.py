"""The tables of `docs/performance.md`, made from `benchmarks/results`: `python benchmarks/tables.py --write`.

A test keeps the documentation equal to what this makes of the checked-in results.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # PYTHONSAFEPATH, which this project runs with, leaves it out

import service_tables
import ttft_tables

ROOT = Path(__file__).parents[1]
PERFORMANCE = ROOT / "docs" / "performance.md"
KERNELS = ROOT / "benchmarks" / "results" / "kernels-nvidia-h200.json"
TTFT = ROOT / "benchmarks" / "results" / "ttft-nvidia-h200.json"
RIVAL = ROOT / "benchmarks" / "results" / "rival-nvidia-h200.json"
TTFT_SMALL = ROOT / "benchmarks" / "results" / "ttft-qwen3-1.7b-nvidia-h200.json"
TRACE = ROOT / "benchmarks" / "results" / "trace-nvidia-h200.json"
PUBLISHING = ROOT / "benchmarks" / "results" / "publishing-nvidia-h200.json"
SERVICE = ROOT / "benchmarks" / "results" / "service.json"
HIT_RATE = ROOT / "benchmarks" / "results" / "hit-rate.json"
FP8 = ROOT / "benchmarks" / "results" / "fp8-quality.json"
Case = dict[str, Any]

# name, how to find it, the aim as a ratio to full attention (Qwen3-8B heads, 32k tokens, density 0.1)
AIMS: tuple[tuple[str, dict[str, Any], float], ...] = (
    ("translate, 1 head, e4m3", {"kernel": "translate", "dtype": "e4m3", "k": 1}, 0.055),
    ("translate, 2 heads, e4m3", {"kernel": "translate", "dtype": "e4m3", "k": 2}, 0.10),
    ("translate, all 32 heads, e4m3", {"kernel": "translate_all_heads"}, 0.40),
    ("guide, masses to output", {"kernel": "guide"}, 0.11),
    ("block masses, every 8th row, e4m3", {"kernel": "masses_stride_8", "dtype": "e4m3"}, 0.08),
    ("block masses, every row, e4m3", {"kernel": "masses_stride_1", "dtype": "e4m3"}, 0.60),
    ("tile storage, e4m3", {"kernel": "tiles", "dtype": "e4m3"}, 0.06),
)
KERNEL_COLUMNS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("guide", {"kernel": "guide"}),
    ("translate 1 head", {"kernel": "translate", "dtype": "e4m3", "k": 1}),
    ("2 heads", {"kernel": "translate", "dtype": "e4m3", "k": 2}),
    ("4 heads", {"kernel": "translate", "dtype": "e4m3", "k": 4}),
    ("all heads", {"kernel": "translate_all_heads"}),
    ("1 head, bf16 tiles", {"kernel": "translate", "dtype": "bf16", "k": 1}),
    ("tile storage", {"kernel": "tiles", "dtype": "e4m3"}),
)


QUALITY_DIGITS = {"prefix_kl": 4, "prefix_kl_ratio": 2, "suffix_kl": 4, "density": 3, "kept_differ": 3}


def find(cases: Iterable[Case], **wanted: Any) -> Case:
    """The one case with these values; its density within 0.002 of the one asked for (blocks are whole)."""
    density = wanted.pop("density", None)
    found = [
        case
        for case in cases
        if all(case[key] == value for key, value in wanted.items())
        and (density is None or abs(case["density"] - density) < 0.002)
    ]
    if len(found) != 1:
        raise LookupError(f"expected one case of {wanted} at density {density}, got {len(found)}")
    return found[0]


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def aims(report: dict[str, Any]) -> str:
    """What was aimed at, and what was reached."""
    cases = [case for case in report["cases"] if case["model"] == "qwen3-8b" and case["context"] == 32768]
    rows = []
    for name, wanted, aim in AIMS:
        density = 1.0 if "masses" in wanted["kernel"] else 0.1
        case = find(cases, density=density, **wanted)
        verdict = "yes" if case["ratio"] <= aim else "**no**"
        spread = f"{case['low_ms']:.3f} to {case['high_ms']:.3f}"
        floor = f"{case['floor_ms']:.3f}"
        rows.append([name, f"{aim:.3f}", f"{case['ratio']:.3f}", verdict, f"{case['ms']:.3f}", spread, floor])
    return table(["", "aim", "ratio", "met", "ms", "20th to 80th percentile", "floor, ms"], rows)


def full_density(report: dict[str, Any]) -> str:
    """Guide with every block kept beside full attention."""
    rows = []
    for context in sorted({case["context"] for case in report["cases"]}):
        cases = [case for case in report["cases"] if case["model"] == "qwen3-8b" and case["context"] == context]
        ours, cudnn = find(cases, kernel="guide", density=1.0), find(cases, kernel="full_cudnn")
        flash = find(cases, kernel="full_flash_attention_3")
        times = [f"{one['ms']:.3f}" for one in (cudnn, flash, ours)]
        rows.append([f"{context:,}", *times, f"{100 * (ours['ms'] / flash['ms'] - 1):+.1f} %"])
    return table(["context", "cuDNN, ms", "FlashAttention 3, ms", "guide, ms", "to FlashAttention 3"], rows)


def ratios(report: dict[str, Any], model: str) -> str:
    """Every kernel at every context and density, as ratios to cuDNN."""
    cases = [case for case in report["cases"] if case["model"] == model]
    rows = []
    for context in sorted({case["context"] for case in cases}):
        here = [case for case in cases if case["context"] == context]
        full = find(here, kernel="full_cudnn")["ms"]
        for density in (0.02, 0.05, 0.1, 0.2):
            if context * density < 2 * 128 and density < 0.1:
                continue  # less than two blocks a row: the diagonal and the first are more than that
            try:
                values = [f"{find(here, density=density, **wanted)['ratio']:.3f}" for _, wanted in KERNEL_COLUMNS]
            except LookupError:
                continue
            rows.append([f"{context:,}", f"{density:.2f}", f"{full:.3f}", *values])
    return table(["context", "density", "full, ms", *(name for name, _ in KERNEL_COLUMNS)], rows)


def flex(report: dict[str, Any]) -> str:
    """FlexAttention with the same block mask."""
    rows = []
    for case in report["cases"]:
        if case["kernel"] == "flex_attention":
            same = [c for c in report["cases"] if c["model"] == case["model"] and c["context"] == case["context"]]
            ours = find(same, kernel="guide", density=case["density"])
            times = [f"{case['context']:,}", f"{case['density']:.2f}", f"{case['ms']:.3f}", f"{ours['ms']:.3f}"]
            rows.append([*times, f"{case['ms'] / ours['ms']:.2f}"])
    return table(["context", "density", "FlexAttention, ms", "guide, ms", "times slower"], rows)


def fp8_quality(report: dict[str, Any]) -> str:
    """What rounding operands to e4m3 does to the receiver's next-token distribution; mean and deviation."""
    rows = []
    for name, found in report["blocks"]["64"]["variants"].items():
        cells = []
        for metric, digits in QUALITY_DIGITS.items():
            value = found.get(metric)
            cells.append("" if value is None else f"{value['mean']:.{digits}f} ± {value['sd']:.{digits}f}")
        rows.append([name, *cells])
    header = ["prefix KL, nats", "of it, to exact operands", "suffix KL, nats", "density", "kept blocks that differ"]
    return table(["", *header], rows)


def end_to_end() -> dict[str, str]:
    """Of the end-to-end results that are there."""
    found = {}
    if TTFT.exists():
        report = json.loads(TTFT.read_text())
        found |= {f"ttft {name}": table(*make(report)) for name, make in ttft_tables.TTFT.items()}
    if RIVAL.exists():
        found["rival"] = table(*ttft_tables.rival(json.loads(RIVAL.read_text())))
    if TTFT_SMALL.exists():
        found["ttft qwen3-1.7b"] = table(*ttft_tables.ttft(json.loads(TTFT_SMALL.read_text())))
    if TRACE.exists():
        found["trace"] = table(*ttft_tables.trace(json.loads(TRACE.read_text())))
    if PUBLISHING.exists():
        found["publishing"] = table(*ttft_tables.publishing(json.loads(PUBLISHING.read_text())))
    return found


def service() -> dict[str, str]:
    """Of the daemon under load."""
    report = json.loads(SERVICE.read_text())
    return {
        "service latencies": table(*service_tables.latencies(report)),
        "service load": table(*service_tables.load(report)),
        "hit rates": table(*service_tables.hit_rates(json.loads(HIT_RATE.read_text()))),
    }


def tables() -> dict[str, str]:
    """By the name of their place in the documentation."""
    report = json.loads(KERNELS.read_text())
    return (
        end_to_end()
        | service()
        | {
            "kernels aims": aims(report),
            "kernels full density": full_density(report),
            "kernels flex": flex(report),
            "kernels qwen3-8b": ratios(report, "qwen3-8b"),
            "kernels qwen3-1.7b": ratios(report, "qwen3-1.7b"),
            "kernels ministral-3b": ratios(report, "ministral-3b"),
            "fp8 quality": fp8_quality(json.loads(FP8.read_text())),
        }
    )


def fill(text: str) -> str:
    """The text with every table between its markers, `<!-- NAME -->` and `<!-- end -->`, replaced."""
    for name, content in tables().items():
        start = text.index(f"<!-- {name} -->") + len(f"<!-- {name} -->")
        text = text[:start] + "\n" + content + "\n" + text[text.index("<!-- end -->", start) :]
    return text


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        PERFORMANCE.write_text(fill(PERFORMANCE.read_text()))
    else:
        print("\n\n".join(f"{name}\n{content}" for name, content in tables().items()))
