"""What a calibration run is asked to do, checked before anything is loaded.

Values only: no file is opened here, no model and no tokenizer is known. Other modules report what is wrong with files
and models through the one exception defined here, whose message is a single line that names the value and the way out.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, fields
from pathlib import Path

from mapflow.connector.plan import Mode

BLOCKS = (64, 128)
DTYPES = ("float32", "bfloat16", "float16")
TILE_DTYPES = ("e4m3", "bf16")
PLAN_SUFFIX = ".safetensors"
# what the sums do not depend on
_NOT_IN_DIGEST = ("out", "device", "tune_steps", "tune_tokens", "max_kl", "target_ttft", "context", "one_at_a_time")


class CalibrationError(ValueError):
    """Calibration cannot go on; the message is one line that names what is wrong and the way out."""


def first_line(error: BaseException) -> str:
    """Another library's message as far as its first line end, to quote in a message of one line."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationConfig:
    """One run of `mapflow calibrate`.

    Attributes:
        sender: directory of the model whose maps are published.
        receiver: directory of the model that reuses them.
        texts: a `.jsonl` with a "text" or a "messages" field a line, or one `.txt`.
        out: the plan to write; its stem is the plan's name.
        mode: guide or translate, for every layer that reuses.
        first_layer: first receiver layer that reuses; the ones below compute. None: a sixth of the depth, 1 to 3.
        top_p: share kept in each block row, in (0, 1], see `LayerPlan`; None for what suits the mode.
        sink_blocks: leading column blocks that guide always keeps.
        local_blocks: column blocks up to the diagonal that guide always keeps.
        heads_per_head: sender heads combined into each receiver head by translate; None: all of them.
        tile_dtype: storage of translate's tiles, e4m3 or bf16.
        chunk_tokens: tokens a chunk, a multiple of `block`.
        block: tokens along one side of a block, 64 or 128.
        max_tokens: a document's tokens beyond these are cut off.
        row_fraction: share of token rows, chosen at random, that enter the normal equations, in (0, 1].
        seed: seed of that choice.
        tune_steps: steps in which translate's head weights are tuned to the receiver's distributions (`tuning.py`), a
            piece of a text each; every fourth text then judges instead of being fitted.
        tune_tokens: of those pieces; the maps of 16 of them wait in host memory, a byte a value.
        max_kl: each layer's mode and p are chosen so that the plan is the fastest whose prefix KL on held-out texts is
            at most this, in nats; `mode` and `top_p` then mean nothing.
        target_ttft: the same, for the best plan that takes at most this share of the prefill's time without reuse.
        context: tokens of the prefill that those times are of.
        device: torch device that runs both models.
        dtype: dtype of both models' weights; None: float32 on a CPU, bfloat16 elsewhere.
        one_at_a_time: hold one model in memory at a time; what the receiver leaves of the texts then waits on disk,
            beside the plan, for the sender.
    """

    sender: Path
    receiver: Path
    texts: Path
    out: Path
    mode: Mode = Mode.GUIDE
    first_layer: int | None = None
    top_p: float | None = None
    sink_blocks: int = 1
    local_blocks: int = 2
    heads_per_head: int | None = None
    tile_dtype: str = "e4m3"
    chunk_tokens: int = 512
    block: int = 64
    max_tokens: int = 2048
    row_fraction: float = 1.0
    seed: int = 0
    tune_steps: int = 0
    tune_tokens: int = 1024
    max_kl: float | None = None
    target_ttft: float | None = None
    context: int = 16384
    device: str = "cpu"
    dtype: str | None = None
    one_at_a_time: bool = False

    def __post_init__(self) -> None:
        """Check every value that can be checked without files.

        Raises:
            CalibrationError: the first value that cannot be used.
        """
        if self.mode not in (Mode.GUIDE, Mode.TRANSLATE):
            raise CalibrationError(f"mode must be guide or translate, got {self.mode}")
        if self.out.suffix != PLAN_SUFFIX:
            raise CalibrationError(f"the plan file must end in {PLAN_SUFFIX}, got {self.out}")
        if self.block not in BLOCKS:
            raise CalibrationError(f"block must be 64 or 128 tokens, got {self.block}")
        if self.chunk_tokens <= 0 or self.chunk_tokens % self.block:
            raise CalibrationError(
                f"chunk_tokens must be a positive multiple of the block ({self.block}), got {self.chunk_tokens}"
            )
        if self.max_tokens < self.block:
            raise CalibrationError(f"max_tokens must be at least one block ({self.block}), got {self.max_tokens}")
        if self.tile_dtype not in TILE_DTYPES:
            raise CalibrationError(f"tile_dtype must be e4m3 or bf16, got {self.tile_dtype}")
        if self.dtype is not None and self.dtype not in DTYPES:
            raise CalibrationError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype}")
        for name in ("top_p", "row_fraction"):
            value = getattr(self, name)
            if value is not None and not 0.0 < value <= 1.0:
                raise CalibrationError(f"{name} must be in (0, 1], got {value}")
        least_of = {"first_layer": 0, "sink_blocks": 0, "local_blocks": 1, "heads_per_head": 1, "tune_steps": 0}
        for name, least in least_of.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise CalibrationError(f"{name} must be at least {least}, got {value}")
        if self.max_kl is not None and self.target_ttft is not None:
            raise CalibrationError("max_kl and target_ttft cannot both be kept; give one of them")
        if self.max_kl is not None and not 0.0 <= self.max_kl < math.inf:
            raise CalibrationError(f"max_kl must be a number of nats, at least 0, got {self.max_kl}")
        if self.target_ttft is not None and not 0.0 < self.target_ttft <= 1.0:
            raise CalibrationError(
                f"target_ttft must be a share of the time without reuse, in (0, 1], got {self.target_ttft}"
            )
        if self.tune_tokens < self.block:
            raise CalibrationError(f"tune_tokens must be at least one block ({self.block}), got {self.tune_tokens}")
        if self.context < self.block:
            raise CalibrationError(f"context must be at least one block ({self.block}), got {self.context}")
        if self.mode is Mode.GUIDE and self.heads_per_head is not None and not self.is_planned:
            raise CalibrationError("heads_per_head is for translate; guide combines the masses of every sender head")
        if self.mode is Mode.GUIDE and self.tune_steps and not self.is_planned:
            raise CalibrationError("tune_steps is for translate; guide's masses only choose blocks")

    @property
    def model_dtype(self) -> str:
        """Name of the torch dtype that the models run in."""
        return self.dtype or ("float32" if self.device == "cpu" else "bfloat16")

    @property
    def is_planned(self) -> bool:
        """Whether each layer's mode is chosen by a budget."""
        return self.max_kl is not None or self.target_ttft is not None

    @property
    def is_judged(self) -> bool:
        """Whether some texts are left out of the fit, to judge it."""
        return self.is_planned or self.tune_steps > 0

    @property
    def checkpoint(self) -> Path:
        """Where an interrupted run keeps its normal equations: `NAME.partial.safetensors` beside the plan."""
        return self.out.with_name(f"{self.out.stem}.partial{PLAN_SUFFIX}")

    @property
    def run_log(self) -> Path:
        """Where an interrupted run with a budget keeps its runs of single layers: `NAME.partial.jsonl`."""
        return self.out.with_name(f"{self.out.stem}.partial.jsonl")

    @property
    def spool(self) -> Path:
        """Folder of what the receiver leaves of texts for the sender to come: `NAME.spool` beside the plan."""
        return self.out.with_name(f"{self.out.stem}.spool")

    @property
    def min_tokens(self) -> int:
        """Calibration tokens below which a fit would mean nothing: four chunks."""
        return 4 * self.chunk_tokens

    @property
    def share(self) -> float:
        """`top_p`, or what its mode takes by default: both keep about a sixth of the blocks at 4k tokens."""
        if self.top_p is not None:
            return self.top_p
        return 0.6 if self.mode is Mode.GUIDE else 0.9

    def resolve_first_layer(self, num_layers: int) -> int:
        """First receiver layer that reuses, given the receiver's depth.

        Raises:
            CalibrationError: no layer would be left to reuse anything.
        """
        first = max(1, min(3, num_layers // 6)) if self.first_layer is None else self.first_layer
        if first >= num_layers:
            raise CalibrationError(
                f"first_layer {first} leaves no layer to reuse: the receiver has {num_layers} layers"
            )
        return first

    def digest(self, *facts: str) -> str:
        """Hash of this configuration and of `facts` (what the files hold): equal means that a run may be resumed."""
        lines = [f"{f.name}={getattr(self, f.name)}" for f in fields(self) if f.name not in _NOT_IN_DIGEST]
        return hashlib.sha256("\0".join([*lines, f"model_dtype={self.model_dtype}", *facts]).encode()).hexdigest()
