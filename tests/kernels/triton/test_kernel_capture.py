"""A sender's capture through the kernels: the maps of the reference capture, whatever way prefill is cut."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch

from mapflow.connector.counters import Counters
from mapflow.connector.vllm import piece_store
from mapflow.connector.vllm.batch import BatchRow
from mapflow.connector.vllm.capture import Capture, FinishedMap, HostBlob
from mapflow.connector.vllm.capture_buffer import CaptureBuffer, Room
from mapflow.connector.vllm.kernel_capture import KernelCapture
from mapflow.connector.vllm.messages import CapturedChunk, RequestStep
from mapflow.connector.wants import LayerWant
from mapflow.kernels.attention_map import AttentionMap, decode_mass
from mapflow.kernels.blob import read_blob
from mapflow.kernels.blob_writer import blob_num_bytes, write_blob
from mapflow.kernels.paged import PagedKV

CHUNK, BLOCK, PAGE, HEADS, KV_HEADS, DIM = 128, 64, 32, 4, 2, 64
SCALE = DIM**-0.5
MASSES, TILES = LayerWant(heads=(0, 3)), LayerWant(heads=(0, 3), tile_top_p=0.8)
EITHER = pytest.mark.parametrize("want", [MASSES, TILES], ids=["masses", "tiles"])


class Prompts:
    """Random queries, and keys in the shuffled pages of one cache."""

    def __init__(self, device: torch.device, *lengths: int, seed: int = 0, same_start: bool = False) -> None:
        """same_start: each prompt repeats the one before as far as that goes."""
        generator = torch.Generator().manual_seed(seed)
        longest = max(lengths)
        self.lengths = lengths
        self.device = device
        self.queries, keys = [], []
        for number in range(len(lengths)):
            if number == 0 or not same_start:
                query = (torch.randn(longest, HEADS, DIM, generator=generator) * 2).bfloat16()
                key = torch.randn(longest, KV_HEADS, DIM, generator=generator).bfloat16()
            self.queries.append(query)
            keys.append(key)
        pages = [-(-length // PAGE) for length in lengths]
        order = torch.randperm(sum(pages), generator=generator).int()
        self.tables = list(order.split(pages))
        cache = torch.full((sum(pages), KV_HEADS, PAGE, DIM), torch.nan, dtype=torch.bfloat16)
        for table, key, length in zip(self.tables, keys, lengths):
            for place, page in enumerate(table.tolist()):
                tokens = key[place * PAGE : min((place + 1) * PAGE, length)]
                cache[page, :, : tokens.shape[0]] = tokens.transpose(0, 1)
        values = torch.full_like(cache, torch.nan)
        self.host_kv = PagedKV(key_cache=cache, value_cache=values)
        self.kv = PagedKV(key_cache=cache.to(device), value_cache=values.to(device))


@dataclass
class Rows:
    """What one request does in a step."""

    prompt: int
    begin: int
    end: int
    name: str = ""
    resume: bytes = b""
    keep: bytes = b""


@dataclass
class Captures:
    """The kernels' capture and the reference's, fed with the same steps."""

    prompts: Prompts
    want: LayerWant
    buffer_bytes: int = 64 << 20
    counters: Counters = field(default_factory=Counters)
    jobs: list[Callable[[], None]] = field(default_factory=list)
    accepts: bool = True
    row_stride: int = 1
    says_row_lse: Callable[[int], bool] = lambda step: False
    num_steps: int = 0

    def __post_init__(self) -> None:
        sizes = {"chunk_tokens": CHUNK, "block": BLOCK}
        self.buffer = CaptureBuffer(self.buffer_bytes, self.prompts.device)
        self.reference = Capture(**sizes)
        self.kernels = KernelCapture(
            **sizes,
            buffer=self.buffer,
            defer=self._defer,
            counters=self.counters,
            row_stride=self.row_stride,
        )

    def _defer(self, job: Callable[[], None]) -> bool:
        if self.accepts:
            self.jobs.append(job)
        return self.accepts

    def step(self, *requests: Rows) -> tuple[list[FinishedMap], list[FinishedMap]]:
        """What the kernels finish, not yet fetched, and what the reference does."""
        rows, host_rows, runs = [], [], [torch.full((1, HEADS, DIM), torch.nan, dtype=torch.bfloat16)]
        for one in requests:
            complete = self.prompts.lengths[one.prompt] // CHUNK
            chunks = tuple(
                CapturedChunk(index=i, key=bytes([one.prompt, i]) if i < complete else b"", parent_key=b"")
                for i in range(one.begin // CHUNK, -(-one.end // CHUNK))
            )
            step = RequestStep(
                request_id=one.name or str(one.prompt),
                row_begin=one.begin,
                row_end=one.end,
                num_prompt=self.prompts.lengths[one.prompt],
                last_page=0,
                capture=chunks,
                resume=one.resume,
                keep=one.keep,
            )
            place = {"query_begin": sum(run.shape[0] for run in runs), "row_begin": one.begin, "row_end": one.end}
            table = self.prompts.tables[one.prompt]
            host_rows.append(BatchRow(step=step, block_table=table, **place))
            rows.append(BatchRow(step=step, block_table=table.to(self.prompts.device), **place))
            runs.append(self.prompts.queries[one.prompt][one.begin : one.end])
        query = torch.cat(runs)
        self.kernels.begin_step()
        lse = self.row_lse(*requests) if self.says_row_lse(self.num_steps) else None
        self.num_steps += 1
        got = self.kernels.measure(0, self.want, rows, query.to(self.prompts.device), self.prompts.kv, SCALE, lse)
        return got, self.reference.measure(0, self.want, host_rows, query, self.prompts.host_kv, SCALE)

    def row_lse(self, *requests: Rows) -> torch.Tensor:
        """As vLLM's attention says it, one row in front."""
        found = [torch.full((HEADS, 1), torch.nan)]
        for one in requests:
            keys = self.prompts.host_kv.gather_keys(self.prompts.tables[one.prompt], 0, one.end).double()
            keys = keys.repeat_interleave(HEADS // KV_HEADS, 1)
            query = self.prompts.queries[one.prompt][one.begin : one.end].double()
            scores = torch.einsum("qhd,khd->hqk", query, keys) * SCALE
            future = torch.ones(one.end, one.end, dtype=torch.bool).triu(1)[one.begin :]
            found.append((scores.masked_fill(future, -torch.inf).logsumexp(-1) / math.log(2)).float())
        return torch.cat(found, dim=1).to(self.prompts.device)

    def end(self, name: str) -> None:
        self.kernels.end(name)
        self.reference.end(name)

    def fetch(self) -> None:
        """What the publisher's thread does."""
        while self.jobs:
            self.jobs.pop(0)()

    def run(self, *steps: Sequence[Rows]) -> list[FinishedMap]:
        """All steps; every finished map is the reference's. They are fetched late, as by a slow thread."""
        return self.check(*self.steps(*steps))

    def steps(self, *steps: Sequence[Rows]) -> tuple[list[FinishedMap], list[FinishedMap]]:
        """As `step`, of all of them."""
        got, wanted = [], []
        for step in steps:
            ours, theirs = self.step(*step)
            got += ours
            wanted += theirs
        return got, wanted

    def check(self, got: list[FinishedMap], wanted: Sequence[FinishedMap]) -> list[FinishedMap]:
        """Compare; takes the maps out of `got`, and out of the buffer."""
        self.fetch()
        assert [item.chunk for item in got] == [item.chunk for item in wanted]
        found = []
        for theirs in wanted:
            ours = got.pop(0)
            found.append(replace(ours, map=HostBlob(fetched(ours))))
            check_map(fetched(found[-1]), exactly(theirs))
        del ours
        assert self.buffer.take(self.buffer.num_bytes, self.buffer.num_bytes) is not None, "all room was given back"
        return found


def exactly(item: FinishedMap) -> AttentionMap:
    """Of the reference."""
    assert isinstance(item.map, HostBlob)
    return item.map.map


def fetched(item: FinishedMap) -> AttentionMap:
    """As a blob that was written and read."""
    source = item.map if isinstance(item.map, HostBlob) else item.map.source()
    assert source is not None
    data = bytearray(b"\xff" * source.num_bytes)
    with memoryview(data) as view:
        source.begin(view)
        source.end()
        assert source.write(view, 7) == len(data)
    found = read_blob(data, identity=7)
    again = bytearray(blob_num_bytes(found))
    write_blob(found, again, identity=7)
    assert data == again, "kernels lay a blob out as the writer does"
    return found


def check_map(got: AttentionMap, wanted: AttentionMap) -> None:
    assert got.chunk_index == wanted.chunk_index and torch.equal(got.row_counts, wanted.row_counts)
    have, want = decode_mass(got.mass), decode_mass(wanted.mass)
    assert float((have - want).norm() / want.norm()) < (1.5e-2 if wanted.tiles is None else 3e-3)  # u8 steps included
    assert not have[want.sum((1, 2)) == 0].any(), "heads that nobody wants"
    if wanted.tiles is None or got.tiles is None:
        assert got.tiles is wanted.tiles
        return
    assert torch.equal(got.tiles.indptr, wanted.tiles.indptr) and torch.equal(got.tiles.indices, wanted.tiles.indices)
    steps = got.tiles.values.view(torch.uint8).int() - wanted.tiles.values.view(torch.uint8).int()
    assert int(steps.abs().max()) <= 1
    assert float((steps != 0).float().mean()) < 0.02


def cut(prompt: int, *edges: int) -> list[list[Rows]]:
    """Steps of one request."""
    return [[Rows(prompt, begin, end)] for begin, end in itertools.pairwise(edges)]


@EITHER
@pytest.mark.parametrize("edges", [(0, 421), (0, 44, 344, 421), (0, 1, 63, 65, 256, 400, 410, 421)], ids=str)
def test_as_the_reference(device: torch.device, want: LayerWant, edges: Sequence[int]) -> None:
    """A prompt in one step, and chunked prefill cut anywhere."""
    captures = Captures(Prompts(device, 421), want)
    done = captures.run(*cut(0, *edges))
    assert [item.chunk.index for item in done] == [0, 1, 2]
    assert all(bool(fetched(item).measured.all()) for item in done)


@pytest.mark.parametrize("edges", [(0, 421), (0, 44, 344, 421), (0, 1, 63, 65, 256, 400, 410, 421)], ids=str)
def test_every_fourth_row_of_masses(device: torch.device, edges: Sequence[int]) -> None:
    """However prefill is cut, the same rows, and masses near those of all rows."""
    prompts = Prompts(device, 421)
    whole, cuts = Captures(prompts, LayerWant(), row_stride=4), Captures(prompts, LayerWant(), row_stride=4)
    wanted, reference = whole.step(Rows(0, 0, 421))
    got = [item for step in cut(0, *edges) for item in cuts.step(*step)[0]]
    whole.fetch(), cuts.fetch()
    for ours, alone, exact in zip(got, wanted, reference, strict=True):
        mass, of_all = decode_mass(fetched(ours).mass), decode_mass(exactly(exact).mass)
        assert int((fetched(ours).mass.int() - fetched(alone).mass.int()).abs().max()) <= 2, (
            "queries are rounded by task"
        )
        assert 0.02 < float((mass - of_all).norm() / of_all.norm()) < 0.4


@pytest.mark.parametrize("says", [(True,) * 7, (True, False) * 4], ids=["always", "sometimes"])
@pytest.mark.parametrize("edges", [(0, 421), (0, 44, 344, 421), (0, 1, 63, 65, 256, 400, 410, 421)], ids=str)
def test_tiles_with_the_log_sum_exps_of_the_engine(
    device: torch.device, edges: Sequence[int], says: Sequence[bool]
) -> None:
    """The same tiles where both keep them; what is kept is chosen by fewer rows, where the engine said all of them."""
    captures = Captures(Prompts(device, 421), TILES, row_stride=4, says_row_lse=lambda step: says[step])
    got, wanted = captures.steps(*cut(0, *edges))
    captures.fetch()
    both = either = 0
    for ours, theirs in zip(got, wanted, strict=True):
        mine, exact = tiles_by_place(fetched(ours)), tiles_by_place(exactly(theirs))
        both, either = both + len(mine.keys() & exact.keys()), either + len(mine.keys() | exact.keys())
        for place in mine.keys() & exact.keys():
            steps = (mine[place].view(torch.uint8).int() - exact[place].view(torch.uint8).int()).abs()
            assert int(steps.max()) <= 1 and float((steps != 0).float().mean()) < 0.03
    assert both > 0.8 * either > 0


@pytest.mark.parametrize("says", [(True,) * 4, (True, False) * 2], ids=["always", "sometimes"])
@pytest.mark.parametrize("edges", [(0, 421), (0, 44, 344, 421)], ids=str)
def test_masses_with_the_log_sum_exps_of_the_engine(
    device: torch.device, edges: Sequence[int], says: Sequence[bool]
) -> None:
    """Near the reference's, also where a block row is measured in steps with them and without."""
    captures = Captures(Prompts(device, 421), MASSES, says_row_lse=lambda step: says[step])
    got, wanted = captures.steps(*cut(0, *edges))
    captures.fetch()
    assert len(got) == 3
    for ours, theirs in zip(got, wanted, strict=True):
        mass, exact = (decode_mass(one.mass) for one in (fetched(ours), exactly(theirs)))
        assert float((mass - exact).norm() / exact.norm()) < 3e-2, "keys are rounded, sums are not"


def tiles_by_place(one: AttentionMap) -> dict[tuple[int, int, int], torch.Tensor]:
    """(head, block row, column) -> values."""
    tiles, found = one.tiles, {}
    assert tiles is not None
    for head, indptr in enumerate(tiles.indptr.tolist()):
        for row, (begin, end) in enumerate(itertools.pairwise(indptr)):
            for tile in range(begin, end):
                found[head, row, int(tiles.indices[tile])] = tiles.values[tile]
    return found


@pytest.mark.parametrize("want", [LayerWant(), LayerWant(tile_top_p=0.7, tile_dtype="bf16")], ids=["masses", "tiles"])
def test_all_heads(device: torch.device, want: LayerWant) -> None:
    captures = Captures(Prompts(device, 128), want)
    (got,), (wanted,) = captures.step(Rows(0, 0, 128))
    captures.fetch()
    exact = exactly(wanted)
    if exact.tiles is None:
        check_map(fetched(got), exact)
        return
    ours = fetched(got).tiles
    assert ours is not None and torch.equal(ours.indices, exact.tiles.indices)
    torch.testing.assert_close(ours.values, exact.tiles.values, rtol=2**-7, atol=1e-4)


@EITHER
def test_several_requests_in_a_step(device: torch.device, want: LayerWant) -> None:
    """One starts, one goes on inside a block row, one ends: lengths and cuts differ."""
    captures = Captures(Prompts(device, 300, 150, 128), want)
    done = captures.run(
        [Rows(0, 0, 200)],
        [Rows(1, 0, 70), Rows(0, 200, 250)],
        [Rows(2, 0, 128), Rows(0, 250, 300), Rows(1, 70, 150)],
    )
    assert len(done) == 4


@EITHER
def test_rows_that_were_never_computed_are_marked(device: torch.device, want: LayerWant) -> None:
    captures = Captures(Prompts(device, 384), want)
    done = captures.run([Rows(0, 160, 384)])
    assert [fetched(item).row_counts.tolist() for item in done] == [[0, BLOCK], [BLOCK, BLOCK]]


@EITHER
@pytest.mark.parametrize("edges", [[(0, 100), (0, 200), (200, 256)], [(0, 100), (128, 256)], [(0, 230), (64, 256)]])
def test_rows_run_again_after_a_preemption(
    device: torch.device, want: LayerWant, edges: Sequence[tuple[int, int]]
) -> None:
    captures = Captures(Prompts(device, 256), want)
    captures.run(*([Rows(0, begin, end)] for begin, end in edges))


@EITHER
@pytest.mark.parametrize("overlap", [0, 4])
def test_the_next_turn_goes_on_from_an_unfinished_chunk(device: torch.device, want: LayerWant, overlap: int) -> None:
    """Two turns go on from the same one; neither changes what the other starts from."""
    captures = Captures(Prompts(device, 212, 300, 400, same_start=True), want)
    first = captures.run([Rows(0, 0, 212, keep=b"kept")])
    captures.end("0")
    begin = 212 - overlap
    turns = [captures.run([Rows(turn, begin, captures.prompts.lengths[turn], resume=b"kept")]) for turn in (1, 2)]
    assert [item.chunk.index for item in first] == [0]
    assert [[item.chunk.index for item in turn] for turn in turns] == [[1], [1, 2]]
    assert all(bool(fetched(item).measured.all()) for turn in turns for item in turn)


@EITHER
def test_a_full_buffer_costs_maps_and_nothing_else(device: torch.device, want: LayerWant) -> None:
    captures = Captures(Prompts(device, 384), want)
    rest = captures.buffer.take(captures.buffer.num_bytes, captures.buffer.num_bytes)
    assert isinstance(rest, Room)
    assert captures.step(Rows(0, 0, 200))[0] == []
    assert captures.counters.get("publish_dropped", "capture_busy") == 2
    del rest
    got, wanted = captures.step(Rows(0, 200, 384))
    captures.fetch()
    if want.tile_top_p:
        assert got == [], "behind a chunk that lacks a layer none is of use"
        return
    assert [item.chunk.index for item in got] == [1, 2]
    assert [fetched(item).row_counts.tolist() for item in got] == [[0, BLOCK], [BLOCK, BLOCK]]
    check_map(fetched(got[-1]), exactly(wanted[-1]))


class Event:
    """Of a GPU that has come so far, or not."""

    is_done = False

    def query(self) -> bool:
        return self.is_done


def test_waits_for_room_while_the_gpu_has_work(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    captures = Captures(Prompts(device, 512), MASSES)
    ready: list[Event] = []

    def record() -> Event:
        ready.append(Event())
        return ready[-1]

    monkeypatch.setattr(captures.buffer, "ready", record)
    monkeypatch.setattr(captures.buffer, "looking", lambda ready: contextlib.nullcontext())
    for step in range(2):
        assert captures.step(Rows(0, 128 * step, 128 * step + 128))[0] != []
    captures.fetch()
    rest = [captures.buffer.take(0, captures.buffer.num_bytes)]

    def give_back(seconds: float) -> None:
        assert captures.kernels.spares_time(), "the publisher's threads may run"
        rest.clear()

    monkeypatch.setattr(piece_store.time, "sleep", give_back)
    assert not captures.kernels.spares_time()
    assert captures.step(Rows(0, 256, 384))[0] != [] and not rest, "waited, as the GPU was two pieces behind"
    captures.fetch()
    rest = [captures.buffer.take(0, captures.buffer.num_bytes)]
    monkeypatch.setattr(piece_store.time, "sleep", lambda seconds: setattr(ready[1], "is_done", True))
    assert captures.step(Rows(0, 384, 512))[0] == [] and ready[1].is_done, "waited no longer than the GPU was busy"
    assert captures.counters.get("publish_dropped", "capture_busy") == 1


def test_spares_time_with_four_pieces_launched(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    captures = Captures(Prompts(device, 512), MASSES)
    ready: list[Event] = []
    monkeypatch.setattr(captures.buffer, "ready", lambda: ready.append(Event()) or ready[-1])
    spared = []
    for step in range(5):
        captures.step(Rows(0, 0, 128, name=str(step)))
        spared.append(captures.kernels.spares_time())
    assert spared == [False, False, False, True, True]
    ready[1].is_done = True
    assert not captures.kernels.spares_time()


def test_a_busy_thread_costs_maps_and_no_room(device: torch.device) -> None:
    captures = Captures(Prompts(device, 256), MASSES)
    captures.accepts = False
    assert captures.step(Rows(0, 0, 256))[0] == []
    assert captures.counters.get("publish_dropped", "capture_busy") == 2
    assert captures.buffer.take(captures.buffer.num_bytes, captures.buffer.num_bytes) is not None


def test_tiles_beyond_their_room(device: torch.device) -> None:
    """Room for the first chunk and a part of the second, which does without; other layers leave it out at once."""
    captures = Captures(Prompts(device, 256), LayerWant(tile_top_p=1.0), buffer_bytes=4 * 15 * BLOCK**2)
    got, wanted = captures.step(Rows(0, 0, 256))
    captures.fetch()
    check_map(fetched(got[0]), exactly(wanted[0]))
    assert not isinstance(got[1].map, HostBlob) and got[1].map.source() is None
    assert captures.counters.get("publish_dropped", "capture_busy") == 1
    assert [item.chunk.index for item in captures.step(Rows(0, 0, 256))[0]] == [0]
    captures.end("0")
    assert [item.chunk.index for item in captures.step(Rows(0, 0, 256))[0]] == [0, 1]


@pytest.mark.filterwarnings("ignore:All-NaN")
def test_queries_that_are_not_numbers(device: torch.device) -> None:
    """The block row that they are in is not measured, others are."""
    prompts = Prompts(device, 128)
    prompts.queries[0][70] = torch.nan
    captures = Captures(prompts, MASSES)
    captures.reference.measure = lambda *rest: []  # type: ignore[method-assign]
    (item,), _ = captures.step(Rows(0, 0, 128))
    captures.fetch()
    assert fetched(item).row_counts.tolist() == [BLOCK, 0]
