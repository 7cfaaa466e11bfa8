"""Shapes and inputs of the kernel benchmark, and full attention over them by others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from mapflow.kernels.paged import PagedKV
from mapflow.kernels.row_segment import RowSegment

MODELS: dict[str, dict[str, int]] = {
    "qwen3-8b": {"q_heads": 32, "kv_heads": 8, "sender_heads": 32},
    "qwen3-1.7b": {"q_heads": 16, "kv_heads": 8, "sender_heads": 32},
    "ministral-3b": {"q_heads": 32, "kv_heads": 8, "sender_heads": 32},
}
BLOCK, HEAD_DIM, PAGE = 128, 128, 16
E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
Call = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Median, 20th and 80th percentile."""

    ms: float
    low_ms: float
    high_ms: float


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a call has to do at least."""

    flops: float
    num_bytes: float
    unit: str = "bf16"  # of the matrix products


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One prompt of one model: tensors on the GPU, made when asked for."""

    context: int
    q_heads: int
    kv_heads: int
    sender_heads: int

    @property
    def num_blocks(self) -> int:
        """Along one side of the map."""
        return self.context // BLOCK

    @property
    def causal_blocks(self) -> int:
        """Of one head."""
        return self.num_blocks * (self.num_blocks + 1) // 2

    @property
    def attention_flops(self) -> float:
        """Two products of causal attention."""
        return 2.0 * self.context**2 * HEAD_DIM * self.q_heads

    @property
    def kv_bytes(self) -> int:
        """K, or V, of the whole prompt."""
        return self.context * self.kv_heads * HEAD_DIM * 2


class Baselines:
    """Inputs of a shape, and full attention over them by others."""

    def __init__(self, shape: Shape, timed: Callable[[Call], Measured], missing: dict[str, str]) -> None:
        self.shape, self._timed, self._missing = shape, timed, missing
        length, kv_heads = shape.context, shape.kv_heads
        generator = torch.Generator("cuda").manual_seed(length)

        def normal(*size: int) -> torch.Tensor:
            return torch.randn(*size, device="cuda", dtype=BF16, generator=generator)

        self.query = normal(length, shape.q_heads, HEAD_DIM)
        self.key, self.value = normal(length, kv_heads, HEAD_DIM), normal(length, kv_heads, HEAD_DIM)
        self.out = torch.empty_like(self.query)
        pages = length // PAGE
        table = torch.randperm(pages, device="cuda", generator=generator)
        cache = torch.empty(pages, kv_heads, PAGE, 2 * HEAD_DIM, device="cuda", dtype=BF16)
        joined = torch.cat([self.key, self.value], -1).view(pages, PAGE, kv_heads, 2 * HEAD_DIM)
        cache[table] = joined.transpose(1, 2)
        self.kv = PagedKV(key_cache=cache[..., :HEAD_DIM], value_cache=cache[..., HEAD_DIM:])
        self.segment = RowSegment(row_begin=0, row_end=length, out_begin=0, block_table=table.int())

    def full_attention(self) -> dict[str, Measured]:
        """cuDNN, and FlashAttention 3 as vLLM ships it."""
        query, key, value = (x.transpose(0, 1)[None] for x in (self.query, self.key, self.value))
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            found = {
                "cudnn": self._timed(
                    lambda: scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
                )
            }
        try:
            from vllm.vllm_flash_attn import flash_attn_varlen_func
        except ImportError as error:
            self._missing["flash_attention_3"] = str(error)
            return found
        length = self.shape.context
        ends = torch.tensor([0, length], dtype=torch.int32, device="cuda")
        options = {"max_seqlen_q": length, "max_seqlen_k": length, "cu_seqlens_q": ends, "cu_seqlens_k": ends}
        found["flash_attention_3"] = self._timed(
            lambda: flash_attn_varlen_func(self.query, self.key, self.value, causal=True, fa_version=3, **options)
        )
        return found

    def flex_attention(self, density: float) -> tuple[dict[str, Any], Measured] | None:
        """FlexAttention inside the same blocks as `guide`."""
        from torch.nn.attention.flex_attention import BlockMask, flex_attention

        mask = keep_blocks(self.shape.q_heads, self.shape.num_blocks, density, seed=1)
        diagonal = torch.eye(self.shape.num_blocks, dtype=torch.bool, device="cuda").expand_as(mask)
        partial, whole = (ordered(one[None]) for one in (diagonal, mask & ~diagonal))
        try:
            blocks = BlockMask.from_kv_blocks(
                *partial,
                *whole,
                BLOCK_SIZE=BLOCK,
                mask_mod=lambda b, h, q, k: q >= k,
                seq_lengths=(self.shape.context, self.shape.context),
            )
            query, key, value = (x.transpose(0, 1)[None].contiguous() for x in (self.query, self.key, self.value))
            compiled = torch.compile(flex_attention, dynamic=False)
            measured = self._timed(lambda: compiled(query, key, value, block_mask=blocks, enable_gqa=True))
        except Exception as error:  # a compiler of another version: the table goes on without it
            self._missing["flex_attention"] = f"{type(error).__name__}: {str(error)[:200]}"
            return None
        return describe("flex_attention", "bf16", kept_share(mask)), measured


def keep_blocks(heads: int, num_blocks: int, density: float, seed: int, device: str = "cuda") -> torch.Tensor:
    """bool [heads, num_blocks, num_blocks], `density` of the causal blocks of each row, at least the diagonal."""
    generator = torch.Generator(device).manual_seed(seed)
    order = torch.rand(heads, num_blocks, num_blocks, device=device, generator=generator)
    place = torch.arange(num_blocks, device=device)
    order[:, :, 0] = 2.0
    order[:, place[1:], place[:-1]] = 3.0
    order[:, place, place] = 4.0
    causal = place[None, :] <= place[:, None]
    order.masked_fill_(~causal, -1.0)
    wanted = (density * (place + 1)).round().clamp(min=1)
    rank = order.argsort(-1, descending=True).argsort(-1)
    return (rank < wanted[None, :, None]) & causal


def kept_share(mask: torch.Tensor) -> float:
    """Of the causal blocks; blocks are whole, so not quite what was asked for."""
    heads, num_blocks, _ = mask.shape
    return round(int(mask.sum()) / (heads * num_blocks * (num_blocks + 1) / 2), 4)


def ordered(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Counts and columns (kept ones first) of a mask, i32."""
    return mask.sum(-1).int(), mask.int().sort(dim=-1, descending=True, stable=True).indices.int()


def describe(kernel: str, dtype: str, density: float, *, k: int = 0, sender_heads: int = 0) -> dict[str, Any]:
    """What a case says about itself."""
    return {"kernel": kernel, "density": density, "sender_heads": sender_heads, "k": k, "dtype": dtype}
