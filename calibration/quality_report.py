"""What `evaluate` found, as plain data for a file."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from typing import Any

import torch

from mapflow.calibration.answers import Answers
from mapflow.calibration.evaluate import Judged
from mapflow.calibration.evaluation_config import EvaluationConfig
from mapflow.calibration.reuse_runs import Run
from mapflow.v1.version import __version__


def quality_report(judged: Sequence[Judged], config: EvaluationConfig) -> dict[str, Any]:
    """The cases, and what they were found with: versions, device, texts, and how much of these."""
    device = torch.device(config.device)
    return {
        "versions": {"mapflow": __version__} | {name: version(name) for name in ("torch", "transformers")},
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "dtype": config.dtype,
        "texts": {"name": config.texts.name, "sha256": hashlib.sha256(config.texts.read_bytes()).hexdigest()},
        "max_tokens": config.max_tokens,
        "prefix_rows": config.prefix_rows,
        "suffix_tokens": config.suffix_tokens,
        "cases": list(quality_cases(judged)),
    }


def quality_cases(judged: Sequence[Judged]) -> Iterator[dict[str, Any]]:
    """One case for each plan and run.

    `low` and `high` bound `prefix_kl` (95 %); `prefix` is the most tokens that reused; `retrieval`, by task, the share
    of answers (`right`) and of their tokens (`right_tokens`) that are right, beside those of the receiver without reuse
    (`full`, `full_tokens`); empty where none were asked. Of plans also what a prefill of `context` tokens takes, in
    milliseconds and as a share of one without reuse, and the bytes of its maps; both estimated (`cost.py`). On a GPU
    also what attention took there in the layers that reuse, with `prefix` tokens, and full attention in their place.
    """
    for one in judged:
        plan = one.plan
        reusing = plan.reusing_layers
        cost = {
            "context": one.context,
            "estimated_ms": 1e3 * one.cost.seconds,
            "estimated_share": one.cost.seconds / one.full_s,
            "map_bytes": one.cost.num_bytes,
        }
        if one.measured_ms is not None:
            cost |= dict(zip(("measured_attention_ms", "measured_full_attention_ms"), one.measured_ms))
        for run, quality in one.quality.items():
            yield {
                "pair": f"{plan.sender.model_id} -> {plan.receiver.model_id}",
                "plan": plan.name,
                "prefix": one.prefix,
                "num_documents": quality.num_documents,
                "method": "+".join(plan.reusing_modes) if run is Run.PLAN else run.value,
                "from_layer": reusing[0] if reusing else None,
                "density": quality.density,
                "prefix_kl": quality.prefix_kl,
                "low": quality.low.prefix_kl,
                "high": quality.high.prefix_kl,
                "loss_rise": quality.prefix_loss_rise,
                "suffix_kl": quality.suffix_kl,
                "top1_agreement": quality.prefix_top1,
                "suffix_top1_agreement": quality.suffix_top1,
                "suffix_loss_rise": quality.suffix_loss_rise,
                "retrieval": {
                    task.value: _retrieval(answers, run)
                    for task, answers in one.answers.items()
                    if run in answers.scores
                },
                **(cost if run is Run.PLAN else {}),
            }


def _retrieval(answers: Answers, run: Run) -> dict[str, Any]:
    score = answers.scores[run]
    return {
        "samples": answers.num_samples,
        "tokens": answers.num_tokens,
        "prefixes": answers.prefixes,
        "right": score.right,
        "full": answers.full.right,
        "right_tokens": score.tokens,
        "full_tokens": answers.full.tokens,
    }
