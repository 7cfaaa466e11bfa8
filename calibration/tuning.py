"""Tunes the head weights of translating layers to what counts: the receiver's own next-token distributions.

Least squares (`layer_map.py`) fits each layer by itself, to attention outputs that no other layer has touched. Here all
layers reuse at once, as they will when they serve, and the KL divergence of the receiver's distributions from those
without reuse is differentiated through them to the weights alone; both models stay as they are. Adam (Kingma and Ba,
2015) with a rate that falls to zero; what did best on texts that are not tuned on is kept.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from mapflow.calibration.attention import AttentionCall, ObservedModel
from mapflow.calibration.progress import Progress, ProgressCallback
from mapflow.calibration.quality import kl_divergence
from mapflow.calibration.reuse import LayerRecord, Recorder, stored_tiles
from mapflow.connector.plan import Mode, Plan
from mapflow.kernels.tile_codec import TILE_DTYPE_BY_NAME, decode_tiles
from mapflow.kernels.top_p import select_top_p
from mapflow.kernels.translate_reference import dense_head_weights

_LEAST_STEPS_BETWEEN_CHECKS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningConfig:
    """How head weights are tuned.

    Attributes:
        steps: of the optimiser, one piece of a text each.
        rate: Adam's, at the beginning.
        max_tokens: longer texts are cut into pieces of so many tokens, whose maps are kept whole.
        max_pieces: pieces used at most, the first of every text before the second of any.
        from_share: share of a piece's first rows that do not count: little is left out there, so errors are small.
    """

    steps: int
    rate: float = 0.02
    max_tokens: int = 1024
    max_pieces: int = 16
    from_share: float = 0.25


class _Piece:
    """A piece of a text and the sender's tiles of it: on the GPU while half of its memory is free, else on the host.

    tiles: by receiver layer, stored dtype [num sender heads, num_rows, num_rows].
    """

    def __init__(self, plan: Plan, sender: ObservedModel, ids: Sequence[int], config: TuningConfig) -> None:
        self.ids = list(ids)
        self.start = int(config.from_share * len(self.ids))
        recorder = Recorder(frozenset(plan.map_layers), num_rows=len(self.ids), block=plan.block)
        sender.run(self.ids, recorder)
        self.tiles = {
            number: _all_tiles(recorder.records[sender_layer], layer.top_p, plan.block, plan.tile_dtype)
            for number, layer in enumerate(plan.layers)
            if layer.mode is Mode.TRANSLATE and (sender_layer := layer.sender_layer) is not None
        }


def pieces(texts: Sequence[Sequence[int]], block: int, config: TuningConfig) -> list[Sequence[int]]:
    """What is run of these texts: pieces of whole blocks, but none that is less than half of the longest."""
    size = config.max_tokens // block * block
    longest = max((len(ids) // block * block for ids in texts), default=0)
    least = max(min(size, longest) // 2, block)
    starts = range(0, longest, size)
    cut = (ids[start : start + min(size, (len(ids) - start) // block * block)] for start in starts for ids in texts)
    return [piece for piece in cut if len(piece) >= least][: config.max_pieces]


def _all_tiles(record: LayerRecord, top_p: float, block: int, dtype: str) -> torch.Tensor:
    """The tiles that a sender keeps, zeros elsewhere: stored dtype [num_heads, num_rows, num_rows]."""
    kept = select_top_p(record.mass, top_p, first_block_row=0)
    size = kept.shape[-1] * block
    shape, stored = (record.call.num_heads, size, size), TILE_DTYPE_BY_NAME[dtype]
    device = kept.device if _has_room(kept.device, math.prod(shape) * stored.itemsize) else torch.device("cpu")
    tiles = torch.zeros(shape, dtype=stored, device=device)
    for row in range(kept.shape[1]):
        begin, end = row * block, (row + 1) * block
        tiles[:, begin:end, :end] = stored_tiles(record, kept, row, block, dtype).to(device)
    return tiles


def _has_room(device: torch.device, num_bytes: int) -> bool:
    """Whether half of a GPU's memory stays free beside so many bytes: steps need some, too."""
    if device.type != "cuda":
        return False
    free, total = torch.cuda.mem_get_info(device)
    return free - num_bytes > total // 2


class _Translated:
    """An `AttentionHandler`: translating layers read fixed tiles with weights that can be differentiated."""

    def __init__(self, tiles: Mapping[int, torch.Tensor], weights: Mapping[int, torch.Tensor]) -> None:
        """weights: by receiver layer, f32 [num_heads, num sender heads]."""
        self._tiles, self._weights = tiles, weights

    def attend(self, call: AttentionCall) -> torch.Tensor:
        if call.layer not in self._tiles:
            return call.output()
        maps = decode_tiles(self._tiles[call.layer].to(call.value.device))  # [S, rows, rows]
        heads, rows = maps.shape[:2]
        values = call.value.float().transpose(0, 1)  # [rows, num_kv_heads, value_dim]
        features = (maps.flatten(0, 1) @ values.flatten(1)).view(heads, rows, *values.shape[1:])
        weight = self._weights[call.layer].view(values.shape[1], -1, heads)
        mixed = torch.einsum("gus,srgd->gurd", weight, features)
        return mixed.flatten(0, 1).to(call.value.dtype)


def tune(
    plan: Plan,
    sender: ObservedModel,
    receiver: ObservedModel,
    texts: Sequence[Sequence[int]],
    held_out: Sequence[Sequence[int]],
    config: TuningConfig,
    report: ProgressCallback = lambda progress: None,
) -> Plan:
    """The plan with tuned head weights; layers that do not translate compute meanwhile and stay as they are.

    Args:
        plan: which sender heads each head reads stays as it is.
        sender, receiver: the models.
        texts: token ids, a piece of one is a step, over and over.
        held_out: token ids of texts that decide which weights are kept.
        report: told how far it is, and the KL on `held_out` whenever it was measured.
    """
    if not plan.head_weight or config.steps < 1:
        return plan
    tuned, judges = (
        [_Piece(plan, sender, ids, config) for ids in pieces(of_kind, plan.block, config)]
        for of_kind in (texts, held_out)
    )
    device = receiver.device
    weights = {n: weight.detach().clone().to(device).requires_grad_() for n, weight in plan.head_weight.items()}
    index = {number: one.to(device) for number, one in plan.head_index.items()}

    def divergence(piece: _Piece) -> torch.Tensor:
        heads = plan.sender.num_heads
        dense = {number: dense_head_weights(index[number], weight, heads) for number, weight in weights.items()}
        exact = receiver.run(piece.ids, Recorder(frozenset(), num_rows=0, block=1), logits_from=piece.start)
        logits = receiver.run_for_gradients(piece.ids, _Translated(piece.tiles, dense), logits_from=piece.start)
        return kl_divergence(exact.log_softmax(-1).clone(), logits.log_softmax(-1)).mean()

    def judged() -> float:
        with torch.no_grad():
            return float(torch.stack([divergence(piece) for piece in judges]).mean())

    def tell(step: int, kl: float) -> None:
        left_s = (time.monotonic() - started) / step * (config.steps - step) if step else None
        note = f"head weights, step {step}: KL {kl:.4f} with every layer translated, on texts that are not tuned on"
        report(Progress(done=step, total=config.steps, stage="tuning", remaining_s=left_s, note=note))

    optimiser = torch.optim.Adam(weights.values(), lr=config.rate, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LinearLR(optimiser, 1.0, 0.0, config.steps)
    started = time.monotonic()
    best, kept = judged(), {number: one.detach().clone() for number, one in weights.items()}
    tell(0, best)
    every = max(_LEAST_STEPS_BETWEEN_CHECKS, len(tuned))
    for step in range(1, config.steps + 1):
        optimiser.zero_grad()
        torch.autograd.backward(divergence(tuned[(step - 1) % len(tuned)]))
        optimiser.step()
        schedule.step()
        if step % every == 0 or step == config.steps:
            found = judged()
            tell(step, found)
            if found < best:
                best, kept = found, {number: one.detach().clone() for number, one in weights.items()}
    return replace(plan, head_weight={number: one.cpu() for number, one in kept.items()})
