"""Who is connected, who has fallen silent, and what everybody is told about the others."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from mapflow.cache_service.core.errors import InvalidRequest
from mapflow.cache_service.core.peers import Interest, LayerInterest, Namespace, Publisher
from mapflow.cache_service.core.sessions import Sessions

A, B = "m@1/float32/tp0of2", "m@1/float32/tp1of2"
NAMESPACE = Namespace(format_version=1, tokenizer_fingerprint="f", chunk_tokens=512, block=64, tenant="", key_hash=1)
INTEREST = Interest(NAMESPACE, "m@1", (LayerInterest(3, (0, 2), 0.9, 1),))


@pytest.fixture
def sessions() -> Sessions:
    """An empty table with a timeout of 10 s."""
    return Sessions(boot_tag=1, timeout_s=10.0, now=0.0)


def test_silence_ends_a_session_and_signs_of_life_keep_it(sessions: Sessions) -> None:
    quiet, lively = sessions.open(None, 0.0), sessions.open(None, 0.0)
    for now in (3.0, 6.0, 9.0):
        sessions.touch(lively, now)
        assert sessions.silent(now) == []
    assert sessions.silent(10.0) == []
    assert sessions.silent(10.5) == [quiet]


def test_the_daemons_own_sleep_is_nobodys_silence(sessions: Sessions) -> None:
    session = sessions.open(None, 0.0)
    assert sessions.silent(2.0) == []
    assert sessions.silent(100.0) == []  # the daemon did not run from 2 to 100
    for now in (104.0, 107.0):
        assert sessions.silent(now) == []
    assert sessions.silent(109.0) == [session]


def test_a_short_hold_up_of_the_daemon_is_forgiven_too(sessions: Sessions) -> None:
    sessions.open(None, 0.0)
    for now in (2.0, 8.5, 12.0):  # held up from 2 to 8.5
        assert sessions.silent(now) == []


def test_time_does_not_run_backwards_for_a_session(sessions: Sessions) -> None:
    session = sessions.open(None, 8.0)
    sessions.touch(session, 5.0)
    for now in (4.0, 8.0, 12.0, 16.0):
        assert sessions.silent(now) == []


def test_peers_are_what_open_sessions_announced(sessions: Sessions) -> None:
    first = sessions.open(Publisher(A, NAMESPACE), 0.0)
    second = sessions.open(Publisher(B, NAMESPACE), 0.0)
    reader = sessions.open(None, 0.0)
    sessions.set_interests(reader, [INTEREST])
    peers = sessions.peers()
    assert [publisher.producer for publisher in peers.publishers] == [A, B]
    assert peers.interests == (INTEREST,)
    sessions.close(first)
    sessions.set_interests(reader, [])
    assert [publisher.producer for publisher in sessions.peers().publishers] == [B]
    assert sessions.peers().interests == ()
    assert second in sessions


def test_the_version_of_the_peers_changes_exactly_when_they_do(sessions: Sessions) -> None:
    def version_after(act: object) -> bool:
        before = sessions.peers().version
        assert callable(act)
        act()
        return sessions.peers().version > before

    reader = sessions.open(None, 0.0)
    assert version_after(lambda: sessions.open(Publisher(A, NAMESPACE), 0.0))
    assert not version_after(lambda: sessions.open(None, 0.0))
    assert version_after(lambda: sessions.set_interests(reader, [INTEREST]))
    assert not version_after(lambda: sessions.set_interests(reader, [INTEREST]))
    assert not version_after(lambda: sessions.touch(reader, 1.0))
    assert version_after(lambda: sessions.close(reader))


def test_two_sessions_may_want_the_same(sessions: Sessions) -> None:
    for _ in range(2):
        sessions.set_interests(sessions.open(None, 0.0), [INTEREST])
    assert sessions.peers().interests == (INTEREST, INTEREST)


@pytest.mark.parametrize(
    "producer", ["", "m@1", "m@1/float32", "m@1/float32/tp0", "m@1/float32/tp0of", "/float32/tp0of1", "m//tp0of1"]
)
def test_producer_ids_have_a_form(producer: str) -> None:
    with pytest.raises(InvalidRequest, match=r"producer\.id"):
        Publisher(producer, NAMESPACE)


def test_the_model_of_a_producer_may_hold_slashes() -> None:
    assert Publisher("org/name@5f0c/bfloat16/tp3of8", NAMESPACE).model == "org/name@5f0c"


@pytest.mark.parametrize("field", ["format_version", "chunk_tokens", "block", "key_hash"])
def test_a_namespace_is_complete(field: str) -> None:
    with pytest.raises(InvalidRequest, match=field):
        replace(NAMESPACE, **{field: 0})  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="tokenizer_fingerprint"):
        replace(NAMESPACE, tokenizer_fingerprint="")
    with pytest.raises(InvalidRequest, match="tenant"):
        replace(NAMESPACE, tenant="t" * 513)


@pytest.mark.parametrize(
    ("heads", "top_p", "message"),
    [
        ((1, 1), 0.5, "ascending"),
        ((2, 1), 0.5, "ascending"),
        ((), 1.5, "tile_top_p"),
        ((), -0.1, "tile_top_p"),
        ((), math.nan, "tile_top_p"),
    ],
)
def test_malformed_interests_are_refused(heads: tuple[int, ...], top_p: float, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        LayerInterest(0, heads, top_p, 1)


def test_an_interest_names_each_layer_once() -> None:
    layer = LayerInterest(3, (), 0.0, 0)
    with pytest.raises(InvalidRequest, match="twice"):
        Interest(NAMESPACE, "m@1", (layer, layer))
    with pytest.raises(InvalidRequest, match=r"interest\.model"):
        Interest(NAMESPACE, "", ())
