"""The report page: what there is stands on it, and it needs nothing else."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import numpy as np  # noqa: E402
from typer.testing import CliRunner, Result  # noqa: E402

from mapflow.calibration.calibrate import calibrate  # noqa: E402
from mapflow.calibration.config import CalibrationConfig  # noqa: E402
from mapflow.calibration.report_figures import Dot, frontier_svg, mass_png, weights_png  # noqa: E402
from mapflow.cli.main import app  # noqa: E402

from .conftest import Pair, write_texts  # noqa: E402


@pytest.fixture(scope="module")
def planned(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan that was chosen by a budget, its frontier and its quality beside it."""
    folder = tmp_path_factory.mktemp("planned")
    texts, out = write_texts(folder / "long.jsonl", [700, 640, 650, 660], seed=3), folder / "plan.safetensors"
    models = {"sender": pair.sender, "receiver": pair.receiver}
    sizes = {"chunk_tokens": 64, "first_layer": 1, "context": 1 << 20}
    calibrate(CalibrationConfig(**models, texts=texts, out=out, max_kl=0.02, **sizes))
    judged = run("evaluate", out, *common(pair, texts), "--retrieval", 1, "--out", folder / "quality.json")
    assert judged.exit_code == 0, judged.output
    return out


def common(pair: Pair, texts: Path) -> Sequence[object]:
    return "--sender", pair.sender, "--receiver", pair.receiver, "--texts", texts


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)))


def test_a_plan_with_its_frontier_and_quality(planned: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    done = run("report", planned, "--out", out, "--quality", planned.with_name("quality.json"))
    assert done.exit_code == 0, done.output
    page = out.read_text()
    for heading in ("Quality against time", "Held against its baselines", "Layer map", "What to type next"):
        assert heading in page
    assert page.count('class="chosen"') == 1 and page.count('class="measured"') >= 3
    assert "online" in page and "multi_key" in page and "of a prefill&#39;s time" in page
    assert "vllm serve receiver" in page and str(planned) in page
    assert_alone(page)


def test_maps_of_a_text(planned: Path, pair: Pair, tmp_path: Path) -> None:
    """Of a plan without a frontier whose layers all read maps: three images for each of two layers, and head maps."""
    texts, plan = planned.with_name("long.jsonl"), tmp_path / "guide.safetensors"
    calibrate(
        CalibrationConfig(
            sender=pair.sender, receiver=pair.receiver, texts=texts, out=plan, chunk_tokens=64, first_layer=1
        )
    )
    done = run("report", plan, "--out", tmp_path / "report.html", *common(pair, texts))
    assert done.exit_code == 0, done.output
    page = (tmp_path / "report.html").read_text()
    assert "Head maps" in page and "side by side" in page and "Quality against time" not in page
    assert page.count('src="data:image/png;base64,') == 2 + 2 * 3
    assert_alone(page)


def assert_alone(page: str) -> None:
    assert not re.search(r"(src|href)=\"(?!data:)", page) and "http" not in page, "needs nothing else"


def test_a_plan_alone(planned: Path, tmp_path: Path) -> None:
    alone = tmp_path / "alone.safetensors"
    alone.write_bytes(planned.read_bytes())
    assert run("report", alone, "--out", tmp_path / "report.html").exit_code == 0
    page = (tmp_path / "report.html").read_text()
    assert "Layer map" in page and "Quality against time" not in page and "side by side" not in page


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--out", "/nowhere/at/all.html"), "/nowhere/at, where all.html is to be written, is no directory"),
        (("--out", "{tmp}/r.html", "--sender", "x"), "give all three or none"),
        (("--out", "{tmp}/r.html", "--quality", "{plan}"), "cannot be read as JSON"),
        (("--out", "{tmp}/r.html", "--quality", "{frontier}"), "holds no 'cases'"),
    ],
)
def test_what_cannot_be_used_is_said_in_a_line(
    planned: Path, tmp_path: Path, arguments: Sequence[str], message: str
) -> None:
    places = {"tmp": tmp_path, "plan": planned, "frontier": planned.with_name("plan.frontier.json")}
    done = run("report", planned, *(one.format(**places) for one in arguments))
    assert done.exit_code == 2 and message in done.stderr and done.stderr.count("\n") == 1


def test_figures_of_nothing_much() -> None:
    """No reuse at all; images of any size."""
    svg = frontier_svg([Dot(share=1.0, expected=0.0, measured=0.0, is_chosen=True)])
    assert svg.startswith("<svg") and svg.endswith("</svg>") and "nan" not in svg
    for image in (mass_png(np.zeros((1, 1), dtype=np.float32)), weights_png(np.zeros((2, 3), dtype=np.float32))):
        assert image.startswith("data:image/png;base64,")
