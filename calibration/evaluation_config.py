"""What `mapflow evaluate` is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mapflow.calibration.config import DTYPES, CalibrationError


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationConfig:
    """What plans are judged on.

    Attributes:
        sender: directory of the sender.
        receiver: directory of the receiver.
        texts: held-out texts, as calibration reads them.
        max_tokens: a document's tokens beyond these are cut off.
        max_documents: documents used at most.
        prefix_rows: last reused rows whose next-token distributions count.
        suffix_tokens: least number of tokens that follow the reused rows and attend fully.
        samples_per_task: samples of each retrieval task, at depths from the prefix's beginning to its end.
        context: tokens of the prefill whose time and bytes are estimated.
        device: torch device that runs both models.
        dtype: dtype of both models' weights.
        one_at_a_time: hold one model in memory at a time; each is then loaded once a text.
    """

    sender: Path
    receiver: Path
    texts: Path
    max_tokens: int = 2048
    max_documents: int = 16
    prefix_rows: int = 1024
    suffix_tokens: int = 64
    samples_per_task: int = 0
    context: int = 16384
    device: str = "cpu"
    dtype: str = "float32"
    one_at_a_time: bool = False

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            CalibrationError: the first value that cannot be used.
        """
        least = {
            "max_tokens": 1,
            "max_documents": 1,
            "prefix_rows": 1,
            "suffix_tokens": 2,
            "samples_per_task": 0,
            "context": 1,
        }
        for name, value in least.items():
            if getattr(self, name) < value:
                raise CalibrationError(f"{name} must be at least {value}, got {getattr(self, name)}")
        if self.dtype not in DTYPES:
            raise CalibrationError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype}")
