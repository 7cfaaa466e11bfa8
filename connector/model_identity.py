"""Which weights an engine runs: a name and a revision that are the same wherever those weights lie.

A revision of the Hugging Face cache is its commit. A plain directory gets a hash of its configuration and of samples of
its weights: a guard against mixing up models, not against somebody who forges weights. Reads local files only.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import xxhash

_COMMIT = re.compile(r"[0-9a-f]{40}")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_VOLATILE_KEYS = ("transformers_version", "torch_dtype", "dtype", "_name_or_path", "_commit_hash")
_NO_WEIGHTS = ("training_args.bin", "optimizer.bin", "scheduler.bin")
_WHOLE_BYTES = 64 << 20
_SAMPLES = 16
_SAMPLE_BYTES = 64 << 10
_MAX_HEADER_BYTES = 100 << 20


def model_id(model: str | os.PathLike[str], revision: str | None = None) -> tuple[str, str]:
    """Name and revision of a local model directory, or of a model in the Hugging Face cache.

    Args:
        model: a directory, or a name such as `org/model`.
        revision: branch, tag or commit of a model that is given by name; of no meaning for a directory.

    Returns:
        The directory's base name and 16 hex digits; for a model of the Hugging Face cache, by name or by directory, its
        name and its commit.

    Raises:
        ValueError: no such model here, or a directory that holds none.
    """
    directory = local_directory(model, revision)
    name = _name_of_snapshot(directory)
    if name is not None:
        return name, directory.name
    return directory.name, _hash_directory(directory)


def local_directory(model: str | os.PathLike[str], revision: str | None = None) -> Path:
    """Where a model or a tokenizer lies: the directory itself, or its snapshot in the Hugging Face cache.

    Raises:
        ValueError: no such directory, and no such snapshot here.
    """
    directory = Path(os.path.abspath(model))
    if os.fspath(model) and directory.is_dir():
        return directory
    return _snapshot(os.fspath(model), revision)


def _name_of_snapshot(directory: Path) -> str | None:
    parts = directory.parts
    if len(parts) >= 3 and parts[-2] == "snapshots" and _COMMIT.fullmatch(parts[-1]):
        prefix, _, name = parts[-3].partition("--")
        if prefix == "models" and name:
            return name.replace("--", "/")
    return None


def _cache_directory() -> Path:
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if os.environ.get(variable):
            return Path(os.environ[variable]).expanduser()
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(home).expanduser() / "hub"


def _snapshot(name: str, revision: str | None) -> Path:
    cache = _cache_directory()
    if not _HUB_NAME.fullmatch(name) or name.count("--"):
        raise ValueError(f"model {name!r} is neither a directory nor the name of a Hugging Face model")
    model = cache / f"models--{name.replace('/', '--')}"
    if not model.is_dir():
        raise ValueError(
            f"model {name!r} is neither a directory nor in the Hugging Face cache {cache}; download it first"
        )
    wanted = revision or "main"
    reference = model / "refs" / wanted
    if not _COMMIT.fullmatch(wanted) and ".." not in wanted and reference.is_file():
        wanted = reference.read_text(encoding="utf-8").strip()
    if not _COMMIT.fullmatch(wanted) or not (model / "snapshots" / wanted).is_dir():
        raise ValueError(f"revision {revision or 'main'!r} of model {name!r} is not in the Hugging Face cache {cache}")
    return model / "snapshots" / wanted


def _hash_directory(directory: Path) -> str:
    config = directory / "config.json"
    if not config.is_file():
        raise ValueError(f"{directory} holds no config.json, so it is no model directory")
    try:
        document = json.loads(config.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{config} is no JSON: {error}") from error
    hasher = xxhash.xxh3_64(json.dumps(_stable(document), sort_keys=True, separators=(",", ":")).encode())
    files = sorted(directory.glob("*.safetensors")) or sorted(directory.glob("*.bin"))
    files = [file for file in files if file.name not in _NO_WEIGHTS]
    if not files:
        raise ValueError(f"{directory} holds no weights: neither *.safetensors nor *.bin")
    for file in files:
        _hash_weights(hasher, file)
    return str(hasher.hexdigest())


def _stable(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _stable(item) for key, item in value.items() if key not in _VOLATILE_KEYS}
    return [_stable(item) for item in value] if isinstance(value, list) else value


def _hash_weights(hasher: Any, path: Path) -> None:
    size = path.stat().st_size
    hasher.update(f"\0{path.name}\0{size}\0".encode())
    with path.open("rb") as file:
        if size <= _WHOLE_BYTES:
            hasher.update(file.read())
            return
        if path.suffix == ".safetensors":
            header_bytes = int.from_bytes(file.read(8), "little")
            hasher.update(file.read(min(header_bytes, _MAX_HEADER_BYTES)))
        for sample in range(_SAMPLES):
            file.seek((size - _SAMPLE_BYTES) * sample // (_SAMPLES - 1))
            hasher.update(file.read(_SAMPLE_BYTES))
