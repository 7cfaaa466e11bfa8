"""Outcomes of runs that an interrupted command need not repeat: JSON lines in a file beside what it will write."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


class ResumeLog:
    """What was measured so far, by the name of the run; every outcome is on disk when it is added."""

    def __init__(self, path: Path | None, digest: str) -> None:
        """Read what an earlier run of the same command left; another's is overwritten.

        path: None keeps nothing on disk. digest: what outcomes depend on. A last line that was cut off is left out.
        """
        self._path = path
        self._found: dict[str, Any] = {}
        if path is None:
            return
        self._found = _read(path, digest)
        lines = [json.dumps({"digest": digest}), *(_line(*found) for found in self._found.items())]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")

    def __len__(self) -> int:
        """Runs that are known."""
        return len(self._found)

    def get(self, run: str) -> Any:
        """A run's outcome, as JSON reads it; None if it was not made."""
        return self._found.get(run)

    def add(self, run: str, outcome: Any) -> None:
        """Keep the outcome of a run, plain data."""
        self._found[run] = outcome
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(_line(run, outcome) + "\n")

    def outcome(self, run: str, make: Callable[[], Any]) -> Any:
        """A run's outcome; made and kept where it is not known."""
        found = self.get(run)
        if found is None:
            found = make()
            self.add(run, found)
        return found


def _line(run: str, outcome: Any) -> str:
    return json.dumps({"run": run, "outcome": outcome})


def _read(path: Path, digest: str) -> dict[str, Any]:
    lines = []
    if path.is_file():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                lines.append(json.loads(line))
            except ValueError:
                break
    if not lines or lines[0] != {"digest": digest}:
        return {}
    return {line["run"]: line["outcome"] for line in lines[1:]}
