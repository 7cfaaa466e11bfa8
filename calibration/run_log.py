"""Runs of single layers that an interrupted calibration need not repeat: JSON lines in a file beside the plan."""

from __future__ import annotations

import json
from pathlib import Path

from mapflow.connector.plan import LayerPlan


class RunLog:
    """What was measured so far, by document, layer and option; every run is on disk when it is added."""

    def __init__(self, path: Path, digest: str) -> None:
        """Read what an earlier run of the same calibration left; another's is overwritten.

        digest: what runs depend on. A last line that was cut off is left out.
        """
        self._path = path
        self._found = _read(path, digest)
        lines = [json.dumps({"digest": digest}), *(_line(key, *found) for key, found in self._found.items())]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")

    def __len__(self) -> int:
        """Runs that are known."""
        return len(self._found)

    def get(self, document: int, layer: int, option: LayerPlan) -> tuple[float, float] | None:
        """Damage and density of a run; None if it was not made."""
        return self._found.get(_key(document, layer, option))

    def add(self, document: int, layer: int, option: LayerPlan, damage: float, density: float) -> None:
        """Keep a run."""
        key = _key(document, layer, option)
        self._found[key] = (damage, density)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(_line(key, damage, density) + "\n")


def _line(key: str, damage: float, density: float) -> str:
    return json.dumps({"run": key, "damage": damage, "density": density})


def _key(document: int, layer: int, option: LayerPlan) -> str:
    parts = (option.mode.value, option.sender_layer, option.top_p, option.sink_blocks, option.local_blocks)
    return " ".join(map(str, (document, layer, *parts)))


def _read(path: Path, digest: str) -> dict[str, tuple[float, float]]:
    lines = []
    if path.is_file():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                lines.append(json.loads(line))
            except ValueError:
                break
    if not lines or lines[0] != {"digest": digest}:
        return {}
    return {line["run"]: (line["damage"], line["density"]) for line in lines[1:]}
