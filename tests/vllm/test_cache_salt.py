"""Requests are made with the salt of their plan, so that vLLM hashes their blocks once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.request import Request

from mapflow.connector.vllm import cache_salt

pytestmark = pytest.mark.vllm


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    made = Request.from_engine_core_request
    yield
    Request.from_engine_core_request = made


class Hasher:
    """Counts blocks of 4 tokens, and keeps the salt that it saw."""

    def __init__(self) -> None:
        self.seen: list[tuple[str | None, int]] = []

    def __call__(self, request: Request) -> list[Any]:
        new = request.num_tokens // 4 - len(request.block_hashes)
        self.seen.append((request.cache_salt, new))
        return [(request.cache_salt, number) for number in range(new)]


def core_request(salt: str | None) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id="r",
        prompt_token_ids=list(range(10)),
        mm_features=None,
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=salt,
        data_parallel_rank=None,
    )


def test_a_request_is_made_with_its_salt() -> None:
    cache_salt.make_requests_with(lambda request: f"{request.cache_salt}|plan")
    hasher = Hasher()
    request = Request.from_engine_core_request(core_request("user"), hasher)
    assert request.cache_salt == "user|plan" and cache_salt.users_salt(request) == "user"
    cache_salt.set_salt(request, "user|plan")
    assert hasher.seen == [("user|plan", 2)], "its blocks are hashed once"


def test_a_request_that_was_made_with_another_salt_is_hashed_anew() -> None:
    cache_salt.make_requests_with(lambda request: "of another engine")
    hasher = Hasher()
    request = Request.from_engine_core_request(core_request(None), hasher)
    cache_salt.set_salt(request, cache_salt.users_salt(request))
    assert request.cache_salt is None
    assert request.block_hashes == [(None, 0), (None, 1)]


def test_the_last_engine_gives_the_salts() -> None:
    for name in ("first", "second"):
        cache_salt.make_requests_with(lambda request, name=name: name)
    assert Request.from_engine_core_request(core_request("user"), Hasher()).cache_salt == "second"


def test_a_salt_that_cannot_be_had_leaves_the_users() -> None:
    def fail(request: Any) -> str:
        raise RuntimeError("no")

    cache_salt.make_requests_with(fail)
    request = Request.from_engine_core_request(core_request("user"), Hasher())
    assert request.cache_salt == "user" == cache_salt.users_salt(request)
