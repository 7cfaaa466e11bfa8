"""What the TTFT benchmark needs on disk and in the daemon: models by shape, plans, and synthetic maps of a density.

The weights are random (time does not depend on them), so real maps would say nothing; those made here keep the first
block, the diagonal, its neighbour and random others until each row has its share, the same in every layer.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from kernel_inputs import keep_blocks
from safetensors.torch import save_file

from mapflow.connector.client import Client
from mapflow.connector.messages import Kind, PendingBlob, Producer
from mapflow.connector.model_identity import model_id
from mapflow.connector.namespace import Namespace
from mapflow.connector.plan import LayerPlan, Mode, ModelSpec, Plan
from mapflow.connector.tokenizer import tokenizer_fingerprint
from mapflow.connector.vllm.map_identity import map_identity
from mapflow.kernels import blob_layout
from mapflow.kernels.attention_map import AttentionMap, TileSet
from mapflow.kernels.blob_writer import blob_num_bytes, seal, write_blob

TOKENIZER = Path(__file__).parents[1] / "examples" / "pair" / "receiver"
KEPT = 0.9999  # top-p over masses that are 0 or all alike: every block with a mass


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Of a Qwen3 model."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int = 128

    @property
    def config(self) -> dict[str, Any]:
        """`config.json`."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "dtype": "bfloat16",
            "hidden_act": "silu",
            "vocab_size": 151936 if self.hidden > 512 else 4096,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 131072,
            "rope_theta": 1e6,
            "tie_word_embeddings": False,
            "attention_bias": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }


SHAPES = {
    "qwen3-8b": Shape(layers=36, hidden=4096, intermediate=12288, heads=32, kv_heads=8),
    "qwen3-1.7b": Shape(layers=28, hidden=2048, intermediate=6144, heads=16, kv_heads=8),
    "tiny": Shape(layers=4, hidden=128, intermediate=256, heads=4, kv_heads=2, head_dim=64),
}


def make_model(folder: Path, name: str) -> Path:
    """A model directory for `load_format="dummy"`: configuration, tokenizer, and weights that nobody loads."""
    path = folder / name
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(SHAPES[name].config))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / file, path / file)
    save_file({"none": torch.zeros(1)}, path / "model.safetensors")
    return path


def make_plan(
    sender: Path,
    receiver: Path,
    *,
    name: str,
    mode: Mode,
    first_layer: int,
    block: int,
    chunk_tokens: int,
    top_p: float = KEPT,
) -> Plan:
    """`mode` from `first_layer` on, each receiver head reading one sender head, layers spread evenly."""
    specs = [_spec(path) for path in (sender, receiver)]
    sizes = [SHAPES[path.name] for path in (sender, receiver)]
    layers, heads = sizes[1].layers, sizes[1].heads
    one_hot = torch.zeros(heads, sizes[0].heads)
    one_hot[torch.arange(heads), torch.arange(heads) % sizes[0].heads] = 1.0
    reused = range(first_layer, layers)
    of_layer = {number: number * sizes[0].layers // layers for number in reused}
    needs_map = mode in (Mode.GUIDE, Mode.TRANSLATE)
    index = one_hot.argmax(1, keepdim=True).int()
    return Plan(
        name=name,
        tokenizer_fingerprint=tokenizer_fingerprint(TOKENIZER),
        chunk_tokens=chunk_tokens,
        block=block,
        sender=specs[0],
        receiver=specs[1],
        layers=tuple(
            LayerPlan(
                mode=mode if number in of_layer else Mode.COMPUTE,
                sender_layer=of_layer.get(number) if needs_map else None,
                top_p=top_p,
            )
            for number in range(layers)
        ),
        head_map={layer: one_hot.clone() for layer in reused} if mode is Mode.GUIDE else {},
        head_index={layer: index.clone() for layer in reused} if mode is Mode.TRANSLATE else {},
        head_weight={layer: torch.ones(heads, 1) for layer in reused} if mode is Mode.TRANSLATE else {},
    )


def _spec(path: Path) -> ModelSpec:
    name, revision = model_id(path)
    shape = SHAPES[path.name]
    return ModelSpec(
        name=name,
        revision=revision,
        num_layers=shape.layers,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
    )


def make_prompt(tokens: int, seed: int) -> list[int]:
    """Token ids that no other seed shares a chunk with."""
    ids: list[int] = np.random.default_rng(seed).integers(10, 4000, tokens).tolist()
    return ids


def publish(
    client: Client, namespace: Namespace, producer: Producer, plan: Plan, prompt: Sequence[int], density: float
) -> int:
    """Publish synthetic maps of a prompt in every sender layer that the plan reads; returns their bytes."""
    keys = namespace.chunk_keys(prompt)
    rows = plan.chunk_tokens // plan.block
    kept = keep_blocks(plan.sender.num_heads, len(keys) * rows, density, seed=1, device="cpu")
    with_tiles = any(layer.mode is Mode.TRANSLATE for layer in plan.layers)
    total = 0
    for chunk, key in enumerate(keys):
        data = _blob(kept[:, chunk * rows : (chunk + 1) * rows, : (chunk + 1) * rows], chunk, plan.block, with_tiles)
        parent = keys[chunk - 1] if chunk else b""
        blobs = [_pending(data, key, parent, layer, producer) for layer in plan.map_layers]
        report = client.publish(Kind.MAP, producer.id, blobs)
        if report.no_room:
            raise RuntimeError(f"the daemon has no room for {report.no_room} maps; give it a larger arena")
        total += len(data) * len(blobs)
    return total


def _blob(mask: torch.Tensor, chunk: int, block: int, with_tiles: bool) -> bytearray:
    tiles = None
    if with_tiles:
        ends = mask.sum(-1).flatten().cumsum(0).view(mask.shape[:2]).int()
        starts = torch.cat([torch.zeros(1, dtype=torch.int32), ends[:-1, -1]])
        bits = torch.randint(0, 0x30, (int(ends[-1, -1]), block, block), dtype=torch.uint8)
        tiles = TileSet(
            indptr=torch.cat([starts[:, None], ends], dim=1),
            indices=mask.nonzero()[:, 2].int(),
            values=bits.view(torch.float8_e4m3fn),
        )
    one = AttentionMap(
        chunk_index=chunk,
        block=block,
        mass=mask.to(torch.uint8) * 64,
        row_counts=torch.full((mask.shape[1],), block, dtype=torch.int32),
        tiles=tiles,
    )
    data = bytearray(blob_num_bytes(one))
    write_blob(one, data)
    return data


def _pending(data: bytearray, key: bytes, parent: bytes, layer: int, producer: Producer) -> PendingBlob:
    """The same bytes as those of another entry: identity and checksum are its own."""
    header = blob_layout.Header.unpack(bytes(data[: blob_layout.HEADER_BYTES]))
    prologue = np.frombuffer(data, dtype=np.uint8, count=header.prologue_bytes).copy()
    seal(prologue, map_identity(key, producer.id, layer))

    def write(buffer: memoryview) -> int:
        buffer[len(prologue) : len(data)] = data[len(prologue) :]
        buffer[: len(prologue)] = prologue.data
        return len(data)

    return PendingBlob(key=key, parent_key=parent, layer=layer, num_bytes=len(data), write=write)
