"""Chunk by chunk, cut anywhere, the capture measures what one pass over the whole prompt measures."""

import itertools

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from mapflow.connector.vllm.batch import BatchRow  # noqa: E402
from mapflow.connector.vllm.capture import Capture, FinishedMap  # noqa: E402
from mapflow.connector.vllm.messages import CapturedChunk, RequestStep  # noqa: E402
from mapflow.connector.wants import LayerWant  # noqa: E402
from mapflow.kernels.compress_reference import assemble_chunk, compress_rows  # noqa: E402
from mapflow.kernels.paged import PagedKV  # noqa: E402

CHUNK, BLOCK, PAGE, HEADS, KV_HEADS, DIM = 128, 64, 32, 4, 2, 16
SCALE = DIM**-0.5


class Prompt:
    """Random queries and keys of a prompt, with its keys in shuffled pages."""

    def __init__(self, num_tokens: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.num_tokens = num_tokens
        self.query = torch.randn(num_tokens, HEADS, DIM, generator=generator) * 3
        self.key = torch.randn(num_tokens, KV_HEADS, DIM, generator=generator)
        pages = -(-num_tokens // PAGE)
        self.table = torch.randperm(pages, generator=generator).int()
        cache = torch.full((pages, KV_HEADS, PAGE, DIM), float("nan"))
        for token in range(num_tokens):
            cache[self.table[token // PAGE], :, token % PAGE] = self.key[token]
        self.kv = PagedKV(key_cache=cache, value_cache=torch.zeros_like(cache))

    def whole(self, chunk: int, want: LayerWant) -> object:
        """The chunk's map from one pass."""
        rows = slice(chunk * CHUNK, (chunk + 1) * CHUNK)
        part = compress_rows(
            self.query[rows],
            self.key[: rows.stop],
            first_row=rows.start,
            block=BLOCK,
            scale=SCALE,
            top_p=want.tile_top_p or None,
            heads=want.heads,
        )
        return assemble_chunk([part], chunk_index=chunk, chunk_tokens=CHUNK, block=BLOCK, num_heads=HEADS)

    def step(
        self,
        capture: Capture,
        want: LayerWant,
        begin: int,
        end: int,
        offset: int = 0,
        *,
        name: str = "r",
        num_prompt: int | None = None,
        resume: bytes = b"",
        keep: bytes = b"",
    ) -> list[FinishedMap]:
        """Run one step over rows [begin, end), which lie at `offset` of the batch."""
        num_prompt = num_prompt or self.num_tokens
        complete = num_prompt // CHUNK
        chunks = tuple(
            CapturedChunk(index=index, key=bytes([index + 1]) if index < complete else b"", parent_key=b"")
            for index in range(begin // CHUNK, -(-end // CHUNK))
        )
        step = RequestStep(
            request_id=name,
            row_begin=begin,
            row_end=end,
            num_prompt=num_prompt,
            last_page=0,
            capture=chunks,
            resume=resume,
            keep=keep,
        )
        batch = torch.cat([torch.full((offset, HEADS, DIM), float("nan")), self.query[begin:end]])
        row = BatchRow(step=step, query_begin=offset, row_begin=begin, row_end=end, block_table=self.table)
        return capture.add(0, want, row, batch, self.kv, SCALE)


def equal_maps(left: object, right: object) -> bool:
    """Same masses (as stored), rows and tiles."""
    same = left.chunk_index == right.chunk_index and torch.equal(left.row_counts, right.row_counts)  # type: ignore[attr-defined]
    same = same and bool((left.mass.int() - right.mass.int()).abs().max() <= 1)  # type: ignore[attr-defined]
    if left.tiles is None or right.tiles is None:  # type: ignore[attr-defined]
        return same and left.tiles is right.tiles  # type: ignore[attr-defined]
    return same and torch.equal(left.tiles.indices, right.tiles.indices)  # type: ignore[attr-defined]


@given(
    st.lists(st.integers(1, 420), max_size=6, unique=True),
    st.integers(0, 5),
    st.sampled_from([0.0, 0.9]),
    st.integers(0, 3),
)
@settings(max_examples=12, deadline=None)
def test_any_chunking_measures_the_same(cuts: list[int], seed: int, top_p: float, offset: int) -> None:
    prompt = Prompt(421, seed)
    want = LayerWant(heads=(0, 3), tile_top_p=top_p)
    capture = Capture(chunk_tokens=CHUNK, block=BLOCK)
    edges = [0, *sorted(cuts), prompt.num_tokens]
    done = [item for begin, end in itertools.pairwise(edges) for item in prompt.step(capture, want, begin, end, offset)]
    assert [item.chunk.index for item in done] == [0, 1, 2]
    for item in done:
        assert equal_maps(item.map.map, prompt.whole(item.chunk.index, want))


def test_rows_that_were_never_computed_are_marked() -> None:
    prompt, want = Prompt(384, 1), LayerWant()
    capture = Capture(chunk_tokens=CHUNK, block=BLOCK)
    done = prompt.step(capture, want, 160, 384)  # a local prefix hit ends inside block row 2, which is chunk 1's first
    assert [item.chunk.index for item in done] == [1, 2]
    assert done[0].map.map.row_counts.tolist() == [0, BLOCK]
    assert not done[0].map.map.mass[:, 0].any()
    assert done[1].map.map.row_counts.tolist() == [BLOCK, BLOCK]
    assert equal_maps(done[1].map.map, prompt.whole(2, want))


def test_a_preempted_request_that_starts_again_measures_once() -> None:
    prompt, want = Prompt(256, 2), LayerWant()
    capture = Capture(chunk_tokens=CHUNK, block=BLOCK)
    assert prompt.step(capture, want, 0, 100) == []
    done = [*prompt.step(capture, want, 0, 200), *prompt.step(capture, want, 200, 256)]
    assert [item.chunk.index for item in done] == [0, 1]
    for item in done:
        assert equal_maps(item.map.map, prompt.whole(item.chunk.index, want))


def test_a_gap_after_preemption_drops_the_kept_queries() -> None:
    prompt, want = Prompt(256, 3), LayerWant()
    capture = Capture(chunk_tokens=CHUNK, block=BLOCK)
    prompt.step(capture, want, 0, 100)
    done = prompt.step(capture, want, 128, 256)
    assert [item.chunk.index for item in done] == [1]
    assert equal_maps(done[0].map.map, prompt.whole(1, want))


def test_a_request_that_ends_early_leaves_nothing() -> None:
    prompt, want = Prompt(256, 4), LayerWant()
    capture = Capture(chunk_tokens=CHUNK, block=BLOCK)
    prompt.step(capture, want, 0, 100)
    capture.end("r")
    done = prompt.step(capture, want, 100, 256)
    assert [item.chunk.index for item in done] == [1], (
        "rows 100 to 127 fill no block row: chunk 0 has nothing to publish"
    )


@pytest.mark.parametrize("overlap", [0, 4])
def test_the_next_turn_goes_on_from_an_unfinished_chunk(overlap: int) -> None:
    prompt, want = Prompt(400, 5), LayerWant(tile_top_p=0.9)
    capture = Capture(chunk_tokens=CHUNK, block=BLOCK)
    first = prompt.step(capture, want, 0, 212, name="turn 1", num_prompt=212, keep=b"name")
    capture.end("turn 1")
    begin = 212 - overlap  # the engine has the rows before in its KV cache, in whole pages
    second = prompt.step(capture, want, begin, 400, name="turn 2", num_prompt=400, resume=b"name")
    assert [item.chunk.index for item in (*first, *second)] == [0, 1, 2]
    for item in (*first, *second):
        assert equal_maps(item.map.map, prompt.whole(item.chunk.index, want)), "no row is lost between turns"
