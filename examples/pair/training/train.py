"""Train one model of the pair for a given time and write it as a Hugging Face directory.

    python train.py --shape sender --data DIR --tokenizer DIR --out DIR --minutes 8

Learning rate: warm up, hold, fall to zero over the last part of the time. The first part of the time runs at 2,048
tokens a row, the rest at 8,192. Hidden matrices are trained with Muon, everything else with AdamW. Never evaluates
beyond a progress line: evaluate.py does.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from batches import Corpus, random_tokens, training_batch
from model import SHAPES, Llama, export
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

SECOND_PHASE_FROM = 0.55  # share of the time after which rows are long
WARMUP_STEPS, FALL_FROM = 150, 0.6
EMBEDDING_RATE = 0.5  # AdamW's learning rate against Muon's


def orthogonalised(updates: Tensor) -> Tensor:
    """Newton-Schulz iteration: updates [count, rows, columns] to about the nearest orthogonal matrices."""
    x = updates.bfloat16() if updates.is_cuda else updates.float()
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if tall else x


class Muon:
    """Momentum with orthogonalised updates, over matrices stacked by shape; updates have RMS 0.2 * lr like AdamW's."""

    def __init__(self, matrices: Sequence[Tensor], momentum: float = 0.95, decay: float = 0.02) -> None:
        shapes = {m.shape for m in matrices}
        self.stacks = [[m for m in matrices if m.shape == shape] for shape in sorted(shapes)]
        self.velocity = [torch.zeros_like(torch.stack(stack)) for stack in self.stacks]
        self.momentum, self.decay = momentum, decay

    @torch.no_grad()
    def step(self, lr: float) -> None:
        for stack, velocity in zip(self.stacks, self.velocity, strict=True):
            grads = torch.stack([m.grad for m in stack if m.grad is not None])
            velocity.lerp_(grads, 1 - self.momentum)
            update = orthogonalised(grads.lerp(velocity, self.momentum)).float()
            update *= 0.2 * max(update.shape[1:]) ** 0.5
            torch._foreach_mul_(stack, 1 - lr * self.decay)
            torch._foreach_add_(stack, list(update.unbind()), alpha=-lr)


def token_losses(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy f32 [tokens] of hidden [tokens, hidden] against targets i64 [tokens]."""
    return functional.cross_entropy(functional.linear(hidden, head.to(hidden.dtype)).float(), targets, reduction="none")


def rate(share: float, step: int) -> float:
    """Share of the peak learning rate at a share of the time."""
    return min(1.0, (step + 1) / WARMUP_STEPS) * min(1.0, max(0.0, (1 - share) / (1 - FALL_FROM)))


@torch.no_grad()
def copy_accuracy(model: Llama, strings: int, distance: int, generator: torch.Generator) -> float:
    """Share of tokens 2..64 of a random string's second copy that are predicted, `distance` tokens after the first."""
    device = model.model.embed_tokens.weight.device
    row = random_tokens(strings, distance + 64, model.shape.vocabulary, device, generator)
    row[:, distance:] = row[:, :64]
    begin = torch.ones(strings, 1, dtype=torch.long, device=device)
    predicted = model.logits(torch.cat((begin, row), dim=1))[:, distance + 1 : -1].argmax(-1)
    return (predicted == row[:, distance + 1 :]).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), required=True)
    parser.add_argument("--data", type=Path, required=True, help="folder that tokenizer.py wrote token files to")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with the tokenizer")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=8.0, help="time to train, compilation not counted")
    parser.add_argument("--batch-tokens", type=int, default=131_072)
    parser.add_argument("--lengths", type=int, nargs=2, default=(2048, 8192), help="tokens a row, in the two phases")
    parser.add_argument("--lookback-share", type=float, default=0.2, help="share of made-up rows")
    parser.add_argument("--lr", type=float, default=6e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--init", type=Path, help="model directory to continue from")
    parser.add_argument("--no-compile", action="store_true")
    options = parser.parse_args()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(options.seed)
    random.seed(options.seed)
    torch.set_float32_matmul_precision("high")
    generator = torch.Generator(device).manual_seed(options.seed)
    meta = json.loads((options.data / "meta.json").read_text())
    train = Corpus.load(options.data, "train", meta["vocabulary"], device)
    heldout = Corpus.load(options.data, "heldout", meta["vocabulary"], device)
    model = Llama(SHAPES[options.shape]).to(device)
    if options.init:
        model.load_state_dict(load_file(options.init / "model.safetensors"))
    head = model.model.embed_tokens.weight
    losses = token_losses
    if not options.no_compile:
        losses = torch.compile(token_losses, dynamic=False)
        for layer in model.model.layers:
            layer.compile(dynamic=False)
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.dim() == 1 or "embed" in name]
    muon = Muon(matrices)
    adam = torch.optim.AdamW(others, lr=options.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=device.type == "cuda")

    def batch_loss(tokens: Tensor, weights: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            hidden = model.hidden_states(tokens[:, :-1])
            each = losses(hidden.flatten(0, 1), head, tokens[:, 1:].flatten())
        return (each * weights.flatten()).sum() / weights.sum()

    @torch.no_grad()
    def report(share: float, distances: tuple[int, ...] = (64, 1024)) -> None:
        probe = torch.Generator(device).manual_seed(0)
        plain = torch.compiler.set_stance("force_eager")  # other shapes than the training step's
        with plain, torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            text = heldout.windows(max(3, 65_536 // length), length, probe)
            hidden = model.hidden_states(text[:, :-1])
            loss = token_losses(hidden.flatten(0, 1), head, text[:, 1:].flatten()).mean().item()
            copies = " ".join(f"{d}:{copy_accuracy(model, 16, d, probe):.3f}" for d in distances)
        print(
            f"{options.shape} step {step} time {share:.2f} length {length} tokens {seen / 1e6:.0f}M "
            f"train {last.item():.3f} heldout {loss:.3f} copy {copies} wall {time.monotonic() - began:.0f}s",
            flush=True,
        )
        export(model, options.out, (meta["begin_id"], meta["end_id"], meta["pad_id"]))

    began, budget = time.monotonic(), options.minutes * 60
    spent, step, seen, reported, length = 0.0, 0, 0, 0.0, 0
    while spent < budget:
        share = spent / budget
        tick = time.monotonic()
        wanted = options.lengths[share >= SECOND_PHASE_FROM]
        fresh, length = wanted != length, wanted
        rows = max(4, options.batch_tokens // length)
        tokens, weights = training_batch(train, rows, length, options.lookback_share, generator)
        last = batch_loss(tokens, weights)
        last.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        lr = options.lr * rate(share, step)
        adam.param_groups[0]["lr"] = lr * EMBEDDING_RATE
        adam.step()
        muon.step(lr)
        model.zero_grad(set_to_none=True)
        step, seen = step + 1, seen + rows * length
        if fresh or step % 8 == 0:
            last.item()  # keeps the host from running ahead of the clock
        if fresh:
            print(f"{options.shape} length {length}: first step took {time.monotonic() - tick:.1f} s", flush=True)
        else:
            spent += time.monotonic() - tick
        if spent - reported > budget / 24:
            reported = spent
            report(spent / budget)
    report(1.0, (64, 128, 256, 512, 1024, 2048, 4096, 8000))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(options.tokenizer / name, options.out / name)
    (options.out.parent / f"{options.shape}-training.json").write_text(
        json.dumps(
            {
                "shape": options.shape,
                "steps": step,
                "tokens": seen,
                "minutes": options.minutes,
                "lr": options.lr,
                "batch_tokens": options.batch_tokens,
                "seed": options.seed,
                "torch": torch.__version__,
            },
            indent=2,
        )
        + "\n"
    )


if __name__ == "__main__":
    main()
