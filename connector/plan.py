"""A plan: what calibration found out about one pair of models, in one `.safetensors` file.

For every receiver layer it says how attention is obtained (`Mode`), from which sender layer, and how the sender's heads
combine into the receiver's. This room reads, checks and writes plans; it never looks at weights, texts or requests.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from mapflow.connector.namespace import Namespace

PLAN_VERSION = 1
_METADATA_KEY = "mapflow_plan"


class PlanError(ValueError):
    """A plan file that cannot be used; the message names the file and the way out."""


class Mode(StrEnum):
    """How a receiver layer gets its attention."""

    COMPUTE = "compute"
    """As without MapFlow."""
    STATIC = "static"
    """Exact attention inside sink + local blocks; needs no map."""
    GUIDE = "guide"
    """Exact attention inside the blocks that the sender's masses point to."""
    TRANSLATE = "translate"
    """The sender's probabilities times the receiver's values; no softmax of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """One model of the pair: what it is called and which shape its attention has."""

    name: str
    revision: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def model_id(self) -> str:
        """`<name>@<revision>`, as producers announce it."""
        return f"{self.name}@{self.revision}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPlan:
    """One receiver layer.

    Attributes:
        mode: how the layer gets its attention.
        sender_layer: the sender layer it reuses; None where the mode needs none.
        top_p: share kept in each block row, in (0, 1]: of the masses' square roots for guide, see
            `mask.guide_mask`, of the masses for the tiles of translate.
        sink_blocks: leading column blocks that guide and static always keep.
        local_blocks: column blocks up to and including the diagonal that guide and static always keep.
        error: relative L2 error of the layer's attention output on calibration text when translated densely.
    """

    mode: Mode
    sender_layer: int | None = None
    top_p: float = 1.0
    sink_blocks: int = 1
    local_blocks: int = 2
    error: float = 0.0

    def __post_init__(self) -> None:
        """Check one layer's values.

        Raises:
            ValueError: a mode without its sender layer, or a number out of range.
        """
        if self.needs_map != (self.sender_layer is not None):
            raise ValueError(f"mode {self.mode} and sender layer {self.sender_layer} do not go together")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if self.sink_blocks < 0 or self.local_blocks < 1:
            raise ValueError(
                f"need sink_blocks >= 0 and local_blocks >= 1, got {self.sink_blocks} and {self.local_blocks}"
            )

    @property
    def needs_map(self) -> bool:
        """Whether the layer reads the sender's maps."""
        return self.mode in (Mode.GUIDE, Mode.TRANSLATE)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """The plan of one pair.

    Attributes:
        name: short name that requests select the plan by; the file's stem.
        layers: one per receiver layer.
        head_map: receiver layer -> f32 [receiver heads, sender heads]; for guide layers.
        head_index: receiver layer -> i32 [receiver heads, k]; sender heads that a translate layer combines.
        head_weight: receiver layer -> f32 [receiver heads, k]; their weights.
        tile_dtype: storage of translate's tiles, "e4m3" or "bf16".
    """

    name: str
    tokenizer_fingerprint: str
    chunk_tokens: int
    block: int
    sender: ModelSpec
    receiver: ModelSpec
    layers: tuple[LayerPlan, ...]
    head_map: Mapping[int, torch.Tensor] = field(default_factory=dict)
    head_index: Mapping[int, torch.Tensor] = field(default_factory=dict)
    head_weight: Mapping[int, torch.Tensor] = field(default_factory=dict)
    tile_dtype: str = "e4m3"

    def __post_init__(self) -> None:
        """Check that layers, shapes and head maps fit together.

        Raises:
            ValueError: the first inconsistency, by layer.
        """
        if len(self.layers) != self.receiver.num_layers:
            raise ValueError(f"{len(self.layers)} layers planned for a receiver of {self.receiver.num_layers}")
        if self.tile_dtype not in ("e4m3", "bf16"):
            raise ValueError(f"tile_dtype must be e4m3 or bf16, got {self.tile_dtype}")
        self.namespace()  # checks block, chunk and fingerprint
        heads = (self.receiver.num_heads, self.sender.num_heads)
        for number, layer in enumerate(self.layers):
            if layer.sender_layer is not None and not 0 <= layer.sender_layer < self.sender.num_layers:
                raise ValueError(f"layer {number}: sender layer {layer.sender_layer} of {self.sender.num_layers}")
            if layer.mode is Mode.GUIDE:
                self._check(self.head_map, number, torch.float32, heads)
            elif layer.mode is Mode.TRANSLATE:
                index = self.head_index.get(number)
                per_head = (heads[0], index.shape[-1] if index is not None and index.ndim else 0)
                self._check(self.head_index, number, torch.int32, per_head)
                self._check(self.head_weight, number, torch.float32, per_head)
                if index is None or index.numel() == 0 or index.min() < 0 or index.max() >= heads[1]:
                    raise ValueError(f"layer {number}: needs one sender head or more, each in [0, {heads[1]})")

    @staticmethod
    def _check(tensors: Mapping[int, torch.Tensor], layer: int, dtype: torch.dtype, shape: tuple[int, int]) -> None:
        tensor = tensors.get(layer)
        got = None if tensor is None else (tensor.dtype, tuple(tensor.shape))
        if got != (dtype, shape):
            raise ValueError(f"layer {layer}: expected a head map of {dtype} {list(shape)}, got {got}")
        if tensor is not None and not torch.isfinite(tensor.float()).all():
            raise ValueError(f"layer {layer}: the head map holds values that are not finite")

    @property
    def map_layers(self) -> tuple[int, ...]:
        """Sender layers that some receiver layer reads, ascending."""
        return tuple(sorted({layer.sender_layer for layer in self.layers if layer.sender_layer is not None}))

    @property
    def reusing_layers(self) -> tuple[int, ...]:
        """Receiver layers that do anything but compute, ascending."""
        return tuple(number for number, layer in enumerate(self.layers) if layer.mode is not Mode.COMPUTE)

    @property
    def reusing_modes(self) -> tuple[Mode, ...]:
        """What those layers do, each mode once, by name."""
        return tuple(sorted({self.layers[number].mode for number in self.reusing_layers}))

    @property
    def digest(self) -> str:
        """16 hex digits that change whenever reuse under this plan could change a result."""
        hasher = xxhash.xxh3_64(self._json().encode())
        for name, tensor in sorted(self._tensors().items()):
            hasher.update(name.encode())
            hasher.update(tensor.contiguous().numpy().tobytes())
        return hasher.hexdigest()

    def namespace(self, tenant: str = "") -> Namespace:
        """The namespace in which sender and receiver meet under this plan."""
        return Namespace(
            tokenizer_fingerprint=self.tokenizer_fingerprint,
            chunk_tokens=self.chunk_tokens,
            block=self.block,
            tenant=tenant,
        )

    def save(self, path: Path) -> None:
        """Write the plan; the file appears whole or not at all."""
        partial = path.with_name(path.name + ".partial")
        partial.write_bytes(save(self._tensors(), metadata={_METADATA_KEY: self._json()}))  # with the umask's mode
        partial.replace(path)

    def _tensors(self) -> dict[str, torch.Tensor]:
        kinds = {"head_map": self.head_map, "head_index": self.head_index, "head_weight": self.head_weight}
        return {
            f"{kind}.{layer}": value.contiguous() for kind, values in kinds.items() for layer, value in values.items()
        }

    def _json(self) -> str:
        document = {
            "version": PLAN_VERSION,
            "tokenizer_fingerprint": self.tokenizer_fingerprint,
            "chunk_tokens": self.chunk_tokens,
            "block": self.block,
            "tile_dtype": self.tile_dtype,
            "sender": asdict(self.sender),
            "receiver": asdict(self.receiver),
            "layers": [asdict(layer) for layer in self.layers],
        }
        return json.dumps(document, sort_keys=True)


def load_plan(path: Path) -> Plan:
    """Read a plan file.

    Raises:
        PlanError: the file is missing, is no plan, is of another version, or contradicts itself.
    """
    if not path.is_file():
        raise PlanError(f"plan file {path} does not exist; make one with `mapflow calibrate --out {path}`")
    try:
        with safe_open(str(path), "pt") as file:
            text = (file.metadata() or {}).get(_METADATA_KEY)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except (SafetensorError, OSError) as error:
        raise PlanError(f"plan file {path} cannot be read as safetensors: {error}") from error
    if text is None:
        raise PlanError(f"{path} is a safetensors file but holds no plan; make one with `mapflow calibrate`")
    try:
        return _from_json(path.stem, json.loads(text), tensors)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise PlanError(f"plan file {path} is not usable: {error}; make it again with `mapflow calibrate`") from error


def _from_json(name: str, document: dict[str, object], tensors: Mapping[str, torch.Tensor]) -> Plan:
    version = document.pop("version")
    if version != PLAN_VERSION:
        raise ValueError(f"its version is {version}, this release reads version {PLAN_VERSION}")
    maps: dict[str, dict[int, torch.Tensor]] = {"head_map": {}, "head_index": {}, "head_weight": {}}
    for key, tensor in tensors.items():
        kind, _, layer = key.partition(".")
        maps[kind][int(layer)] = tensor
    layers = tuple(LayerPlan(**{**layer, "mode": Mode(layer["mode"])}) for layer in document.pop("layers"))  # type: ignore[attr-defined]
    models = {side: ModelSpec(**document.pop(side)) for side in ("sender", "receiver")}  # type: ignore[arg-type]
    return Plan(name=name, layers=layers, **models, **maps, **document)  # type: ignore[arg-type]


def with_top_p(plan: Plan, top_p: float) -> Plan:
    """The same plan with another `top_p` in every guide and translate layer."""
    return replace(
        plan, layers=tuple(replace(layer, top_p=top_p) if layer.needs_map else layer for layer in plan.layers)
    )
