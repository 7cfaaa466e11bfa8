"""Requests are made with the salt of their plan, so that vLLM hashes their blocks once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.request import Request

from mapflow.connector.vllm import arrivals, compat
from mapflow.connector.vllm.request_state import Fate, RequestState

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
        sampling_params=SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": {"mapflow": {"report": True}}}),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=salt,
        data_parallel_rank=None,
    )


class Engine:
    """Gives requests a salt."""

    def __init__(self, salt: Callable[[str | None], str | None]) -> None:
        self._salt = salt

    def arrive(self, request: EngineCoreRequest) -> RequestState:
        salt = self._salt(request.cache_salt)
        return RequestState(request_id="r", num_prompt=10, keys=(), chunk_tokens=4, block=4, fate=Fate.REUSE, salt=salt)


def test_a_request_is_made_with_its_salt() -> None:
    engine = Engine(lambda users: f"{users}|plan")
    arrivals.on_arrival(engine.arrive)
    hasher, arriving = Hasher(), core_request("user")
    request = Request.from_engine_core_request(arriving, hasher)
    assert arriving.cache_salt == "user", "left as it was"
    state = arrivals.state_of(request, engine.arrive)
    assert state is not None and request.cache_salt == state.salt == "user|plan"
    arrivals.set_salt(request, state.salt)
    assert hasher.seen == [("user|plan", 2)], "its blocks are hashed once"


def test_a_request_is_the_same_before_and_after_it_was_made() -> None:
    arriving = compat.arriving_request(core_request("user"))
    arrivals.on_arrival(Engine(lambda users: "plan").arrive)
    made = compat.new_request(Request.from_engine_core_request(core_request("user"), Hasher()))
    assert made == arriving and made.users_salt == "user" and made.params == {"mapflow": {"report": True}}


def test_another_engine_of_the_process_makes_up_for_it() -> None:
    ours, theirs = Engine(lambda users: users), Engine(lambda users: "of another engine")
    arrivals.on_arrival(ours.arrive)
    arrivals.on_arrival(theirs.arrive)
    request = Request.from_engine_core_request(core_request(None), Hasher())
    assert arrivals.state_of(request, ours.arrive) is None
    arrivals.set_salt(request, arrivals.users_salt(request))
    assert request.cache_salt is None
    assert request.block_hashes == [(None, 0), (None, 1)], "hashed anew"


def test_a_failure_leaves_the_request_as_it_came() -> None:
    def fail(request: Any) -> RequestState:
        raise RuntimeError("no")

    arrivals.on_arrival(fail)
    request = Request.from_engine_core_request(core_request("user"), Hasher())
    assert request.cache_salt == "user" == arrivals.users_salt(request)
    assert arrivals.state_of(request, fail) is None
