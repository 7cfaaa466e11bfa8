"""Counters from many threads, and log lines that an outage cannot multiply."""

from __future__ import annotations

import logging
import threading

import pytest

from mapflow.connector.counters import CounterLog, Counters, LimitedLog
from mapflow.connector.reasons import Reason


def test_counts_are_by_name_and_reason() -> None:
    counters = Counters()
    counters.add("lookup", Reason.DEADLINE)
    counters.add("lookup", Reason.DEADLINE, 2)
    counters.add("lookup", "hit", 5)
    counters.add("bytes", n=7)
    assert counters.snapshot() == {("lookup", "deadline"): 3, ("lookup", "hit"): 5, ("bytes", ""): 7}
    assert counters.get("lookup", Reason.DEADLINE) == 3
    assert counters.get("lookup", "nothing") == 0
    assert ("lookup", "nothing") not in counters.snapshot()


def test_a_snapshot_is_a_copy() -> None:
    counters = Counters()
    before = counters.snapshot()
    counters.add("lookup", "hit")
    assert before == {}


def test_no_count_is_lost_between_threads() -> None:
    counters = Counters()
    threads = [
        threading.Thread(target=lambda: [counters.add("x", "y") for _ in range(2000)] and None) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counters.snapshot() == {("x", "y"): 16000}


def test_one_line_per_key_and_period(caplog: pytest.LogCaptureFixture) -> None:
    now = 100.0
    log = LimitedLog(logging.getLogger("mapflow.test"), every_s=30.0, clock=lambda: now)
    with caplog.at_level(logging.WARNING):
        for number in range(5):
            log.warning("down", "daemon %s is down, try %d", "a", number)
        log.warning("slow", "daemon is slow")
        now = 129.9
        log.warning("down", "still %s", "down")
        now = 130.0
        log.warning("down", "still %s", "down")
    assert caplog.messages == [
        "daemon a is down, try 0",
        "daemon is slow",
        "still down (and 5 more like it)",
    ]


def test_counts_are_logged_when_they_change_and_not_too_often(caplog: pytest.LogCaptureFixture) -> None:
    now, counters = [0.0], Counters()
    log = CounterLog(counters, logging.getLogger("counts"), every_s=60.0, clock=lambda: now[0])
    counters.add("lookup_failed", "deadline", 2)
    with caplog.at_level(logging.INFO, logger="counts"):
        log.tick()
        assert not caplog.records, "the minute is not over"
        now[0] = 60.0
        log.tick()
        log.tick()
        counters.add("internal_error")
        log.flush()
        log.flush()
    assert [record.getMessage() for record in caplog.records] == [
        "mapflow: counts so far: lookup_failed[deadline]=2",
        "mapflow: counts so far: internal_error=1",
    ]
