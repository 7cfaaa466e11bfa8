"""Model identities: equal for equal weights wherever they lie."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from mapflow.connector import model_identity
from mapflow.connector.model_identity import model_id

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def _make_model(directory: Path, weights: bytes = bytes(range(256)) * 8) -> Path:
    directory.mkdir(parents=True)
    config = {"model_type": "llama", "num_hidden_layers": 2, "transformers_version": "5.0", "torch_dtype": "float32"}
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (directory / "model.safetensors").write_bytes(weights)
    return directory


def _edit_config(directory: Path, **values: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**values, **json.loads(path.read_text(encoding="utf-8")), **values}, indent=1))


def test_a_copy_has_the_same_identity(tmp_path: Path) -> None:
    original = _make_model(tmp_path / "here" / "sender")
    copy = shutil.copytree(original, tmp_path / "there" / "sender")
    name, revision = model_id(original)
    assert name == "sender"
    assert len(revision) == 16 and int(revision, 16) >= 0
    assert model_id(copy) == (name, revision)
    assert model_id(str(copy) + "/") == (name, revision)


def test_the_identity_is_the_pinned_one(tmp_path: Path) -> None:
    assert model_id(_make_model(tmp_path / "sender")) == ("sender", "5d7ce7a33e3ea0db")


def test_one_flipped_byte_changes_the_revision(tmp_path: Path) -> None:
    directory = _make_model(tmp_path / "sender")
    before = model_id(directory)
    weights = bytearray((directory / "model.safetensors").read_bytes())
    weights[1000] ^= 1
    (directory / "model.safetensors").write_bytes(weights)
    assert model_id(directory) != before


def test_volatile_keys_and_key_order_do_not_count(tmp_path: Path) -> None:
    directory = _make_model(tmp_path / "sender")
    before = model_id(directory)
    _edit_config(directory, transformers_version="9", dtype="bfloat16", torch_dtype=None)
    assert model_id(directory) == before
    _edit_config(directory, num_hidden_layers=3)
    assert model_id(directory) != before


def test_large_files_are_sampled_with_their_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_identity, "_WHOLE_BYTES", 1 << 20)
    header = b'{"w":1}' + b" " * 993
    body = bytearray(4 << 20)
    directory = _make_model(tmp_path / "sender", len(header).to_bytes(8, "little") + header + bytes(body))
    path = directory / "model.safetensors"
    before = model_id(directory)
    for position in (20, path.stat().st_size - 1):  # in the header; in the last sample
        data = bytearray(path.read_bytes())
        data[position] ^= 1
        path.write_bytes(data)
        assert model_id(directory) != before
        data[position] ^= 1
        path.write_bytes(data)
        assert model_id(directory) == before
    path.write_bytes(path.read_bytes() + b"\0")
    assert model_id(directory) != before


def test_bin_weights_count_where_there_are_no_safetensors(tmp_path: Path) -> None:
    directory = _make_model(tmp_path / "sender")
    before = model_id(directory)
    (directory / "pytorch_model.bin").write_bytes(b"other copy")
    assert model_id(directory) == before
    (directory / "model.safetensors").unlink()
    alone = model_id(directory)
    (directory / "training_args.bin").write_bytes(b"x")
    assert model_id(directory) == alone
    (directory / "pytorch_model.bin").write_bytes(b"other bytes")
    assert model_id(directory) != alone


def test_directories_without_a_model_are_named(tmp_path: Path) -> None:
    directory = _make_model(tmp_path / "sender")
    (directory / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="holds no weights"):
        model_id(directory)
    (directory / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is no JSON"):
        model_id(directory)
    (directory / "config.json").unlink()
    with pytest.raises(ValueError, match=r"holds no config\.json"):
        model_id(directory)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    model = tmp_path / "hf" / "hub" / "models--org--model"
    _make_model(model / "snapshots" / COMMIT)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(COMMIT, encoding="utf-8")
    (model / "refs" / "v1").write_text(COMMIT + "\n", encoding="utf-8")
    return model


@pytest.mark.parametrize("revision", [None, "main", "v1", COMMIT])
def test_a_hub_name_has_its_commit(cache: Path, revision: str | None) -> None:
    assert model_id("org/model", revision) == ("org/model", COMMIT)


def test_a_snapshot_directory_has_its_name_and_commit(cache: Path) -> None:
    assert model_id(cache / "snapshots" / COMMIT) == ("org/model", COMMIT)


def test_the_cache_variable_goes_before_the_home(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "elsewhere"))
    with pytest.raises(ValueError, match="elsewhere; download it first"):
        model_id("org/model")
    shutil.copytree(cache, tmp_path / "elsewhere" / "models--org--model")
    assert model_id("org/model") == ("org/model", COMMIT)


@pytest.mark.parametrize("revision", ["v2", "f" * 40, "../refs/main", ""])
def test_revisions_that_are_not_there(cache: Path, revision: str) -> None:
    if not revision:
        (cache / "refs" / "main").unlink()
    with pytest.raises(ValueError, match=r"revision .* of model 'org/model' is not in the Hugging Face cache"):
        model_id("org/model", revision)


@pytest.mark.parametrize("name", ["no such/dir/here", "/nowhere", "a--b", "../x", ""])
def test_names_that_can_be_no_model(cache: Path, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="is neither a directory nor"):
        model_id(name)
