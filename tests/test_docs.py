"""The map of the modules names every module, and no other."""

import importlib.util
import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("kernels", "cache_service", "connector", "calibration", "cli")


def test_architecture_names_every_module() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    house = text[text.index("## The house") : text.index("## Decisions")]
    named = {name.strip("/").split("/")[-1] for name in re.findall(r"`([\w/]+)`", house)}
    modules = {path.stem for folder in FOLDERS for path in (ROOT / folder).rglob("*.py") if path.stem != "__init__"}
    assert modules <= named, f"not in docs/architecture.md: {sorted(modules - named)}"


def test_every_module_says_what_it_is_for() -> None:
    silent = [
        str(path.relative_to(ROOT))
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        if not path.read_text().startswith('"""')
    ]
    assert not silent


def test_the_tables_are_those_of_the_results() -> None:
    spec = importlib.util.spec_from_file_location("tables", ROOT / "benchmarks/tables.py")
    assert spec is not None and spec.loader is not None
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    text = tables.PERFORMANCE.read_text()
    assert tables.fill(text) == text, "run `python benchmarks/tables.py --write`"
    report = json.loads(tables.KERNELS.read_text())
    assert report["gpu"] in text and report["commit"][:7] in text
