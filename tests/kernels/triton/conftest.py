"""The Triton kernels: in Triton's interpreter on a CPU, compiled on a GPU (then every test here is marked `gpu`)."""

from __future__ import annotations

import dataclasses
import importlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")
np = pytest.importorskip("numpy")

import triton.language as tl  # noqa: E402
from triton.runtime import interpreter  # noqa: E402

ON_GPU = torch.cuda.is_available()


def _convert_float(data: Any, source: Any, target: Any, rounding: Any) -> Any:
    """Bits of `data` as `target`, rounded to nearest even, e4m3 saturating: what the GPU does.

    Triton's own cuts bf16 off, and loses the carry of an e4m3 significand that rounds up to the next power of two.
    """
    dtypes = {tl.float32: torch.float32, tl.float16: torch.float16, tl.bfloat16: torch.bfloat16}
    dtypes[tl.float8e4nv] = torch.float8_e4m3fn
    bits = torch.from_numpy(np.array(data).view(f"uint{source.primitive_bitwidth}"))
    values = bits.view(dtypes[source]).float()
    if target == tl.float8e4nv:
        values = values.clamp(-448.0, 448.0)
    return values.to(dtypes[target]).view(getattr(torch, f"uint{target.primitive_bitwidth}")).numpy()


def _widened(handle: Any) -> Any:
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    data = _convert_float(handle.data, tl.bfloat16, tl.float32, None).view(np.float32)
    return interpreter.TensorHandle(data, tl.float32)


def _use_interpreter() -> None:
    """Before any kernel is imported. The environment stays as it is: child processes are not meant."""
    triton.knobs.propagate_env = False  # or it would set the variable
    triton.knobs.runtime.interpret = True
    triton.knobs.propagate_env = True
    assert "TRITON_INTERPRET" not in os.environ
    importlib.reload(tl.standard)  # tl.sum and its like were decorated when Triton was imported
    importlib.reload(tl)
    interpreter._convert_float = _convert_float
    dot = interpreter.InterpreterBuilder.create_dot  # multiplies the bits of bf16 operands as integers

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, _widened(a), _widened(b), *rest)

    interpreter.InterpreterBuilder.create_dot = create_dot


if not ON_GPU:
    _use_interpreter()

from mapflow.kernels.attention_map import AttentionMap  # noqa: E402
from mapflow.kernels.block_rows import BlockIndex, BlockRows, ChunkSpan  # noqa: E402
from mapflow.kernels.compress_reference import assemble_chunk, compress_rows  # noqa: E402
from mapflow.kernels.guide import _guide_kernel  # noqa: E402
from mapflow.kernels.paged import PagedKV  # noqa: E402
from mapflow.kernels.row_segment import RowSegment  # noqa: E402

assert ON_GPU or isinstance(_guide_kernel, interpreter.InterpretedFunction), "a kernel was imported before this file"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if ON_GPU and item.path.parent == Path(__file__).parent:
            item.add_marker("gpu")


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if ON_GPU else torch.device("cpu")


if ON_GPU:

    @pytest.fixture(autouse=True)
    def _one_thread() -> None:
        """Unlike elsewhere: what is expected of large shapes is computed on all cores."""


@pytest.fixture(autouse=True)
def _quiet_numpy() -> Iterator[None]:
    """The interpreter computes both sides of a `tl.where`."""
    with np.errstate(all="ignore"):
        yield


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """Requests packed with gaps between their rows; whatever nobody may read is NaN."""

    requests: Sequence[Any]  # `Dense`, on the CPU, already rounded
    host_kv: PagedKV
    host_segments: Sequence[RowSegment]
    kv: PagedKV
    segments: Sequence[RowSegment]
    query: torch.Tensor
    device: torch.device

    @property
    def scale(self) -> float:
        return float(self.requests[0].scale)

    @property
    def group(self) -> int:
        return self.query.shape[1] // self.kv.num_kv_heads

    @property
    def num_rows(self) -> int:
        return self.query.shape[0]

    def rows(self, block: int, *, chunk_blocks: int = 1, spans: Sequence[ChunkSpan] | None = None) -> BlockRows:
        size: dict[str, Any] = {"block": block, "num_batch_rows": self.num_rows, "device": self.device}
        return BlockRows.from_segments(self.segments, chunk_blocks=chunk_blocks, spans=spans, **size)

    def poisoned(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """An `out` of NaN."""
        return torch.full_like(self.query, torch.nan, dtype=dtype)

    def random_masks(self, block: int, density: float, seed: int = 0) -> list[torch.Tensor]:
        """bool [heads, R, C] of each request: causal, the diagonal kept."""
        generator = torch.Generator().manual_seed(seed)
        masks = []
        for segment in self.segments:
            block_rows = segment.block_rows(block)
            shape = (self.query.shape[1], len(block_rows), block_rows.stop)
            rows, columns = torch.arange(block_rows.start, block_rows.stop)[:, None], torch.arange(block_rows.stop)
            kept = (torch.rand(shape, generator=generator) < density) & (columns < rows)
            masks.append(kept | (columns == rows))
        return masks

    def index(self, rows: BlockRows, masks: Sequence[torch.Tensor]) -> BlockIndex:
        """The masks as lists; what lies behind a count is absurd."""
        num_heads = masks[0].shape[0]
        columns = torch.full((rows.num_lines, num_heads, rows.num_columns), 2**20, dtype=torch.int32)
        counts = torch.zeros(rows.num_lines, num_heads, dtype=torch.int32)
        for line, (request, block_row) in enumerate(rows.lines[:, :2].tolist()):
            kept = masks[request][:, block_row - self.segments[request].block_rows(rows.block).start]
            for head in range(num_heads):
                found = kept[head].nonzero()[:, 0]
                columns[line, head, : len(found)], counts[line, head] = found.int(), len(found)
        return BlockIndex(columns=columns.to(self.device), counts=counts.to(self.device))

    def masks(self, rows: BlockRows, index: BlockIndex) -> list[torch.Tensor]:
        """The lists as masks; checks that they ascend and end at the diagonal."""
        columns, counts = index.columns.cpu(), index.counts.cpu()
        masks = []
        for segment in self.segments:
            block_rows = segment.block_rows(rows.block)
            masks.append(torch.zeros(columns.shape[1], len(block_rows), block_rows.stop, dtype=torch.bool))
        for line, (request, block_row) in enumerate(rows.lines[:, :2].tolist()):
            own_row = block_row - self.segments[request].block_rows(rows.block).start
            for head in range(columns.shape[1]):
                kept = columns[line, head, : int(counts[line, head])].long()
                assert bool((kept.diff() > 0).all()) and int(kept[0]) >= 0 and int(kept[-1]) == block_row
                masks[request][head, own_row, kept] = True
        return masks

    def attention(self, masks: Sequence[torch.Tensor], block: int) -> list[torch.Tensor]:
        """float64 [rows, heads, head_dim] of each request."""
        wanted = []
        for one, mask, segment in zip(self.requests, masks, self.segments):
            wide = mask.repeat_interleave(block, 1).repeat_interleave(block, 2)
            skip = segment.row_begin - segment.block_rows(block).start * block
            kept = wide[:, skip : skip + segment.num_rows, : segment.row_end]
            wanted.append(one.output(one.probabilities(kept)))
        return wanted

    def check(self, out: torch.Tensor, wanted: Sequence[torch.Tensor], bound: float) -> None:
        """Every request within `bound` (relative norm), and the rows of nobody still NaN."""
        host, untouched = out.cpu(), torch.ones(self.num_rows, dtype=torch.bool)
        for segment, one in zip(self.segments, wanted):
            got = host[segment.batch_rows].double()
            assert bool(got.isfinite().all())
            assert relative_error(got, one) < bound
            untouched[segment.batch_rows] = False
        assert bool(untouched.any()) and bool(host[untouched].isnan().all())


def relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Norm of the difference over the norm of what is wanted."""
    return float((got.double().cpu() - wanted.double().cpu()).norm() / wanted.double().cpu().norm())


@pytest.fixture(scope="session")
def error_of() -> Callable[[torch.Tensor, torch.Tensor], float]:
    return relative_error


@pytest.fixture(scope="session")
def make_batch(make_dense: Callable[..., Any], device: torch.device) -> Callable[..., Batch]:
    """Requests with the token rows of `spans`.

    layout: "plain", "tokens first" (heads within a token), or "joined" (K and V in one row).
    """

    def make(
        *spans: tuple[int, int],
        group: int = 2,
        kv_heads: int = 2,
        head_dim: int = 64,
        dtype: torch.dtype = torch.bfloat16,
        page_size: int = 16,
        layout: str = "plain",
        sharpness: float = 2.0,
        seed: int = 0,
        edit: Callable[[Any], None] | None = None,
        gap: int = 3,
    ) -> Batch:
        size: dict[str, Any] = {"heads": group * kv_heads, "kv_heads": kv_heads, "head_dim": head_dim}
        requests = []
        for request, (begin, end) in enumerate(spans):
            one = make_dense(rows=end - begin, first_row=begin, seed=seed + request, sharpness=sharpness, **size)
            rounded = {name: getattr(one, name).to(dtype) for name in ("query", "key", "value")}
            requests.append(dataclasses.replace(one, **rounded))
            if edit is not None:
                edit(requests[-1])
        pages = [-(-end // page_size) for _, end in spans]
        total = sum(pages) * 2 + 3
        if layout == "joined":
            cache = torch.full((total, page_size, kv_heads, 2 * head_dim), torch.nan, dtype=dtype).transpose(1, 2)
            keys, values = cache[..., :head_dim], cache[..., head_dim:]
        elif layout == "tokens first":
            keys = torch.full((total, page_size, kv_heads, head_dim), torch.nan, dtype=dtype).transpose(1, 2)
            values = keys.clone()
        else:
            keys = torch.full((total, kv_heads, page_size, head_dim), torch.nan, dtype=dtype)
            values = keys.clone()
        order = torch.randperm(total, generator=torch.Generator().manual_seed(seed)).int()
        query = torch.full(
            (sum(end - begin + gap for begin, end in spans) + gap, group * kv_heads, head_dim), torch.nan
        )
        query, row, first_page, segments = query.to(dtype), gap, 0, []
        for one, count, (begin, end) in zip(requests, pages, spans):
            table = order[first_page : first_page + count + 1]  # one page more than it has filled
            first_page += count
            for place, page in enumerate(table[:count].tolist()):
                tokens = slice(place * page_size, min(end, (place + 1) * page_size))
                keys[page, :, : tokens.stop - tokens.start] = one.key[tokens].transpose(0, 1)
                values[page, :, : tokens.stop - tokens.start] = one.value[tokens].transpose(0, 1)
            segments.append(RowSegment(row_begin=begin, row_end=end, out_begin=row, block_table=table))
            query[row : row + end - begin] = one.query
            row += end - begin + gap
        kv = PagedKV(key_cache=keys, value_cache=values)
        if layout == "joined":
            moved = cache.transpose(1, 2).to(device).transpose(1, 2)
            device_kv = PagedKV(key_cache=moved[..., :head_dim], value_cache=moved[..., head_dim:])
        else:
            device_kv = PagedKV(key_cache=keys.to(device), value_cache=values.to(device))
        return Batch(
            requests=requests,
            host_kv=kv,
            host_segments=segments,
            kv=device_kv,
            segments=[dataclasses.replace(one, block_table=one.block_table.to(device)) for one in segments],
            query=query.to(device),
            device=device,
        )

    return make


@pytest.fixture(scope="session")
def make_maps(make_dense: Callable[..., Any]) -> Callable[..., list[AttentionMap]]:
    """Chunks [first_chunk, end_chunk) of a sender's layer."""

    def make(
        *,
        end_chunk: int,
        first_chunk: int = 0,
        heads: int = 3,
        block: int = 64,
        chunk_blocks: int = 2,
        tile_dtype: torch.dtype | None = torch.float8_e4m3fn,
        p: float = 0.6,
        seed: int = 50,
    ) -> list[AttentionMap]:
        chunk_tokens = block * chunk_blocks
        first_row, rows = first_chunk * chunk_tokens, (end_chunk - first_chunk) * chunk_tokens
        one = make_dense(rows=rows, first_row=first_row, heads=heads, kv_heads=1, seed=seed, sharpness=6.0)
        tiles: dict[str, Any] = {} if tile_dtype is None else {"top_p": p, "tile_dtype": tile_dtype}
        part = compress_rows(one.query, one.key, first_row=first_row, block=block, scale=one.scale, **tiles)
        size: dict[str, Any] = {"chunk_tokens": chunk_tokens, "block": block, "num_heads": heads}
        return [assemble_chunk([part], chunk_index=chunk, **size) for chunk in range(first_chunk, end_chunk)]

    return make


@dataclasses.dataclass(frozen=True)
class Shape:
    spans: list[tuple[int, int]]
    block: int
    density: float
    options: dict[str, Any]  # of `make_batch`


@pytest.fixture(scope="session")
def random_shape() -> Callable[[int], Shape]:
    """A shape for each seed; a GPU gets longer prompts and more heads."""

    def draw(seed: int) -> Shape:
        random = np.random.default_rng(seed)
        block = int(random.choice([64, 128]))
        spans = []
        for _ in range(int(random.integers(1, 4 if ON_GPU else 3))):
            begin = int(random.integers(0, (5 if ON_GPU else 2) * block))
            spans.append((begin, begin + int(random.integers(1, (4 if ON_GPU else 2) * block))))
        options = {
            "group": int(random.choice([1, 2, 3, 4, 8] if ON_GPU else [1, 2, 3])),
            "kv_heads": int(random.choice([1, 2, 4] if ON_GPU else [1, 2])),
            "head_dim": int(random.choice([64, 128])),
            "dtype": [torch.bfloat16, torch.float16][int(random.integers(2))],
            "page_size": int(random.choice([16, 32, 128])),
            "layout": str(random.choice(["plain", "tokens first", "joined"])),
            "seed": seed,
        }
        return Shape(spans, block, float(random.choice([0.0, 0.3, 1.0])), options)

    return draw
