"""The Llama architecture in plain torch, with Hugging Face's parameter names, and its export as a model directory.

For training only: no cache, no sampling. Inference is left to transformers and vLLM; `export` writes what they read.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

ROPE_THETA = 100_000.0
NORM_EPS = 1e-5
CONTEXT = 8192  # tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of one model; `head_dim` is free of `hidden / num_heads`."""

    hidden: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    mlp: int
    head_dim: int = 64
    vocabulary: int = 4096

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} is no multiple of num_kv_heads {self.num_kv_heads}")


SHAPES = {
    "sender": Shape(hidden=192, num_layers=6, num_heads=6, num_kv_heads=2, mlp=352),
    "receiver": Shape(hidden=128, num_layers=5, num_heads=4, num_kv_heads=2, mlp=256),
    "larger-sender": Shape(hidden=512, num_layers=12, num_heads=8, num_kv_heads=2, mlp=1408),  # 36 M parameters
    "larger-receiver": Shape(hidden=448, num_layers=10, num_heads=4, num_kv_heads=2, head_dim=128, mlp=1216),  # 25 M
}


def rope_table(length: int, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin f32 [length, head_dim / 2]."""
    inverse = ROPE_THETA ** (-torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim)
    angle = torch.arange(length, device=device, dtype=torch.float32)[:, None] * inverse
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [batch, heads, length, head_dim], halves paired as Hugging Face pairs them."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class RMSNorm(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + NORM_EPS)).to(x.dtype) * self.weight


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        width, kv_width = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, width, bias=False)
        self.k_proj = nn.Linear(shape.hidden, kv_width, bias=False)
        self.v_proj = nn.Linear(shape.hidden, kv_width, bias=False)
        self.o_proj = nn.Linear(width, shape.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        dim, group = self.shape.head_dim, self.shape.num_heads // self.shape.num_kv_heads
        q = rotate(self.q_proj(x).view(batch, length, -1, dim).transpose(1, 2), cos, sin)
        k = rotate(self.k_proj(x).view(batch, length, -1, dim).transpose(1, 2), cos, sin)
        v = self.v_proj(x).view(batch, length, -1, dim).transpose(1, 2)
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)  # [batch, heads, length, head_dim]
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))


class MLP(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.mlp, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.mlp, bias=False)
        self.down_proj = nn.Linear(shape.mlp, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = MLP(shape)
        self.input_layernorm = RMSNorm(shape.hidden)
        self.post_attention_layernorm = RMSNorm(shape.hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_layers))
        self.norm = RMSNorm(shape.hidden)


class Llama(nn.Module):
    """Decoder with tied embeddings."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Decoder(shape)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                narrow = name.endswith(("o_proj.weight", "down_proj.weight"))
                std = 0.02 if "embed" in name else (weight.shape[1] ** -0.5) / (shape.num_layers**0.5 if narrow else 1)
                nn.init.normal_(weight, std=std)

    def hidden_states(self, ids: Tensor) -> Tensor:
        """Final normed states [batch, length, hidden] of token ids [batch, length]."""
        cos, sin = rope_table(ids.shape[1], self.shape.head_dim, ids.device)
        x = self.model.embed_tokens(ids)
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        return self.model.norm(x)

    def logits(self, ids: Tensor) -> Tensor:
        """[batch, length, vocabulary]"""
        return functional.linear(self.hidden_states(ids), self.model.embed_tokens.weight)


def export(model: Llama, folder: Path, special: tuple[int, int, int]) -> None:
    """Write config.json and model.safetensors (bf16). special: ids of the begin, end and padding tokens."""
    shape = model.shape
    bos, eos, pad = special
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", "hidden_act": "silu",
        "vocab_size": shape.vocabulary, "hidden_size": shape.hidden, "intermediate_size": shape.mlp,
        "num_hidden_layers": shape.num_layers, "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads, "head_dim": shape.head_dim, "rms_norm_eps": NORM_EPS,
        "max_position_embeddings": CONTEXT, "rope_theta": ROPE_THETA, "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA},
        "attention_bias": False, "mlp_bias": False, "attention_dropout": 0.0, "initializer_range": 0.02,
        "use_cache": True, "bos_token_id": bos, "eos_token_id": eos, "pad_token_id": pad,
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    weights = {k: v.detach().to("cpu", torch.bfloat16).contiguous() for k, v in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
