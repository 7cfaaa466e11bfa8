"""Requests are found in a batch of any order, and rows are cut into reused and other ones without loss."""

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from mapflow.connector.vllm.batch import locate, split_entry  # noqa: E402
from mapflow.connector.vllm.messages import RequestStep  # noqa: E402

PAGE = 32


def step(name: str, begin: int, end: int, last_page: int, num_prompt: int = 10_000) -> RequestStep:
    return RequestStep(request_id=name, row_begin=begin, row_end=end, num_prompt=num_prompt, last_page=last_page)


def test_finds_requests_whatever_their_order() -> None:
    table = torch.tensor([[5, 6, 0], [9, 0, 0], [1, 2, 3]], dtype=torch.int32)
    steps = [step("long", 40, 70, 3), step("decode", 31, 32, 9), step("short", 0, 40, 6)]
    rows = locate(
        steps, query_start=[0, 40, 41, 71], seq_lens=[40, 32, 70], block_table=table, page_size=PAGE, pages_per_block=1
    )
    assert {entry: row.step.request_id for entry, row in rows.items()} == {0: "short", 1: "decode", 2: "long"}
    assert (rows[2].query_begin, rows[2].row_begin, rows[2].row_end) == (41, 40, 70)
    assert rows[2].block_table.tolist() == [1, 2, 3]


def test_rows_behind_the_prompt_are_left_out() -> None:
    table = torch.tensor([[5, 6]], dtype=torch.int32)
    rows = locate(
        [step("r", 0, 40, 6, num_prompt=38)],
        query_start=[0, 40],
        seq_lens=[40],
        block_table=table,
        page_size=PAGE,
        pages_per_block=1,
    )
    assert rows[0].row_end == 38


def test_smaller_pages_than_the_schedulers_blocks() -> None:
    table = torch.tensor([[10, 11, 12, 13]], dtype=torch.int32)  # block 5 and 6 of 64 tokens, in pages of 32
    rows = locate(
        [step("r", 0, 100, 6)], query_start=[0, 100], seq_lens=[100], block_table=table, page_size=32, pages_per_block=2
    )
    assert rows[0].step.request_id == "r"


@pytest.mark.parametrize(("begin", "end"), [(0, 39), (1, 40), (0, 41)])
def test_a_step_that_does_not_fit_the_batch_is_not_matched(begin: int, end: int) -> None:
    table = torch.tensor([[5, 6]], dtype=torch.int32)
    found = locate(
        [step("r", begin, end, 6)],
        query_start=[0, 40],
        seq_lens=[40],
        block_table=table,
        page_size=PAGE,
        pages_per_block=1,
    )
    assert found == {}


@given(
    st.integers(0, 50),
    st.integers(1, 100),
    st.lists(st.tuples(st.integers(0, 160), st.integers(0, 60)), max_size=4),
    st.integers(0, 20),
)
def test_split_loses_and_doubles_nothing(begin: int, length: int, raw: list[tuple[int, int]], query_begin: int) -> None:
    reused, position = [], 0
    for start, size in sorted(raw):
        start = max(start, position)
        reused.append((start, start + size))
        position = start + size
    end = begin + length
    inside, outside = split_entry(3, query_begin, begin, end, reused)
    for rows in (*inside, *outside):
        assert rows.query_begin - query_begin == rows.row_begin - begin
    wanted = {row for start, stop in reused for row in range(max(start, begin), min(stop, end))}
    assert sorted(row for rows in inside for row in range(rows.row_begin, rows.row_end)) == sorted(wanted)
    others = set(range(begin, end)) - wanted
    assert sorted(row for rows in outside for row in range(rows.row_begin, rows.row_end)) == sorted(others)
