"""What users see: the same tokens where the plan is exact, maps reused where it should be, and nobody hurt by failures.

`whole` is the guide plan at p = 1.0, which is exact; `sparse` and `lossy` are the plans of the demo.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

pytest.importorskip("vllm")

from mapflow.cli.demo.openai import Completion, Server
from mapflow.cli.demo.quality import kl_divergence
from mapflow.cli.status import fetch_stats

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

WHOLE = {"plan": "whole", "report": True}


def at_once(
    server: Server, prompts: Sequence[list[int]], mapflow: dict[str, object], max_tokens: int = 8
) -> list[Completion]:
    """Send several requests at the same time."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda ids: server.complete(ids, max_tokens=max_tokens, mapflow=mapflow), prompts))


def test_chunked_prefill_gives_plain_tokens(cluster, texts) -> None:
    prompt = texts[0][:3000]
    cluster.publish(prompt)
    answer = cluster.receiver.complete(prompt, max_tokens=16, mapflow=WHOLE)
    assert answer.report["reused_tokens"] >= 2900
    assert set(answer.report["layers"]) == {"guide"} and answer.report["reasons"] == {}
    assert answer.report["density"] == 1.0
    assert answer.token_ids == cluster.plain.complete(prompt, max_tokens=16).token_ids


def test_a_plan_of_compute_gives_plain_tokens(cluster, texts) -> None:
    prompt = texts[0][:3000]
    answer = cluster.receiver.complete(prompt, max_tokens=16, mapflow={"plan": "compute", "report": True})
    assert answer.report["reused_tokens"] == 0
    assert answer.token_ids == cluster.plain.complete(prompt, max_tokens=16).token_ids


def test_a_batch_of_many_lengths_gives_plain_tokens(cluster, texts) -> None:
    prompts = [texts[1][:1500], texts[2][:700], texts[1][100:145], texts[3][:1023], texts[2][5:300]]
    for prompt in prompts:
        cluster.publish(prompt)
    answers = at_once(cluster.receiver, prompts, WHOLE)
    assert [answer.report["reused_tokens"] > 0 for answer in answers] == [True, True, False, True, True]
    assert [answer.token_ids for answer in answers] == [
        cluster.plain.complete(prompt, max_tokens=8).token_ids for prompt in prompts
    ]


def test_a_cached_prefix_gives_plain_tokens(cluster, texts) -> None:
    first, second = texts[3][:1800], texts[3][:2900]
    for prompt in (first, second):
        cluster.publish(prompt)
    cluster.receiver.complete(first, max_tokens=4, mapflow=WHOLE)
    answer = cluster.receiver.complete(second, max_tokens=16, mapflow=WHOLE)
    assert answer.cached_tokens >= 1700, "the second turn builds on KV that the first computed with reuse"
    assert 900 <= answer.report["reused_tokens"] <= 1100
    assert answer.token_ids == cluster.plain.complete(second, max_tokens=16).token_ids


def test_preempted_requests_give_plain_tokens(cluster, texts) -> None:
    prompts = [text[:2200] for text in texts[:4]]
    for prompt in prompts:
        cluster.publish(prompt)
    answers = at_once(cluster.cramped, prompts, WHOLE, max_tokens=160)
    metrics = httpx.get(f"{cluster.cramped.url}/metrics").text
    preemptions = [line for line in metrics.splitlines() if line.startswith("vllm:num_preemptions_total")]
    assert float(preemptions[0].split()[-1]) > 0, "the test needs preemptions to mean anything"
    assert all(answer.report["reused_tokens"] >= 2000 for answer in answers)
    assert [answer.token_ids for answer in answers] == [
        cluster.plain.complete(prompt, max_tokens=160).token_ids for prompt in prompts
    ]


def test_opting_out_after_lossy_reuse_is_exact(cluster, texts) -> None:
    prompt = texts[1][:3100]
    cluster.publish(prompt)
    lossy = cluster.receiver.complete(prompt, max_tokens=1, mapflow={"plan": "lossy", "report": True}, logprobs=True)
    assert lossy.report["reused_tokens"] >= 2900 and lossy.report["layers"] == {
        "translate": lossy.report["layers"]["translate"]
    }
    exact = cluster.receiver.complete(prompt, max_tokens=1, mapflow={"reuse": False, "report": True}, logprobs=True)
    assert exact.cached_tokens == 0, "approximate KV must not be hit"
    assert (exact.report["fate"], exact.report["reused_tokens"]) == ("opted_out", 0)
    plain = cluster.plain.complete(prompt, max_tokens=1, logprobs=True)
    assert exact.logprobs == pytest.approx(plain.logprobs, abs=1e-4)
    assert kl_divergence(plain.logprobs, lossy.logprobs) > 1e-4, "lossy reuse must show, or this test shows nothing"
    again = cluster.receiver.complete(prompt, max_tokens=1, mapflow={"reuse": False})
    assert again.cached_tokens > 2900, "exact requests share exact KV"


def test_rows_without_queries_change_nothing(cluster, texts) -> None:
    """The receiver leaves out the queries of translated rows, the second one computes them all."""
    prompt = texts[3][100:3300]
    cluster.publish(prompt)
    lossy = {"plan": "lossy", "report": True}
    found = [
        one.complete(prompt, max_tokens=2, mapflow=lossy, logprobs=True) for one in (cluster.receiver, cluster.second)
    ]
    assert found[0].report["reused_tokens"] == found[1].report["reused_tokens"] >= 2900
    assert found[0].logprobs == pytest.approx(found[1].logprobs, abs=1e-3)
    rows = "projection[rows_without_queries]="

    def is_logged() -> bool:
        """Counters are logged by the next step after a minute."""
        for server in (cluster.receiver, cluster.second):
            server.complete(texts[0][:10], max_tokens=1)
        return rows in cluster.log("receiver")

    cluster.until(is_logged, "the receiver's counters", timeout_s=90.0)
    assert rows not in cluster.log("second")


def test_guide_is_closer_than_translate(cluster, texts) -> None:
    """On average: one position of one text says little."""
    divergence = {"sparse": 0.0, "lossy": 0.0}
    for text in texts[2:7]:
        prompt = text[:3300]
        cluster.publish(prompt)
        plain = cluster.plain.complete(prompt, max_tokens=1, logprobs=True).logprobs
        for plan in divergence:
            wanted = {"plan": plan, "report": True}
            found = cluster.receiver.complete(prompt, max_tokens=1, mapflow=wanted, logprobs=True)
            assert 0.0 < found.report["density"] < 0.9
            divergence[plan] += kl_divergence(plain, found.logprobs)
    assert divergence["sparse"] < divergence["lossy"] / 2


def test_two_receivers_share_one_senders_maps(cluster, texts) -> None:
    prompt = texts[0][500:3500]
    cluster.publish(prompt)
    before = fetch_stats(cluster.endpoint).num_entries
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(cluster.receiver.complete, prompt, max_tokens=4, mapflow={"plan": "sparse", "report": True})
        second = pool.submit(cluster.second.complete, prompt, max_tokens=4, mapflow={"report": True})
    assert first.result().report["reused_tokens"] == second.result().report["reused_tokens"] >= 2900
    assert first.result().token_ids == second.result().token_ids
    assert fetch_stats(cluster.endpoint).num_entries == before


def test_a_cancelled_request_leaves_no_lease(cluster, texts) -> None:
    prompt = texts[2][200:3600]
    cluster.publish(prompt)
    body = {
        "model": cluster.receiver.model,
        "prompt": prompt,
        "max_tokens": 2000,
        "ignore_eos": True,
        "stream": True,
        "kv_transfer_params": {"mapflow": WHOLE},
    }
    with httpx.stream("POST", f"{cluster.receiver.url}/v1/completions", json=body, timeout=60.0) as stream:
        next(stream.iter_lines())
    cluster.until(lambda: fetch_stats(cluster.endpoint).num_leases == 0, "the lease of a cancelled request")
    assert cluster.receiver.complete(prompt, max_tokens=2, mapflow=WHOLE).token_ids


def test_bad_parameters_are_answered_exactly(cluster, texts) -> None:
    prompt = texts[0][:900]
    answer = cluster.receiver.complete(prompt, max_tokens=4, mapflow={"reuse": "maybe"})
    assert answer.token_ids == cluster.plain.complete(prompt, max_tokens=4).token_ids
    assert "reuse='maybe'" in cluster.log("receiver")


def test_the_daemon_killed_in_the_middle_of_a_request(cluster, texts) -> None:
    """Runs last: it kills the daemon, and starts another at the end."""
    prompt = texts[1][300:3600]
    cluster.publish(prompt)
    expected = cluster.plain.complete(prompt, max_tokens=40).token_ids
    num_sessions = fetch_stats(cluster.endpoint).num_sessions
    killer = threading.Timer(0.3, cluster.daemon.process.kill)
    killer.start()
    answer = cluster.receiver.complete(prompt, max_tokens=40, mapflow=WHOLE)
    killer.join()
    cluster.daemon.process.wait()
    assert answer.token_ids == expected
    fresh = texts[3][300:3600]
    expected = cluster.plain.complete(fresh, max_tokens=8).token_ids
    assert cluster.sender.complete(fresh, max_tokens=1).token_ids, "the sender goes on"
    answer = cluster.receiver.complete(fresh, max_tokens=8, mapflow=WHOLE)
    assert (answer.report["reused_tokens"], answer.token_ids) == (0, expected), "the receiver goes on"
    cluster.restart_daemon()
    cluster.until(lambda: fetch_stats(cluster.endpoint).num_sessions == num_sessions, "all engines to come back")
    other = texts[2][100:3400]
    cluster.publish(other)
    answer = cluster.receiver.complete(other, max_tokens=8, mapflow=WHOLE)
    assert answer.report["reused_tokens"] >= 3000, "reuse goes on with the new daemon"
    assert answer.token_ids == cluster.plain.complete(other, max_tokens=8).token_ids
