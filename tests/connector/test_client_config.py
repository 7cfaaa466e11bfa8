"""Client configurations: bad values are named before anything connects."""

from __future__ import annotations

from typing import Any

import pytest

from mapflow.connector.client_config import ClientConfig
from mapflow.connector.namespace import Namespace


def _config(**values: Any) -> ClientConfig:
    return ClientConfig(client_name="test", namespace=Namespace(tokenizer_fingerprint="ab"), **values)


@pytest.mark.parametrize(
    "endpoint", ["unix:///run/mapflow.sock", "localhost:7070", "10.0.0.1:1", "[::1]:65535", "cache_0.example:80"]
)
def test_endpoints(endpoint: str) -> None:
    assert _config(endpoint=endpoint).endpoint == endpoint


@pytest.mark.parametrize(
    ("endpoint", "words"),
    [
        ("unix://relative.sock", "needs an absolute path"),
        ("unix:relative.sock", "needs an absolute path"),
        ("unix:///", "needs an absolute path"),
        ("unix:///" + "x" * 107, "may have 107 bytes, this has 108"),
        ("/run/mapflow.sock", "neither unix:///path/to/socket nor host:port"),
        ("http://host:80", "neither"),
        ("host", "neither"),
        ("host:", "neither"),
        ("host:0", "neither"),
        ("host:65536", "neither"),
        ("::1:80", "neither"),
        ("", "neither"),
    ],
)
def test_bad_endpoints_are_named(endpoint: str, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        _config(endpoint=endpoint)
    assert repr(endpoint) in str(caught.value)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"call_deadline_s": 0.0}, "call_deadline_s must be positive, got 0.0"),
        ({"transfer_deadline_s": -1.0}, "transfer_deadline_s must be positive"),
        ({"connect_deadline_s": float("nan")}, "connect_deadline_s must be positive"),
        ({"backoff_min_s": 0.0}, "backoff_min_s must be positive"),
        ({"backoff_min_s": 3.0}, r"backoff_max_s \(2.0\) is below backoff_min_s \(3.0\)"),
    ],
)
def test_bad_times_are_named(values: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        _config(endpoint="localhost:1", **values)
