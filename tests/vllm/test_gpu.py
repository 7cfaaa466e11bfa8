"""vLLM on a GPU: both model runners, eager and compiled with CUDA graphs, chunked prefill, several requests a step.

The receiver's own answers without reuse are what `guide` at p = 1.0 must repeat. One sender and four receivers run side
by side on one GPU, each in a process of its own. The daemon has an arena on it, whose copies the receivers read in
place when they ask again; one of them reads from pinned memory alone.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from mapflow.cli.demo.processes import Services, daemon_command, wait_ready  # noqa: E402
from mapflow.cli.status import StatusError, fetch_stats  # noqa: E402
from mapflow.connector.plan import Plan, load_plan, with_top_p  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

EXAMPLES = Path(__file__).parents[2] / "examples"
PAIR = EXAMPLES / "pair"
VARIANTS = ("eager-v1", "eager-v2", "compiled-v1", "compiled-v2")
LENGTHS = (3000, 1500, 700, 45, 1032)
CRAMPED = 1032  # tokens of each prompt where there is room for little more
ALONE = 4  # whose last step of 8 rows replays CUDA graphs, where its prompt runs by itself
DTYPES = {"eager": "bfloat16", "compiled": "float16"}
WITH_PREFIX_CACHE = ("eager-v1", "compiled-v1")
WITHOUT_GPU_TIER = "eager-v1"
TOLERANCES = {"bfloat16": 0.2, "float16": 0.03}  # of log-probabilities: a few steps of a logit between 8 and 16


@dataclass(kw_only=True)
class Engine:
    """A process of `engine_process.py`."""

    job: Path
    process: subprocess.Popen[bytes]

    def results(self) -> list[list[dict[str, Any]]]:
        """Wait for its end; what it said on every batch."""
        code = self.process.wait(400)
        log = self.job.with_suffix(".log").read_text(errors="replace")
        assert code == 0, log[-3000:]
        found: list[list[dict[str, Any]]] = json.loads(self.job.with_suffix(".out.json").read_text())
        return found

    @property
    def log(self) -> str:
        """What it has logged."""
        return self.job.with_suffix(".log").read_text(errors="replace")


def _start(folder: Path, name: str, job: dict[str, Any], runner: str) -> Engine:
    path = folder / f"{name}.json"
    path.write_text(json.dumps(job))
    environment = {
        **os.environ,
        "VLLM_USE_V2_MODEL_RUNNER": runner,
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONSAFEPATH": "1",
        "VLLM_CACHE_ROOT": str(folder / f"cache-{name}"),
    }
    with path.with_suffix(".log").open("wb") as log:
        command = [sys.executable, str(Path(__file__).with_name("engine_process.py")), str(path)]
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
    return Engine(job=path, process=process)


def _prompts() -> list[list[int]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(PAIR / "receiver" / "tokenizer.json"))
    texts = [json.loads(line)["text"] for line in (EXAMPLES / "calibration.jsonl").read_text().splitlines()]
    long = [ids for ids in (tokenizer.encode(text).ids for text in texts) if len(ids) >= max(LENGTHS)]
    return [ids[:length] for ids, length in zip(long, LENGTHS, strict=False)]


def _saved(plan: Plan, folder: Path, name: str) -> str:
    path = folder / f"{name}.safetensors"
    plan.save(path)
    return str(path)


@dataclass(kw_only=True)
class Outcome:
    """Batches of one receiver, by name; each holds an answer per prompt."""

    batches: dict[str, list[dict[str, Any]]]
    log: str


@pytest.fixture(scope="module")
def outcomes() -> Iterator[dict[str, Outcome]]:
    """By variant, and "plain": the receiver model without any connector."""
    with tempfile.TemporaryDirectory(prefix="mapflow-") as name:
        folder = Path(name)
        guide, translate = (load_plan(PAIR / "plans" / f"{mode}.safetensors") for mode in ("guide", "translate"))
        plans = [
            _saved(with_top_p(guide, 1.0), folder, "whole"),
            _saved(guide, folder, "sparse"),
            _saved(translate, folder, "lossy"),
        ]
        endpoint = f"unix://{folder / 'mapflow.sock'}"
        services = Services(logs=folder)
        command = [*daemon_command(endpoint, "256MiB"), "--gpu-arena", "0:256MiB"]
        try:
            daemon = services.start("daemon", command, endpoint=endpoint)
            while wait_ready([daemon], time.monotonic() + 60.0):
                time.sleep(0.1)
            yield _run(folder, endpoint, plans)
        finally:
            services.stop()


def _run(folder: Path, endpoint: str, plans: Sequence[str]) -> dict[str, Outcome]:
    prompts = _prompts()
    published = folder / "published"

    def transfer(role: str, used: Sequence[str], *, gpu_tier: bool = True) -> dict[str, Any]:
        # layers of this model take less time than a copy may
        extra = {"endpoint": endpoint, "plan": list(used), "lookup_deadline_s": 2.0, "cost_model": False}
        extra["gpu_tier"] = gpu_tier
        return {"kv_connector": "mapflow", "kv_role": role, "kv_connector_extra_config": extra}

    def batch(mapflow: dict[str, Any] | None) -> dict[str, Any]:
        return {"prompts": prompts, "mapflow": mapflow, "max_tokens": 8}

    wanted: dict[str, dict[str, Any] | None] = {"exact": {"reuse": False}}
    wanted |= {plan: {"plan": plan, "report": True} for plan in ("whole", "sparse", "lossy")}
    wanted |= {f"{plan} again": wanted[plan] for plan in ("sparse", "lossy")}
    cramped = {"prompts": [ids[:CRAMPED] for ids in prompts if len(ids) >= CRAMPED], "max_tokens": 128}
    alone = {**batch(wanted["exact"]), "prompts": [prompts[ALONE]]}
    chunked = {"max_num_batched_tokens": 512, "max_num_seqs": 8, "block_size": 16}
    chunked |= {"gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 1 << 30}
    engines: dict[str, Engine] = {}
    try:
        for variant in VARIANTS:
            mode, _, runner = variant.partition("-v")
            job = {
                "model": str(PAIR / "receiver"),
                "transfer": transfer("kv_consumer", plans, gpu_tier=variant != WITHOUT_GPU_TIER),
                "engine": {
                    **chunked,
                    "enforce_eager": mode == "eager",
                    "dtype": DTYPES[mode],
                    "enable_prefix_caching": variant in WITH_PREFIX_CACHE,
                },
                "wait_for": str(published),
                "batches": [*map(batch, wanted.values()), alone],
            }
            engines[variant] = _start(folder, variant, job, str(int(runner) - 1))
        eager = {**chunked, "enforce_eager": True, "dtype": DTYPES["eager"]}
        engines["cramped"] = _start(
            folder,
            "cramped",
            {
                "model": str(PAIR / "receiver"),
                "transfer": transfer("kv_consumer", plans),
                "engine": {**eager, "num_gpu_blocks_override": 200, "max_model_len": 2048, "disable_log_stats": False},
                "wait_for": str(published),
                "batches": [{**batch(wanted[name]), **cramped} for name in ("exact", "whole")],
            },
            "1",
        )
        common = {"engine": eager, "wait_for": None, "batches": [batch(None)]}
        engines["plain"] = _start(folder, "plain", {"model": str(PAIR / "receiver"), "transfer": None, **common}, "1")
        sender = {"model": str(PAIR / "sender"), "transfer": transfer("kv_producer", plans), **common}
        engines["sender"] = _start(folder, "sender", sender, "0")
        engines["sender"].results()
        _wait_until_still(endpoint)
        published.touch()
        found = {}
        for name, engine in engines.items():
            names = {"plain": ["exact"], "sender": ["exact"], "cramped": ["exact", "whole"]}.get(
                name, [*wanted, "alone"]
            )
            found[name] = Outcome(batches=dict(zip(names, engine.results(), strict=True)), log=engine.log)
        return found
    finally:
        for engine in engines.values():
            engine.process.kill()
        keep = os.environ.get("MAPFLOW_KEEP_LOGS")
        for engine in engines.values() if keep else ():
            (Path(keep) / engine.job.with_suffix(".log").name).write_text(engine.log)


def _wait_until_still(endpoint: str) -> None:
    deadline, before = time.monotonic() + 60.0, -1
    while time.monotonic() < deadline:
        try:
            now = fetch_stats(endpoint).num_entries
        except StatusError:
            now = -1
        if now == before > 0:
            return
        before = now
        time.sleep(0.5)
    raise AssertionError("the sender published nothing")


def _reused(length: int) -> int:
    """Rows of a prompt that are reused: whole chunks, without the block of the last token."""
    return min(length // 128 * 128, (length - 1) // 64 * 64)


def _difference(left: dict[str, Any], right: dict[str, Any]) -> float:
    """The largest of the greedy tokens' log-probabilities; where the tokens part, between the two tokens in each."""
    largest = 0.0
    for number, (a, b) in enumerate(zip(left["token_ids"], right["token_ids"], strict=True)):
        ours, theirs = left["logprobs"][number], right["logprobs"][number]
        if a != b:
            gaps = [abs(one.get(str(a), -math.inf) - one.get(str(b), -math.inf)) for one in (ours, theirs)]
            return max(largest, *gaps)
        largest = max(largest, abs(ours[str(a)] - theirs[str(a)]))
    return largest


@pytest.mark.parametrize("variant", VARIANTS)
def test_guide_at_p_1_gives_plain_tokens(outcomes: dict[str, Outcome], variant: str) -> None:
    found, dtype = outcomes[variant].batches, DTYPES[variant.partition("-")[0]]
    for number, length in enumerate(LENGTHS):
        whole, exact = found["whole"][number], found["exact"][number]
        assert whole["report"]["reused_tokens"] == _reused(length)
        if _reused(length):
            assert whole["report"]["reasons"] == {} and whole["report"]["layers"] == {"guide": 4}
            assert whole["report"]["density"] == 1.0
        assert _difference(whole, exact) < TOLERANCES[dtype], number
        if dtype == DTYPES["eager"]:
            assert _difference(exact, outcomes["plain"].batches["exact"][number]) < TOLERANCES[dtype], number


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("plan", "modes"), [("sparse", {"guide": 4}), ("lossy", {"translate": 3})])
def test_approximate_plans(outcomes: dict[str, Outcome], variant: str, plan: str, modes: dict[str, int]) -> None:
    """They reuse the same rows in less than all blocks, and translation shows: it is further off than rounding."""
    found = outcomes[variant].batches
    for number, length in enumerate(LENGTHS):
        report = found[plan][number]["report"]
        assert report["reused_tokens"] == _reused(length)
        if _reused(length):
            assert report["layers"] == modes and 0.0 < report["density"] < 1.0
    if plan == "lossy":
        assert _distance(found["lossy"], found["exact"]) > 2 * _distance(found["whole"], found["exact"])


def _distance(left: list[dict[str, Any]], right: list[dict[str, Any]]) -> float:
    """Mean difference of the first token's log-probabilities, over prompts."""
    found = []
    for one, other in zip(left, right, strict=True):
        ours, theirs = one["logprobs"][0], other["logprobs"][0]
        found += [abs(ours[token] - theirs[token]) for token in ours.keys() & theirs.keys()]
    return sum(found) / len(found)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("plan", "layers"), [("sparse", 4), ("lossy", 3)])
def test_the_same_prompts_again(outcomes: dict[str, Outcome], variant: str, plan: str, layers: int) -> None:
    """Under the same plan: from vLLM's prefix cache where it is on, else from copies that are on the GPU by now."""
    found = outcomes[variant].batches
    for number, length in enumerate(LENGTHS):
        first, again = found[plan][number], found[f"{plan} again"][number]
        assert _difference(again, first) < TOLERANCES[DTYPES[variant.partition("-")[0]]], number
        if variant == WITHOUT_GPU_TIER:
            assert first["report"]["layers_in_place"] == 0
        if variant in WITH_PREFIX_CACHE:
            assert again["report"]["reused_tokens"] == 0
        elif _reused(length):
            assert again["report"]["reused_tokens"] == _reused(length)
            assert again["report"]["layers_in_place"] == layers


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_small_step_replays_graphs(outcomes: dict[str, Outcome], variant: str) -> None:
    """One of 8 rows, of an exact request, whose graphs hold the projection of a plan's layers."""
    found, dtype = outcomes[variant].batches, DTYPES[variant.partition("-")[0]]
    assert _difference(found["alone"][0], found["exact"][ALONE]) < TOLERANCES[dtype]


def test_preempted_requests_give_plain_tokens(outcomes: dict[str, Outcome]) -> None:
    """The engine has room for all prompts, but not for their answers."""
    cramped = outcomes["cramped"]
    counts = [int(found) for found in re.findall(r"preemptions: (\d+)", cramped.log)]
    assert 0 < counts[0] < counts[1], "the test needs preemptions, in both batches, to mean anything"
    for number, (whole, exact) in enumerate(zip(cramped.batches["whole"], cramped.batches["exact"], strict=True)):
        assert whole["report"]["reused_tokens"] >= _reused(CRAMPED) and whole["report"]["reasons"] == {}
        assert _difference(whole, exact) < TOLERANCES[DTYPES["eager"]], number


@pytest.mark.parametrize("variant", VARIANTS)
def test_nothing_went_wrong(outcomes: dict[str, Outcome], variant: str) -> None:
    assert "Traceback" not in outcomes[variant].log
    assert "runs without reuse" not in outcomes[variant].log
    assert "projection[rows_without_queries]=" in outcomes[variant].log, "translated rows have no queries"


def test_the_sender_left_nothing_out(outcomes: dict[str, Outcome]) -> None:
    """All of its maps came off the GPU in time."""
    log = outcomes["sender"].log
    assert "Traceback" not in log
    assert "publish_dropped" not in log and "capture_failed" not in log


def test_flash_attention_says_its_log_sum_exps() -> None:
    """Two prompts in one call, one of them behind a cached prefix; a sender's tiles are made of them."""
    from vllm.v1.attention.backends import flash_attn

    from mapflow.connector.vllm.compat_attention import flash_row_lse

    generator = torch.Generator("cuda").manual_seed(0)
    heads, kv_heads, dim, page = 4, 2, 128, 16
    lengths, fresh = (300, 170), (300, 50)
    options = {"generator": generator, "device": "cuda", "dtype": torch.bfloat16}
    pages = [-(-length // page) for length in lengths]
    keys, values = (torch.randn(sum(pages), page, kv_heads, dim, **options) for _ in range(2))
    table = torch.zeros(2, max(pages), dtype=torch.int32, device="cuda")
    table[0, : pages[0]] = torch.arange(pages[0])
    table[1, : pages[1]] = torch.arange(pages[0], sum(pages))
    query = torch.randn(sum(fresh), heads, dim, **options)
    out, starts = torch.empty_like(query), torch.tensor([0, fresh[0], sum(fresh)], dtype=torch.int32, device="cuda")
    lse = flash_row_lse(
        lambda: flash_attn.flash_attn_varlen_func(
            q=query,
            k=keys,
            v=values,
            out=out,
            cu_seqlens_q=starts,
            max_seqlen_q=max(fresh),
            seqused_k=torch.tensor(lengths, dtype=torch.int32, device="cuda"),
            max_seqlen_k=max(lengths),
            softmax_scale=dim**-0.5,
            causal=True,
            block_table=table,
            fa_version=3,
        )
    )
    assert lse is not None and lse.shape == (heads, sum(fresh))
    for number, (length, own) in enumerate(zip(lengths, fresh)):
        rows = slice(int(starts[number]), int(starts[number + 1]))
        tokens = keys[table[number, : pages[number]].long()].flatten(0, 1)[:length].repeat_interleave(2, 1).double()
        scores = torch.einsum("qhd,khd->hqk", query[rows].double(), tokens) * dim**-0.5
        future = torch.ones(length, length, dtype=torch.bool, device="cuda").triu(1)[length - own :]
        wanted = scores.masked_fill(future, -torch.inf).logsumexp(-1) / math.log(2)
        assert float((lse[:, rows].double() - wanted).abs().max()) < 1e-3
    assert flash_row_lse(lambda: None) is None and not out.isnan().any()
