"""What a tokenizer does to text, as a fingerprint that two engines can compare, and as words when they differ.

Reads the files beside a model; never runs a tokenizer. Counted is whatever decides which ids a text becomes and what an
id stands for: vocabulary, merges, model options, added tokens, normalizer, pre-tokenizer. Not counted: chat template,
truncation, padding, decoder, and the post-processor, which only adds ids that the keys of a prompt hold anyway.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Vocabulary files of tokenizers without a tokenizer.json, with the names of companions that count too.
_OTHER_FILES = (
    ("tokenizer.model",),
    ("tekken.json",),
    ("spiece.model",),
    ("vocab.json", "merges.txt"),
    ("vocab.txt",),
)
_ADDED_FLAGS = ("single_word", "lstrip", "rstrip", "normalized")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerDescription:
    """Everything that counts about a tokenizer.

    Attributes:
        source: file names that it was read from.
        vocabulary: id -> token, for files that name them; else empty.
        merges: pairs in order of rank; empty where the algorithm has none.
        added: id -> token and its flags, for tokens that are cut out of the text before the algorithm runs.
        parts: name -> canonical text of what else counts, such as the normalizer or the digest of a binary file.
    """

    source: str
    vocabulary: Mapping[int, str] = field(default_factory=dict)
    merges: tuple[tuple[str, str], ...] = ()
    added: Mapping[int, str] = field(default_factory=dict)
    parts: Mapping[str, str] = field(default_factory=dict)

    @property
    def fingerprint(self) -> str:
        """32 hex digits."""
        document = {
            "source": self.source,
            "vocabulary": sorted(self.vocabulary.items()),
            "merges": self.merges,
            "added": sorted(self.added.items()),
            "parts": dict(self.parts),
        }
        return hashlib.sha256(_canonical(document).encode()).hexdigest()[:32]


def tokenizer_fingerprint(directory: Path) -> str:
    """32 hex digits that two directories share when their tokenizers turn any text into the same ids.

    Raises:
        ValueError: no tokenizer there, or a damaged one.
    """
    return load_description(directory).fingerprint


def load_description(directory: Path) -> TokenizerDescription:
    """Read the tokenizer files of a model directory.

    Raises:
        ValueError: no tokenizer there, or a damaged one; names the file.
    """
    path = directory / "tokenizer.json"
    if path.is_file():
        try:
            return _describe(_load_json(path), _config_tokens(directory))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is not a usable tokenizer: {error}") from error
    for names in _OTHER_FILES:
        files = [directory / name for name in names]
        if all(file.is_file() for file in files):
            parts = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
            return TokenizerDescription(source=" + ".join(names), added=_config_tokens(directory), parts=parts)
    if not directory.is_dir():
        raise ValueError(f"{directory} is not a directory, so there is no tokenizer in it")
    raise ValueError(
        f"{directory} holds no tokenizer: expected tokenizer.json, or one of "
        + ", ".join(" with ".join(names) for names in _OTHER_FILES)
    )


def first_difference(directory_a: Path, directory_b: Path) -> str | None:
    """The first thing in which two tokenizers differ, in words, or None when they are the same.

    Raises:
        ValueError: no tokenizer in one of the directories, or a damaged one.
    """
    return describe_difference(load_description(directory_a), load_description(directory_b))


def describe_difference(a: TokenizerDescription, b: TokenizerDescription) -> str | None:
    """As `first_difference`, of descriptions."""
    if a.source != b.source:
        return f"tokenizer files {a.source} against {b.source}"
    for number in sorted(a.vocabulary.keys() & b.vocabulary.keys()):
        if a.vocabulary[number] != b.vocabulary[number]:
            return f"token id {number}: {_quote(a.vocabulary[number])} against {_quote(b.vocabulary[number])}"
    if len(a.vocabulary) != len(b.vocabulary):
        return f"vocabulary size {len(a.vocabulary)} against {len(b.vocabulary)}"
    if lone := sorted(a.vocabulary.keys() ^ b.vocabulary.keys()):
        token = a.vocabulary.get(lone[0], b.vocabulary.get(lone[0], ""))
        return f"token id {lone[0]}: {_quote(token)} in one only"
    for rank, pairs in enumerate(zip(a.merges, b.merges, strict=False)):
        if pairs[0] != pairs[1]:
            return f"merge {rank}: {_quote(' '.join(pairs[0]))} against {_quote(' '.join(pairs[1]))}"
    if len(a.merges) != len(b.merges):
        return f"{len(a.merges)} merges against {len(b.merges)}"
    for number in sorted(a.added.keys() | b.added.keys()):
        left, right = a.added.get(number), b.added.get(number)
        if left != right:
            return f"added token id {number}: {left or 'none'} against {right or 'none'}"
    for name in sorted(a.parts.keys() | b.parts.keys()):
        left, right = a.parts.get(name), b.parts.get(name)
        if left != right:
            return f"{name}: {_shorten(left or 'none')} against {_shorten(right or 'none')}"
    return None


def _describe(document: Mapping[str, Any], config_tokens: Mapping[int, str]) -> TokenizerDescription:
    model = dict(document["model"])
    vocabulary, scores = _vocabulary(model.pop("vocab"))
    merges = tuple(_pair(merge) for merge in model.pop("merges", None) or ())
    # Absent, null, false and empty are the same in every option of a tokenizer's model.
    options = {name: value for name, value in model.items() if not (value is None or value is False or value == "")}
    parts = {
        "model": _canonical(options),
        "normalizer": _canonical(document.get("normalizer")),
        "pre-tokenizer": _canonical(document.get("pre_tokenizer")),
    }
    if scores is not None:
        parts["scores"] = hashlib.sha256(_canonical(scores).encode()).hexdigest()
    added = {token["id"]: _added_token(token) for token in document.get("added_tokens") or ()}
    return TokenizerDescription(
        source="tokenizer.json", vocabulary=vocabulary, merges=merges, added={**config_tokens, **added}, parts=parts
    )


def _vocabulary(vocab: Any) -> tuple[dict[int, str], list[float] | None]:
    """The id -> token table, and the scores of a unigram model."""
    if isinstance(vocab, dict):
        return {int(number): token for token, number in vocab.items()}, None
    return {number: token for number, (token, _) in enumerate(vocab)}, [score for _, score in vocab]


def _pair(merge: Any) -> tuple[str, str]:
    """A merge, of either notation: "a b" or ["a", "b"]."""
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return left, right


def _added_token(token: Mapping[str, Any]) -> str:
    flags = [name for name in _ADDED_FLAGS if token.get(name)]
    return " ".join([_quote(token["content"]), *flags])


def _config_tokens(directory: Path) -> dict[int, str]:
    """Tokens that transformers adds to a tokenizer from the files beside it."""
    added: dict[int, str] = {}
    path = directory / "added_tokens.json"
    if path.is_file():
        added.update({int(number): _quote(token) for token, number in _load_json(path).items()})
    path = directory / "tokenizer_config.json"
    if path.is_file():
        tokens = _load_json(path).get("added_tokens_decoder") or {}
        added.update({int(number): _added_token(token) for number, token in tokens.items()})
    return added


def _load_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def _canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def _quote(token: str) -> str:
    return json.dumps(token, ensure_ascii=False)


def _shorten(text: str, limit: int = 200) -> str:
    return text if len(text) <= limit else f"{text[:limit]}…"
