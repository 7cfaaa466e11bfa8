"""Start-up of the plugin: every wrong setting is one clear line, and peers that disagree are told apart by name."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

pytest.importorskip("torch")

from mapflow.connector.namespace import Namespace
from mapflow.connector.vllm import engine as engine_module
from mapflow.connector.vllm.config import ConfigError
from mapflow.connector.vllm.engine import Engine

NOWHERE = "unix:///nonexistent/mapflow.sock"


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 15.0
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.05)


@pytest.fixture
def start(facts) -> Iterator[Callable[..., Engine]]:  # type: ignore[no-untyped-def]
    """`start(directory, extra, publishes=True)`: an engine's scheduler and worker sides are two of these."""
    with ExitStack() as stack:

        def make(directory: Path, extra: dict[str, object], *, is_worker: bool = False, **changes: object) -> Engine:
            engine = Engine(facts(directory, **changes), {"endpoint": NOWHERE, **extra}, is_worker=is_worker)
            stack.callback(engine.client.close)
            return engine

        yield make


def test_unknown_setting_names_the_known_ones(start, pair) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match=r"unknown mapflow setting 'plans'.*known are .*plan"):
        start(pair.receiver, {"plans": "x"}, reuses=True)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"lease_s": "soon"}, "mapflow setting lease_s: 'soon'"),
        ({"lookup_deadline_s": 0}, "lookup_deadline_s must be positive, got 0"),
        ({"block": 100}, "the block is 64 or 128 and divides the chunk"),
        ({"key_hash": "md5"}, "mapflow setting key_hash: 'md5'"),
        ({"plan": 3}, "setting plan must be a path or a list of paths, got 3"),
        ({"plan": "/nowhere/p.safetensors"}, "plan file /nowhere/p.safetensors does not exist"),
        ({"endpoint": "mapflow"}, "mapflow"),
        ({"endpoint": "localhost:1", "tls_ca": "ca.pem"}, "TLS needs tls_ca, tls_cert and tls_key; tls_cert, tls_key"),
        ({"tls_ca": "a", "tls_cert": "b", "tls_key": "c"}, "is a Unix socket, which needs no TLS"),
    ],
)
def test_values_that_cannot_be_used(start, pair, extra: dict[str, object], message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError) as caught:
        start(pair.sender, extra, publishes=True)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_consumer_needs_a_plan(start, pair) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match="a kv_consumer needs a plan"):
        start(pair.receiver, {}, reuses=True)


def test_a_plan_of_another_pair(start, pair, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    other = tmp_path / "other"
    shutil.copytree(pair.sender, other)
    (other / "config.json").write_text('{"num_hidden_layers": 3}')
    with pytest.raises(ConfigError, match=r"plan plan is for sender@.* -> receiver@.*, this engine serves other@"):
        start(other, {"plan": pair.plan()}, reuses=True)


def test_a_plan_of_another_tokenizer(start, pair) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match="was made for the tokenizer feed"):
        start(pair.receiver, {"plan": pair.plan(tokenizer_fingerprint="feed")}, reuses=True)


def test_plans_that_cut_prompts_differently(start, pair) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match="plans of one engine must agree"):
        start(pair.receiver, {"plan": [pair.plan("a"), pair.plan("b", chunk_tokens=256)]}, reuses=True)


def test_an_engine_that_cannot_share_maps_says_why(start, pair) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match="two groups"):
        start(pair.sender, {}, publishes=True, unsupported="two groups")


@pytest.mark.service
def test_a_sender_without_a_plan_learns_what_is_wanted(start, pair, daemon) -> None:  # type: ignore[no-untyped-def]
    at = {"endpoint": daemon.endpoint}
    sender = start(pair.sender, {**at, "chunk_tokens": 128}, publishes=True, is_worker=True)
    assert sender.wants() == {}
    receiver = start(pair.receiver, {**at, "plan": pair.plan()}, reuses=True)
    until(lambda: set(sender.wants()) == {1}, "the receiver's interest")
    assert sender.wants()[1].tile_top_p == 0.0
    until(lambda: bool(receiver.client.peers.publishers), "the sender")
    assert receiver.sender_id(receiver.plans[0]) == sender.model.model_id
    receiver.client.close()
    until(lambda: sender.wants() == {}, "the receiver's interest to go")


@pytest.mark.service
def test_a_sender_whose_directory_has_another_name_is_found(start, pair, daemon, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    at = {"endpoint": daemon.endpoint}
    plan = pair.plan()
    renamed = tmp_path / "model-v2"
    shutil.move(pair.sender, renamed)
    sender = start(renamed, {**at, "chunk_tokens": 128}, publishes=True, is_worker=True)
    receiver = start(pair.receiver, {**at, "plan": plan}, reuses=True)
    until(lambda: set(sender.wants()) == {1}, "the receiver's interest")
    until(lambda: receiver.sender_id(receiver.plans[0]) == sender.model.model_id, "the sender under its new name")


@pytest.mark.service
@pytest.mark.parametrize("field", ["chunk_tokens", "tokenizer_fingerprint", "format_version", "revision"])
def test_peers_that_disagree_are_counted_and_told(
    start, pair, daemon, field: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:  # type: ignore[no-untyped-def]
    at = {"endpoint": daemon.endpoint}
    receiver = start(pair.receiver, {**at, "plan": pair.plan()}, reuses=True)
    chunk = 128
    if field == "chunk_tokens":
        chunk = 256
    elif field == "tokenizer_fingerprint":  # the same weights served with another tokenizer
        monkeypatch.setattr(engine_module, "tokenizer_fingerprint", lambda _: "feed")
    elif field == "format_version":  # an engine of another release
        real = Namespace.to_proto

        def newer(self: Namespace):  # type: ignore[no-untyped-def]
            message = real(self)
            message.format_version = 2
            return message

        monkeypatch.setattr(Namespace, "to_proto", newer)
    else:
        (pair.sender / "config.json").write_text('{"num_hidden_layers": 2, "changed": true}')
    sender = start(pair.sender, {**at, "chunk_tokens": chunk}, publishes=True, is_worker=True)
    until(lambda: receiver.counters.get("peer_mismatch", field) > 0, f"the receiver to count {field}")
    assert sender.wants() == {}, "nothing is published for a receiver that cannot read it"
    lines = [record.getMessage() for record in caplog.records if "no reuse" in record.getMessage()]
    assert any(field in line or "calibrate again" in line for line in lines), lines
    if field not in ("format_version", "revision"):
        until(lambda: sender.counters.get("peer_mismatch", field) > 0, f"the sender to count {field}")
