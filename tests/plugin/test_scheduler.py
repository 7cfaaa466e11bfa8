"""The scheduler's side: orders, deadlines, leases and exactness, with a client that answers when the test says so."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from mapflow.connector.counters import Counters  # noqa: E402
from mapflow.connector.messages import NO_COPY, Extent, Hit, Lease, LookupResult, Want  # noqa: E402
from mapflow.connector.namespace import Namespace  # noqa: E402
from mapflow.connector.plan import LayerPlan, Mode, ModelSpec, Plan  # noqa: E402
from mapflow.connector.reasons import Reason, Unavailable  # noqa: E402
from mapflow.connector.vllm import lookups  # noqa: E402
from mapflow.connector.vllm.config import ConnectorConfig  # noqa: E402
from mapflow.connector.vllm.messages import NewRequest, ReuseReport, ScheduledRows  # noqa: E402
from mapflow.connector.vllm.scheduler import MapScheduler  # noqa: E402

CHUNK, PAGE = 128, 32
SPEC = ModelSpec(name="m", revision="r", num_layers=2, num_heads=2, num_kv_heads=1, head_dim=64)
PRODUCER = "m@r/float32/tp0of1"


def plan(name: str, mode: Mode) -> Plan:
    reused = LayerPlan(mode=mode, sender_layer=1 if mode is Mode.GUIDE else None, top_p=0.9)
    maps = {1: torch.eye(2)} if mode is Mode.GUIDE else {}
    layers = (LayerPlan(mode=Mode.COMPUTE), reused)
    return Plan(
        name=name,
        tokenizer_fingerprint="t",
        chunk_tokens=CHUNK,
        block=64,
        sender=SPEC,
        receiver=SPEC,
        layers=layers,
        head_map=maps,
    )


@dataclass
class Request:
    request_id: str
    prompt_token_ids: list[int] | None
    kv_transfer_params: dict[str, object] | None = None
    cache_salt: str | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids or ())


@dataclass
class FakeClient:
    """Keeps look-ups open until the test answers them."""

    asked: list[tuple[list[bytes], list[Want], float]] = field(default_factory=list)
    futures: list[Future[LookupResult]] = field(default_factory=list)
    released: list[int] = field(default_factory=list)

    def lookup(self, keys: Sequence[bytes], wants: Sequence[Want], lease_s: float) -> Future[LookupResult]:
        self.asked.append((list(keys), list(wants), lease_s))
        self.futures.append(Future())
        return self.futures[-1]

    def release(self, leases: Sequence[Lease]) -> None:
        self.released += [lease.lease_id for lease in leases]

    def answer(
        self,
        num_chunks: int,
        producer: str = PRODUCER,
        lease_id: int = 1,
        expires_at: float = 60.0,
        copies: Sequence[int] = (),
        which: int = -1,
    ) -> None:
        lease = Lease(boot_id=b"b", session_id=1, lease_id=lease_id, expires_at=expires_at) if num_chunks else None
        extents = tuple((Extent(1, 64 * chunk, 64),) for chunk in range(num_chunks))
        offsets = tuple((offset,) for offset in copies)
        hit = Hit(want=0, producer=producer, num_chunks=num_chunks, extents=extents, device_offsets=offsets)
        result = LookupResult(boot_id=b"b", lease=lease, hits=(hit,) if num_chunks else (), device_arena_id=2)
        self.futures[which].set_result(result)


class Bench:
    """A scheduler, its client and a clock."""

    def __init__(self, *, plans: Sequence[Plan] = (), publishes: bool = False, linger_s: float = 0.0) -> None:
        self.now = 0.0
        self.client = FakeClient()
        self.counters = Counters()
        self.scheduler = MapScheduler(
            config=ConnectorConfig(plans=(Path("p"),)),
            namespace=Namespace(tokenizer_fingerprint="t", chunk_tokens=CHUNK),
            plans=plans,
            client=self.client,  # type: ignore[arg-type]
            counters=self.counters,
            page_size=PAGE,
            publishes=publishes,
            published_layers=lambda: ("m@r", (1,)),
            sender_id=lambda plan: plan.sender.model_id,
            clock=lambda: self.now,
            linger_s=linger_s,
        )

    def add(self, request: Request, *, plain_text: bool = True) -> str | None:
        new = NewRequest(
            request_id=request.request_id,
            tokens=request.prompt_token_ids if plain_text else None,
            params=request.kv_transfer_params,
            users_salt=request.cache_salt,
        )
        state = self.scheduler.arrive(new)
        self.scheduler.add(new, state)
        return state.salt

    def run(self, name: str, begin: int, rows: int, *, restarted: bool = False):  # type: ignore[no-untyped-def]
        pages = range(-(-(begin + rows) // PAGE)) if restarted else range(-(-begin // PAGE), -(-(begin + rows) // PAGE))
        scheduled = ScheduledRows(
            request_id=name, num_computed=begin, num_scheduled=rows, pages=list(pages), restarted=restarted
        )
        steps = self.scheduler.plan_step([scheduled])
        return steps[0] if steps else None


def tokens(count: int, salt: int = 0) -> list[int]:
    return [(7 * place + salt) % 50 for place in range(count)]


def guided() -> Bench:
    return Bench(plans=[plan("guide", Mode.GUIDE)])


def test_waits_for_the_answer_and_orders_the_run() -> None:
    bench = guided()
    salt = bench.add(Request("r", tokens(700)))
    assert salt is not None and salt.startswith("|mapflow:")
    assert not bench.scheduler.ready("r", 0)
    assert not bench.scheduler.ready("r", 0), "asked once, however often vLLM comes back"
    assert len(bench.client.asked) == 1
    keys, wants, lease_s = bench.client.asked[0]
    assert (len(keys), wants[0].layers, lease_s) == (5, (1,), 60.0)
    bench.client.answer(3)
    assert bench.scheduler.ready("r", 0)
    step = bench.run("r", 0, 300, restarted=True)
    assert (step.reuse.row_begin, step.reuse.row_end) == (0, 300)
    assert [chunk.index for chunk in step.reuse.chunks] == [0, 1, 2]
    step = bench.run("r", 300, 200)
    assert (step.reuse.row_begin, step.reuse.row_end) == (300, 384)
    assert [chunk.index for chunk in step.reuse.chunks] == [2]
    assert bench.run("r", 500, 200) is None, "no maps there, nothing to tell the workers"


def test_the_last_block_of_a_prompt_is_always_computed() -> None:
    bench = guided()
    bench.add(Request("r", tokens(512)))
    bench.scheduler.ready("r", 0)
    bench.client.answer(4)
    bench.scheduler.ready("r", 0)
    assert bench.run("r", 0, 512, restarted=True).reuse.row_end == 448


def test_a_busy_engine_asks_only_for_what_is_left() -> None:
    bench = guided()
    bench.add(Request("busy", tokens(100)))
    bench.add(Request("r", tokens(700)))
    bench.scheduler.ready("r", 288)
    (asked,) = bench.client.asked
    assert len(asked[0]) == 3, "chunks 2 to 4"
    bench.client.answer(1)
    bench.scheduler.ready("r", 288)
    step = bench.run("r", 288, 412, restarted=True)
    assert (step.reuse.row_begin, step.reuse.row_end) == (288, 384)


def test_an_idle_engine_asks_when_a_request_arrives() -> None:
    bench = guided()
    bench.add(Request("r", tokens(700)))
    (asked,) = bench.client.asked
    assert len(asked[0]) == 5
    bench.client.answer(5)
    assert bench.scheduler.ready("r", 288) and len(bench.client.asked) == 1
    step = bench.run("r", 288, 412, restarted=True)
    assert [chunk.index for chunk in step.reuse.chunks] == [2, 3, 4]
    assert (step.reuse.row_begin, step.reuse.row_end) == (288, 640)
    assert bench.counters.get("lookup_chunks", "asked") == bench.counters.get("lookup_chunks", "hit") == 3


@pytest.mark.parametrize(("num_chunks", "lease"), [(2, [1]), (0, [])])
def test_an_early_answer_that_ends_in_what_is_cached_is_asked_again(num_chunks: int, lease: list[int]) -> None:
    """The sender may have published later chunks only."""
    bench = guided()
    bench.add(Request("r", tokens(700)))
    bench.client.answer(num_chunks)
    assert not bench.scheduler.ready("r", 288) and bench.client.released == lease
    assert len(bench.client.asked[1][0]) == 3
    bench.client.answer(1, lease_id=2)
    assert bench.scheduler.ready("r", 288)
    assert bench.run("r", 288, 412, restarted=True).reuse.row_end == 384


def test_an_early_answer_gets_old() -> None:
    """While a request waits for others, its sender may publish."""
    bench = guided()
    bench.add(Request("r", tokens(700)))
    bench.client.answer(0)
    bench.now = 1.0
    assert not bench.scheduler.ready("r", 0) and len(bench.client.asked) == 2
    bench.client.answer(5)
    assert bench.scheduler.ready("r", 0)
    assert bench.run("r", 0, 700, restarted=True).reuse.row_end == 640


def test_an_early_answer_to_a_request_that_ended_is_given_back() -> None:
    bench = guided()
    bench.add(Request("r", tokens(700)))
    bench.client.answer(5, lease_id=7)
    bench.scheduler.finish("r")
    assert bench.client.released == [7]


@pytest.mark.parametrize("failure", ["deadline", "unavailable", "miss", "sharded"])
def test_every_failure_runs_the_request_in_full_and_is_counted(failure: str) -> None:
    bench = guided()
    bench.add(Request("r", tokens(700)))
    assert not bench.scheduler.ready("r", 0)
    if failure == "deadline":
        bench.now = 1.0
    elif failure == "unavailable":
        bench.client.futures[0].set_exception(Unavailable(Reason.DRAINING, "going"))
    elif failure == "miss":
        bench.client.answer(0)
    else:
        bench.client.answer(2, producer="m@r/float32/tp0of2")
    assert bench.scheduler.ready("r", 0)
    assert bench.run("r", 0, 700, restarted=True) is None
    name, reason = {
        "deadline": ("lookup_failed", "deadline"),
        "unavailable": ("lookup_failed", "draining"),
        "miss": ("request_not_reused", "miss"),
        "sharded": ("request_not_reused", "sharded_producer"),
    }[failure]
    assert bench.counters.get(name, reason) == 1
    if failure == "deadline":
        assert bench.client.futures[0].cancelled(), "the client releases a lease that comes late"
    assert bench.client.released == ([1] if failure == "sharded" else [])


def test_an_order_names_copies_that_all_of_its_chunks_have() -> None:
    bench = guided()
    bench.add(Request("r", tokens(700)))
    bench.scheduler.ready("r", 0)
    bench.client.answer(4, copies=[0, 64, NO_COPY, 128])
    bench.scheduler.ready("r", 0)
    first = bench.run("r", 0, 256, restarted=True).reuse
    assert first.device_arena_id == 2 and first.copies(0) == [0, 64]
    assert replace(first, device_arena_id=0).copies(0) is None, "of another GPU"
    assert bench.run("r", 256, 256).reuse.copies(0) is None, "one chunk has none"


def test_only_an_idle_engine_waits_a_moment_for_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookups, "_IDLE_WAIT_S", 20.0)
    bench = guided()
    bench.add(Request("r", tokens(300)))
    bench.run("another", 500, 1)
    begin = time.monotonic()
    assert not bench.scheduler.ready("r", 0), "the engine has work"
    assert time.monotonic() - begin < 10.0
    answer = threading.Timer(0.05, bench.client.answer, (2,))
    answer.start()
    bench.scheduler.plan_step([])
    assert bench.scheduler.ready("r", 0), "waited"
    answer.join()
    bench.scheduler.finish("r")
    bench.now = 1.0
    bench.add(Request("s", tokens(300)))
    answer = threading.Timer(0.05, bench.client.answer, (2,))
    answer.start()
    assert bench.scheduler.ready("s", 0), "waited, as nothing happened since it arrived"
    answer.join()


def test_leases_end_after_the_prompt_at_the_end_and_when_cancelled() -> None:
    bench = guided()
    bench.add(Request("r", tokens(300)))
    bench.scheduler.ready("r", 0)
    bench.client.answer(2)
    bench.scheduler.ready("r", 0)
    bench.run("r", 0, 300, restarted=True)
    bench.run("r", 300, 1)
    assert bench.client.released == [], "the step with maps may still run"
    bench.run("r", 301, 1)
    bench.run("r", 302, 1)
    assert bench.client.released == [1]
    bench.scheduler.finish("r")
    assert bench.client.released == [1]
    bench.add(Request("s", tokens(300)))
    bench.scheduler.ready("s", 0)
    bench.scheduler.finish("s")  # cancelled while the look-up runs
    assert bench.client.futures[1].cancelled()


def test_leases_linger_where_a_gpu_may_still_copy() -> None:
    bench = Bench(plans=guided().scheduler._plans, linger_s=5.0)
    bench.add(Request("r", tokens(300)))
    bench.scheduler.ready("r", 0)
    bench.client.answer(2)
    bench.scheduler.ready("r", 0)
    bench.run("r", 0, 300, restarted=True)
    bench.scheduler.finish("r")  # cancelled in the middle of its step
    bench.now = 4.9
    bench.scheduler.plan_step([])
    assert bench.client.released == []
    bench.now = 5.0
    bench.scheduler.plan_step([])
    assert bench.client.released == [1]
    bench.scheduler.plan_step([])
    assert bench.client.released == [1]


def test_a_lease_that_is_about_to_end_is_not_used() -> None:
    bench = guided()
    bench.add(Request("r", tokens(700)))
    bench.scheduler.ready("r", 0)
    bench.client.answer(4, expires_at=60.0)
    bench.scheduler.ready("r", 0)
    assert bench.run("r", 0, 128, restarted=True).reuse is not None
    bench.now = 50.0
    assert bench.run("r", 128, 128) is None
    assert bench.client.released == [1]
    assert bench.counters.get("request_not_reused", "lease_expired") == 1


def test_a_preempted_request_is_looked_up_again() -> None:
    bench = guided()
    bench.add(Request("r", tokens(700)))
    bench.scheduler.ready("r", 0)
    bench.client.answer(4, lease_id=1)
    bench.scheduler.ready("r", 0)
    bench.run("r", 0, 300, restarted=True)
    assert not bench.scheduler.ready("r", 128), "another local hit: another look-up"
    assert bench.client.released == [1]
    bench.client.answer(2, lease_id=2)
    assert bench.scheduler.ready("r", 128)
    step = bench.run("r", 128, 572, restarted=True)
    assert (step.reuse.row_begin, step.reuse.row_end) == (128, 384)
    assert step.last_page == 699 // PAGE


def test_opting_out_gives_exact_results_and_no_salt() -> None:
    bench = guided()
    salt = bench.add(Request("r", tokens(700), {"mapflow": {"reuse": False}}))
    assert salt is None
    assert bench.scheduler.ready("r", 0) and bench.client.asked == []
    assert bench.counters.get("request_not_reused", "opted_out") == 1


@pytest.mark.parametrize("params", [{"mapflow": 3}, {"mapflow": {"resue": False}}, {"mapflow": {"reuse": "no"}}])
def test_parameters_that_cannot_be_read_ask_for_exactness(
    params: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    bench = guided()
    assert bench.add(Request("r", tokens(700), params)) is None
    assert "exact results" in caplog.text


@pytest.mark.parametrize(
    ("request_", "plain_text", "reason"),
    [
        (Request("r", tokens(700), {"mapflow": {"plan": "none"}}), True, "unknown_plan"),
        (Request("r", tokens(100)), True, "too_short"),
        (Request("r", tokens(700)), False, "unsupported_input"),
        (Request("r", None), True, "unsupported_input"),
    ],
)
def test_requests_left_alone_are_counted(request_: Request, plain_text: bool, reason: str) -> None:
    bench = guided()
    bench.add(request_, plain_text=plain_text)
    assert bench.scheduler.ready("r", 0) and bench.client.asked == []
    assert bench.counters.get("request_not_reused", reason) == 1


def test_salts_keep_tenants_and_plans_apart() -> None:
    bench = Bench(plans=[plan("a", Mode.GUIDE), plan("b", Mode.STATIC)])
    salts = {
        bench.add(Request("1", tokens(700))),
        bench.add(Request("2", tokens(700), cache_salt="x")),
        bench.add(Request("3", tokens(700), {"mapflow": {"plan": "b"}})),
    }
    assert len(salts) == 3 and None not in salts
    bench.scheduler.ready("1", 0)
    bench.scheduler.ready("2", 0)
    assert not set(bench.client.asked[0][0]) & set(bench.client.asked[1][0]), "a cache salt is part of every key"


def test_a_static_plan_needs_no_daemon() -> None:
    bench = Bench(plans=[plan("s", Mode.STATIC)])
    bench.add(Request("r", tokens(700)))
    assert bench.scheduler.ready("r", 0)
    step = bench.run("r", 0, 700, restarted=True)
    assert (step.reuse.row_begin, step.reuse.row_end, step.reuse.chunks) == (0, 640, ())


def test_a_producer_captures_what_nobody_has_published() -> None:
    bench = Bench(publishes=True)
    request = Request("r", tokens(700))
    assert bench.add(request) is None, "a producer's KV is exact and keeps its hash"
    bench.client.answer(2)
    step = bench.run("r", 0, 700, restarted=True)
    assert [chunk.index for chunk in step.capture] == [2, 3, 4, 5]
    assert step.capture[3].key == b"", "the unfinished last chunk is kept for the next turn"
    assert step.capture[0].parent_key == bench.client.asked[0][0][1]
    bench.add(Request("s", tokens(700, 1)))
    step = bench.run("s", 0, 700, restarted=True)  # no answer yet: capture everything rather than wait
    assert [chunk.index for chunk in step.capture] == [0, 1, 2, 3, 4, 5]


def test_an_engine_with_both_roles_publishes_exact_rows_only() -> None:
    bench = Bench(plans=[plan("guide", Mode.GUIDE)], publishes=True)
    bench.add(Request("r", tokens(700)))
    early, probe = bench.client.futures
    probe.set_result(LookupResult(boot_id=b"b", lease=None, hits=()))
    assert not bench.scheduler.ready("r", 0)
    bench.client.answer(2, which=bench.client.futures.index(early))
    bench.scheduler.ready("r", 0)
    step = bench.run("r", 0, 700, restarted=True)
    assert step.reuse.row_begin == 0 and step.capture == (), "every row behind reused rows is approximate"
    bench.add(Request("s", tokens(700)))
    bench.scheduler.ready("s", 256)  # its prefix lies in the cache, computed with reuse
    bench.client.answer(0)
    bench.scheduler.ready("s", 256)
    assert bench.run("s", 256, 444, restarted=True) is None


def test_an_engine_with_both_roles_goes_on_from_an_exact_prefix() -> None:
    bench = Bench(plans=[plan("guide", Mode.GUIDE)], publishes=True)
    for name, begin, expected in (("r", 0, [0, 1, 2, 3, 4, 5]), ("s", 256, [2, 3, 4, 5])):
        bench.add(Request(name, tokens(700)))
        bench.scheduler.ready(name, begin)
        bench.client.answer(0)
        bench.scheduler.ready(name, begin)
        step = bench.run(name, begin, 700 - begin, restarted=True)
        assert [chunk.index for chunk in step.capture] == expected


def test_reports_add_up_and_come_back_on_request() -> None:
    bench = guided()
    bench.add(Request("r", tokens(700), {"mapflow": {"report": True}}))
    for rows, kept in ((128, 10), (64, 20)):
        report = ReuseReport(reused_rows=rows, kept_blocks=kept, causal_blocks=60, modes={"guide": 1})
        bench.scheduler.take_reports({"r": report, "gone": report})
    params = bench.scheduler.finish("r")
    assert params is not None
    assert params["mapflow"] == {
        "fate": "reuse",
        "plan": "guide",
        "reused_tokens": 192,
        "density": 0.25,
        "layers": {"guide": 1},
        "layers_in_place": 0,
        "reasons": {},
    }
    assert bench.scheduler.finish("r") is None


def test_the_next_turn_is_told_what_it_goes_on_from() -> None:
    bench = Bench(publishes=True)
    whole = tokens(900)
    bench.add(Request("1", whole[:700]))
    step = bench.run("1", 0, 700, restarted=True)
    assert step.resume == b"" and step.keep
    bench.add(Request("2", whole))
    assert bench.run("2", 672, 228, restarted=True).resume == step.keep
    other = [*whole[:699], 49, *whole[700:]]
    bench.add(Request("3", other))
    assert bench.run("3", 640, 260, restarted=True).resume == b"", "another token in the unfinished chunk"
