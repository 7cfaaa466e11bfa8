"""Chunk keys: pinned values, since two machines and two releases must compute the same."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest

from mapflow.connector.namespace import KeyHash, Namespace

NAMESPACE = Namespace(tokenizer_fingerprint="0123456789abcdef0123456789abcdef", chunk_tokens=128, block=64)
TOKENS = [(7 * position + 3) % 5000 for position in range(300)]


def test_keys_are_the_pinned_ones() -> None:
    assert NAMESPACE.root_key.hex() == "29d781eba58ca6d34f0e695c52319ba3"
    assert [key.hex() for key in NAMESPACE.chunk_keys(TOKENS)] == [
        "78f7f9afa4a683d8f3c776185e601685",
        "84354d4e4c185b4e922b8131a123723e",
    ]


def test_sha256_keys_are_the_pinned_ones() -> None:
    namespace = replace(NAMESPACE, key_hash=KeyHash.SHA256)
    assert namespace.root_key.hex() == "47e5c0ee146f7c9778d97f699d86cf481b3bb0616e0cc2d65b2c1dc383b37b4e"
    assert [key.hex() for key in namespace.chunk_keys(TOKENS)] == [
        "dc423fe64ea23fa7b4f96ec339f9f4d527a48133ecb5aa631d41f0aaa4dc3835",
        "256ebb17e6f86f10d4c1deb028e8c56820a7954d14125cc87bb542d68d227347",
    ]
    assert namespace.key_hash.key_bytes == 32


@pytest.mark.parametrize(
    ("num_tokens", "num_keys"), [(0, 0), (127, 0), (128, 1), (129, 1), (255, 1), (256, 2), (300, 2)]
)
def test_only_complete_chunks_have_keys(num_tokens: int, num_keys: int) -> None:
    keys = NAMESPACE.chunk_keys(TOKENS[:num_tokens])
    assert keys == NAMESPACE.chunk_keys(TOKENS)[:num_keys]
    assert len(keys) == num_keys


@pytest.mark.parametrize("known_tokens", [0, 100, 128, 256, 299])
def test_extending_equals_hashing_the_whole(known_tokens: int) -> None:
    known = NAMESPACE.chunk_keys(TOKENS[:known_tokens])
    assert NAMESPACE.extend_keys(known, TOKENS) == NAMESPACE.chunk_keys(TOKENS)


def test_extending_leaves_the_known_keys_alone() -> None:
    known = NAMESPACE.chunk_keys(TOKENS[:128])
    before = list(known)
    NAMESPACE.extend_keys(known, TOKENS)
    assert known == before


def test_a_key_depends_on_every_token_before_it() -> None:
    changed = [TOKENS[0] + 1, *TOKENS[1:]]
    assert all(a != b for a, b in zip(NAMESPACE.chunk_keys(TOKENS), NAMESPACE.chunk_keys(changed), strict=True))
    changed = [*TOKENS[:130], TOKENS[130] + 1, *TOKENS[131:]]
    first, second = NAMESPACE.chunk_keys(changed)
    assert first == NAMESPACE.chunk_keys(TOKENS)[0]
    assert second != NAMESPACE.chunk_keys(TOKENS)[1]


@pytest.mark.parametrize(
    "changed",
    [
        replace(NAMESPACE, tokenizer_fingerprint="ff"),
        replace(NAMESPACE, chunk_tokens=256),
        replace(NAMESPACE, block=128),
        replace(NAMESPACE, tenant="a"),
        replace(NAMESPACE, key_hash=KeyHash.SHA256),
        replace(NAMESPACE, format_version=2),
    ],
)
def test_every_field_changes_the_root_key_and_has_a_name(changed: Namespace) -> None:
    assert changed.root_key != NAMESPACE.root_key
    name = NAMESPACE.difference(changed)
    assert name is not None
    assert getattr(changed, name) != getattr(NAMESPACE, name)
    assert Namespace.from_proto(changed.to_proto()) == changed


def test_no_difference_between_equals() -> None:
    assert NAMESPACE.difference(pickle.loads(pickle.dumps(NAMESPACE))) is None


def test_a_tenant_cannot_spell_out_another_field() -> None:
    mimic = replace(NAMESPACE, tenant='a","tokenizer_fingerprint":"b', tokenizer_fingerprint="c")
    assert (
        mimic.root_key != replace(NAMESPACE, tenant="a", tokenizer_fingerprint='b","tokenizer_fingerprint":"c').root_key
    )
    nul = replace(NAMESPACE, tenant="a\0tokenizer_fingerprint=b", tokenizer_fingerprint="c")
    assert nul.root_key != replace(NAMESPACE, tenant="a", tokenizer_fingerprint="b\0tokenizer_fingerprint=c").root_key


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("block", 32, "block must be 64 or 128 tokens, got 32"),
        ("chunk_tokens", 100, "multiple of the block \\(64\\), got 100"),
        ("chunk_tokens", 0, "got 0"),
        ("tokenizer_fingerprint", "", "must not be empty"),
        ("tenant", "\ud800", "not valid Unicode"),
    ],
)
def test_bad_values_are_named(field: str, value: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        replace(NAMESPACE, **{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("token", [-1, 2**32])
def test_token_ids_outside_u32_are_named(token: int) -> None:
    with pytest.raises(ValueError, match="chunk 1 holds a token id outside"):
        NAMESPACE.chunk_keys([*TOKENS[:200], token, *TOKENS[201:]])


def test_an_unknown_key_hash_is_refused() -> None:
    message = NAMESPACE.to_proto()
    message.key_hash = 7  # type: ignore[assignment]
    with pytest.raises(ValueError, match="unknown key hash 7"):
        Namespace.from_proto(message)
