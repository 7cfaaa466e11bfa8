"""Tokenizer fingerprints: changed by what changes ids, and by nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mapflow.connector.tokenizer import first_difference, load_description, tokenizer_fingerprint

tokenizers = pytest.importorskip("tokenizers")

Document = dict[str, Any]


def _train(directory: Path) -> Path:
    directory.mkdir()
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.normalizer = tokenizers.normalizers.NFC()
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|end|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the cat sat on the mat and the dog sat on the cat"] * 4, trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


def _changed(source: Path, target: Path, change: Callable[[Document], None]) -> Path:
    target.mkdir()
    document = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    change(document)
    (target / "tokenizer.json").write_text(json.dumps(document), encoding="utf-8")
    return target


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return _train(tmp_path / "plain")


def test_the_fingerprint_is_32_hex_digits(plain: Path) -> None:
    fingerprint = tokenizer_fingerprint(plain)
    assert len(fingerprint) == 32
    assert int(fingerprint, 16) >= 0


def _reverse_keys(document: Document) -> None:
    items = list(document.items())
    document.clear()
    document.update(reversed(items))
    document["model"]["vocab"] = dict(reversed(document["model"]["vocab"].items()))


def _spell_merges_as_strings(document: Document) -> None:
    document["model"]["merges"] = [" ".join(pair) for pair in document["model"]["merges"]]


def _leave_out_default_options(document: Document) -> None:
    for name in ("dropout", "unk_token", "fuse_unk", "byte_fallback", "ignore_merges"):
        del document["model"][name]


def _set_truncation(document: Document) -> None:
    document["truncation"] = {"direction": "Right", "max_length": 9, "strategy": "LongestFirst", "stride": 0}
    document["padding"] = {"strategy": {"Fixed": 9}}
    document["decoder"] = None
    document["post_processor"] = {"type": "ByteLevel", "add_prefix_space": True}


@pytest.mark.parametrize(
    "change", [_reverse_keys, _spell_merges_as_strings, _leave_out_default_options, _set_truncation]
)
def test_changes_that_leave_the_ids_alone_do_not_count(
    plain: Path, tmp_path: Path, change: Callable[[Document], None]
) -> None:
    other = _changed(plain, tmp_path / "other", change)
    assert (other / "tokenizer.json").read_bytes() != (plain / "tokenizer.json").read_bytes()
    assert tokenizer_fingerprint(other) == tokenizer_fingerprint(plain)
    assert first_difference(plain, other) is None


def test_a_chat_template_does_not_count(plain: Path) -> None:
    before = tokenizer_fingerprint(plain)
    (plain / "chat_template.jinja").write_text("{{ messages }}", encoding="utf-8")
    (plain / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ x }}"}), encoding="utf-8")
    assert tokenizer_fingerprint(plain) == before


def _swap_merges(document: Document) -> None:
    merges = document["model"]["merges"]
    merges[1], merges[2] = merges[2], merges[1]


def _drop_last_merge(document: Document) -> None:
    document["model"]["merges"].pop()


def _swap_tokens(document: Document) -> None:
    vocabulary = document["model"]["vocab"]
    vocabulary["!"], vocabulary['"'] = vocabulary['"'], vocabulary["!"]


def _drop_last_token(document: Document) -> None:
    vocabulary = document["model"]["vocab"]
    del vocabulary[max(vocabulary, key=vocabulary.__getitem__)]


def _add_token(document: Document) -> None:
    document["added_tokens"].append({**document["added_tokens"][0], "id": 900, "content": "<|x|>"})


def _strip_around_token(document: Document) -> None:
    document["added_tokens"][0]["lstrip"] = True


def _no_normalizer(document: Document) -> None:
    document["normalizer"] = None


def _prefix_space(document: Document) -> None:
    document["pre_tokenizer"]["add_prefix_space"] = True


def _ignore_merges(document: Document) -> None:
    document["model"]["ignore_merges"] = True


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_swap_merges, 'merge 1: "'),
        (_drop_last_merge, "merges against"),
        (_swap_tokens, 'token id 1: "!" against "\\""'),
        (_drop_last_token, "vocabulary size 275 against 274"),
        (_add_token, 'added token id 900: none against "<|x|>"'),
        (_strip_around_token, 'added token id 0: "<|end|>" against "<|end|>" lstrip'),
        (_no_normalizer, 'normalizer: {"type":"NFC"} against null'),
        (_prefix_space, "pre-tokenizer: "),
        (_ignore_merges, "model: "),
    ],
)
def test_changes_that_change_ids_are_named(
    plain: Path, tmp_path: Path, change: Callable[[Document], None], words: str
) -> None:
    other = _changed(plain, tmp_path / "other", change)
    assert tokenizer_fingerprint(other) != tokenizer_fingerprint(plain)
    assert words in str(first_difference(plain, other))
    assert first_difference(other, plain) is not None


def test_tokens_that_the_configuration_adds_count(plain: Path) -> None:
    before = tokenizer_fingerprint(plain)
    extra = {"added_tokens_decoder": {"300": {"content": "<tool>", "special": False}}}
    (plain / "tokenizer_config.json").write_text(json.dumps(extra), encoding="utf-8")
    assert tokenizer_fingerprint(plain) != before


def test_the_same_token_in_the_configuration_does_not_count_twice(plain: Path) -> None:
    before = tokenizer_fingerprint(plain)
    extra = {"added_tokens_decoder": {"0": {"content": "<|end|>", "special": True}}}
    (plain / "tokenizer_config.json").write_text(json.dumps(extra), encoding="utf-8")
    assert tokenizer_fingerprint(plain) == before


def test_a_unigram_tokenizer_counts_its_scores(tmp_path: Path) -> None:
    for name, score in (("a", -1.0), ("b", -1.5)):
        (tmp_path / name).mkdir()
        vocabulary = [("<unk>", 0.0), ("x", score), ("y", -2.0)]
        tokenizers.Tokenizer(tokenizers.models.Unigram(vocabulary, 0)).save(str(tmp_path / name / "tokenizer.json"))
    assert load_description(tmp_path / "a").vocabulary == {0: "<unk>", 1: "x", 2: "y"}
    assert tokenizer_fingerprint(tmp_path / "a") != tokenizer_fingerprint(tmp_path / "b")
    assert str(first_difference(tmp_path / "a", tmp_path / "b")).startswith("scores: ")


@pytest.mark.parametrize("names", [("tokenizer.model",), ("tekken.json",), ("vocab.json", "merges.txt")])
def test_other_tokenizer_files_are_hashed(tmp_path: Path, names: tuple[str, ...]) -> None:
    for directory in (tmp_path / "a", tmp_path / "b"):
        directory.mkdir()
        for name in names:
            (directory / name).write_bytes(b"{}")
    assert tokenizer_fingerprint(tmp_path / "a") == tokenizer_fingerprint(tmp_path / "b")
    (tmp_path / "b" / names[-1]).write_bytes(b"[]")
    assert tokenizer_fingerprint(tmp_path / "a") != tokenizer_fingerprint(tmp_path / "b")
    assert str(first_difference(tmp_path / "a", tmp_path / "b")).startswith(f"{names[-1]}: ")


def test_different_kinds_of_files_are_named(plain: Path, tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "tokenizer.model").write_bytes(b"x")
    assert first_difference(plain, tmp_path / "b") == "tokenizer files tokenizer.json against tokenizer.model"


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no tokenizer: expected tokenizer\.json"):
        tokenizer_fingerprint(tmp_path)
    with pytest.raises(ValueError, match="is not a directory"):
        tokenizer_fingerprint(tmp_path / "nowhere")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"model": {}}', '{"model": {"vocab": 3}}'])
def test_a_damaged_tokenizer_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer.json").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        tokenizer_fingerprint(tmp_path)
