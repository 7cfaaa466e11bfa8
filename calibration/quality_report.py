"""What `evaluate` found, as plain data for a file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mapflow.calibration.evaluate import Judged
from mapflow.calibration.reuse_runs import Run


def quality_cases(judged: Sequence[Judged]) -> Iterator[dict[str, Any]]:
    """One case for each plan and run.

    `low` and `high` bound `prefix_kl` (95 %); `prefix` is the most tokens that reused; `retrieval` the share of right
    answers by task, with that of the receiver without reuse beside it; empty where none were asked.
    """
    for one in judged:
        plan = one.plan
        reusing = [number for number, layer in enumerate(plan.layers) if layer.needs_map]
        modes = sorted({plan.layers[number].mode.value for number in reusing})
        for run, quality in one.quality.items():
            yield {
                "pair": f"{plan.sender.model_id} -> {plan.receiver.model_id}",
                "plan": plan.name,
                "prefix": one.prefix,
                "num_documents": quality.num_documents,
                "method": "+".join(modes) if run is Run.PLAN else run.value,
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
                    task.value: {"samples": answers.num_samples, "right": answers.shares[run], "full": answers.full}
                    for task, answers in one.answers.items()
                    if run in answers.shares
                },
            }
