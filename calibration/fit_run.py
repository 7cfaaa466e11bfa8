"""Sums normal equations document by document, so that an interrupted run goes on where it stopped."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator

from mapflow.calibration.attention import ObservedModel
from mapflow.calibration.config import CalibrationConfig
from mapflow.calibration.document_pass import add_document, receiver_side, sample_rows
from mapflow.calibration.normal_equations import NormalEquations, ReceiverSide, load_checkpoint, save_checkpoint
from mapflow.calibration.progress import Progress, ProgressCallback
from mapflow.calibration.spool import Spool

_logger = logging.getLogger(__name__)


def resume(config: CalibrationConfig, empty: NormalEquations, digest: str) -> tuple[NormalEquations, int, str]:
    """The sums to go on from, the documents in them, and what to tell the user."""
    if not config.checkpoint.exists():
        return empty, 0, ""
    loaded = load_checkpoint(config.checkpoint, empty, digest=digest)
    if loaded is None:
        note = f"{config.checkpoint} was left by a run with other models, texts or options: discarded, starting over"
        _logger.warning(note)
        return empty, 0, note
    return *loaded, f"resuming after {loaded[1]} documents found in {config.checkpoint}"


def accumulate(
    config: CalibrationConfig,
    equations: NormalEquations,
    documents: list[list[int]],
    done: int,
    digest: str,
    sender: ObservedModel,
    receiver: ObservedModel,
    report: ProgressCallback,
) -> None:
    """Add the documents from `done` on; after each one the sums are saved, and `report` is told."""
    costs = [len(ids) ** 2 for ids in documents]  # maps dominate, and they grow with the square
    sides = _sides(config, equations.receiver_layers, documents, done, digest, receiver, report)
    started = time.monotonic()
    for number, side in enumerate(sides, start=done):
        add_document(equations, sender, side, documents[number], rows_at_once=config.block)
        save_checkpoint(config.checkpoint, equations, digest=digest, documents_done=number + 1)
        spent = (time.monotonic() - started) / sum(costs[done : number + 1])
        report(
            Progress(
                done=number + 1,
                total=len(documents),
                remaining_s=spent * sum(costs[number + 1 :]),
            )
        )


def _sides(
    config: CalibrationConfig,
    layers: tuple[int, ...],
    documents: list[list[int]],
    done: int,
    digest: str,
    receiver: ObservedModel,
    report: ProgressCallback,
) -> Iterator[ReceiverSide]:
    """What the receiver leaves of each document from `done` on.

    One model at a time: of all documents before the first is given, so that each model is loaded once.
    """

    def side(number: int) -> ReceiverSide:
        rows = sample_rows(len(documents[number]), config.row_fraction, seed=config.seed + number)
        return receiver_side(receiver, layers, documents[number], rows.to(config.device))

    if not config.one_at_a_time:
        yield from map(side, range(done, len(documents)))
        return
    spool = Spool(config.spool, digest)
    for number in range(done, len(documents)):
        if not spool.has(number):
            spool.put(number, side(number))
        report(Progress(done=number + 1, total=len(documents), stage="documents through the receiver"))
    for number in range(done, len(documents)):
        yield spool.take(number, config.device)
