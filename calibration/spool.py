"""What the receiver leaves of texts, on disk until the sender comes: for pairs too large to be in memory together."""

from __future__ import annotations

import os
import shutil
from dataclasses import fields
from pathlib import Path

from safetensors.torch import load_file, save_file

from mapflow.calibration.normal_equations import ReceiverSide

_DIGEST = "digest"


class Spool:
    """A folder with a file a text, each there whole or not at all; whoever has the plan removes it."""

    def __init__(self, folder: Path, digest: str) -> None:
        """Go on with what an interrupted run of the same calibration left, or start anew.

        digest: changes whenever what is kept could be another.
        """
        self._folder = folder
        mark = folder / _DIGEST
        if not mark.is_file() or mark.read_text(encoding="utf-8") != digest:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            mark.write_text(digest, encoding="utf-8")

    def has(self, number: int) -> bool:
        """Whether a text is there."""
        return self._file(number).is_file()

    def put(self, number: int, side: ReceiverSide) -> None:
        """Keep a text."""
        partial = self._folder / "new"
        save_file({field.name: getattr(side, field.name).contiguous() for field in fields(side)}, str(partial))
        os.replace(partial, self._file(number))

    def take(self, number: int, device: str) -> ReceiverSide:
        """A text's, on a device."""
        return ReceiverSide(**load_file(str(self._file(number)), device=device))

    def _file(self, number: int) -> Path:
        return self._folder / f"{number}.safetensors"
