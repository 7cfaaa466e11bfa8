"""Loads the two models of a pair and tells their shapes.

Reads configurations and weights from local directories only; it never downloads, and never runs code that a model
directory brings along.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from mapflow.calibration.config import CalibrationError, first_line
from mapflow.calibration.cost import LayerShape
from mapflow.connector.model_identity import model_id
from mapflow.connector.plan import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What a model's configuration says, without its weights.

    Attributes:
        directory: where the model lies.
        spec: its name, revision and the shape of its attention.
        full_layers: layers whose rows see every column up to their own, ascending; only these have maps to reuse.
        vocab_size: rows of its embedding.
        max_positions: longest prompt it was made for, in tokens; None where the configuration doesn't say.
    """

    directory: Path
    spec: ModelSpec
    full_layers: tuple[int, ...]
    vocab_size: int
    max_positions: int | None


def read_facts(directory: Path) -> ModelFacts:
    """Read one model directory's configuration.

    Raises:
        CalibrationError: the directory or its configuration cannot be used.
    """
    if not directory.is_dir():
        raise CalibrationError(f"model directory {directory} does not exist")
    try:
        name, revision = model_id(directory)
    except ValueError as error:
        raise CalibrationError(first_line(error)) from error
    try:
        config = AutoConfig.from_pretrained(str(directory), local_files_only=True).get_text_config()
    except Exception as error:  # every model family checks its configuration in its own way
        raise CalibrationError(f"no model configuration can be read from {directory}: {first_line(error)}") from error
    num_heads = config.num_attention_heads
    spec = ModelSpec(
        name=name,
        revision=revision,
        num_layers=config.num_hidden_layers,
        num_heads=num_heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or num_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // num_heads,
    )
    return ModelFacts(
        directory=directory,
        spec=spec,
        full_layers=_full_layers(config),
        vocab_size=config.vocab_size,
        max_positions=getattr(config, "max_position_embeddings", None),
    )


def layer_shape(facts: ModelFacts) -> LayerShape:
    """What a layer of the model holds, on average; told by its configuration alone.

    Raises:
        CalibrationError: transformers knows no such model.
    """
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(str(facts.directory)))
    except (OSError, ValueError) as error:
        raise CalibrationError(f"no model can be made as {facts.directory} says: {first_line(error)}") from error
    layers = model.get_decoder().layers
    num_params = sum(one.numel() for one in layers.parameters()) // len(layers)
    spec, hidden = facts.spec, model.get_decoder().config.hidden_size
    attention = 2 * hidden * spec.head_dim * (spec.num_heads + spec.num_kv_heads)
    return LayerShape(spec=spec, hidden=hidden, mlp_params=max(0, num_params - attention))


def _way_out(error: BaseException) -> str:
    return "; --one-at-a-time needs less memory" if isinstance(error, torch.OutOfMemoryError) else ""


def _full_layers(config: PretrainedConfig) -> tuple[int, ...]:
    """Layers with full attention: by `layer_types` where the configuration has them, else all or none."""
    types = getattr(config, "layer_types", None)
    if types is not None:
        return tuple(number for number, kind in enumerate(types) if kind == "full_attention")
    slides = getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)
    return () if slides else tuple(range(config.num_hidden_layers))


def load_model(facts: ModelFacts, *, device: str, dtype: str) -> PreTrainedModel:
    """The model with frozen weights, ready to run.

    Raises:
        CalibrationError: the weights cannot be loaded, or the device cannot be used.
    """
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()  # the caller shows its own progress
    try:
        model = AutoModelForCausalLM.from_pretrained(
            str(facts.directory), dtype=getattr(torch, dtype), local_files_only=True
        )
        return model.to(device).eval().requires_grad_(False)
    except (OSError, ValueError, RuntimeError) as error:
        raise CalibrationError(
            f"model {facts.directory} cannot be loaded on {device}: {first_line(error)}{_way_out(error)}"
        ) from error
    finally:
        if shown:
            transformers_logging.enable_progress_bar()
