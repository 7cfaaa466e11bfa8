"""Room for what a step measures on a GPU, its way to the publisher's thread, and what is left out without room.

The engine's thread waits for room only while the GPU has two layers ahead of it: it computes no slower for that. What
still finds none is counted (`publish_dropped`, `capture_busy`). A chunk that lacks a layer is of no use, nor are those
behind it; so tiles that found no room in one layer are not stored in the next ones either, and what remains is the
beginning of a prompt, as long as it can be published, in all layers.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from mapflow.connector.counters import Counters
from mapflow.connector.vllm.batch import BatchRow
from mapflow.connector.vllm.capture_buffer import CaptureBuffer, Room, is_done
from mapflow.connector.vllm.capture_spans import ChunkPart
from mapflow.connector.vllm.captured_rows import Layout, Piece

Defer = Callable[[Callable[[], None]], bool]
"""Runs a job on the publisher's thread, in order; False if it has too many waiting."""

_POLL_S = 2e-4
_AHEAD = 4  # layers; with so many launched, the GPU does not notice that the next one comes late
_TILE_SHARE = 4  # one layer's tiles of a step take at most this part of the buffer
_SMALL_SHARE = 64  # and that much even if tiles were few lately: of short prompts more blocks are worth one
_MARGIN = 1.25  # of room over what tiles took lately
_DECAY = 0.95  # a piece
_NO_LIMIT = 2**31


class PieceStore:
    """Of one worker."""

    def __init__(self, buffer: CaptureBuffer, defer: Defer, counters: Counters) -> None:
        self._buffer, self._defer, self._counters = buffer, defer, counters
        self._share = 1.0  # of all blocks, that tiles were lately kept of
        self._launched: deque[Any] = deque(maxlen=_AHEAD)  # events: the last pieces are there
        self._waits = self._is_short = False  # for room, and of it
        self._limits: dict[str, int] = {}  # request that has not ended -> first chunk whose tiles found no room

    def spares_time(self) -> bool:
        """Whether the engine's thread need not be fast now: the GPU has enough to do, or room is short."""
        return self._waits or self._is_short or self._has_ahead(_AHEAD)

    def _has_ahead(self, num_pieces: int) -> bool:
        launched = tuple(self._launched)
        return len(launched) >= num_pieces and not is_done(launched[-num_pieces])

    def end(self, request_id: str) -> None:
        """A request ended."""
        self._limits.pop(request_id, None)

    def useful(self, row: BatchRow) -> BatchRow:
        """A request without the chunks whose tiles would be of no use."""
        limit = self._limits.setdefault(row.step.request_id, _NO_LIMIT)
        if limit == _NO_LIMIT:
            return row
        capture = tuple(chunk for chunk in row.step.capture if chunk.index < limit)
        return replace(row, step=replace(row.step, capture=capture))

    def put(
        self,
        parts: Sequence[ChunkPart],
        layout: Layout,
        least: int,
        all_tiles: int,
        fill: Callable[[torch.Tensor], None],
    ) -> None:
        """Have the publisher's thread fetch what `fill` makes kernels write into a room, and add it to the states.

        least: bytes without tiles. all_tiles: bytes that the tiles of all blocks would take.
        """
        usual = max(int(_MARGIN * self._share * all_tiles), min(all_tiles, self._buffer.num_bytes // _SMALL_SHARE))
        room = self._take(least, least + min(usual, self._buffer.num_bytes // _TILE_SHARE))
        if room is None:
            self._drop(parts)
            return
        fill(self._buffer.data(room))
        piece = Piece(self._buffer, room, layout, [one.part for one in parts])
        self._launched.append(piece.ready)

        def fetch() -> None:
            num_bytes = piece.fetch()
            if all_tiles:
                self._share = max(num_bytes / all_tiles, _DECAY * self._share)
            self._drop([one for one in parts if one.part.is_cut])

        if self._defer(fetch):
            for one in parts:
                one.span.state.parts.setdefault(one.chunk, []).append(one.part)
        else:
            self._drop(parts)

    def _take(self, least: int, most: int) -> Room | None:
        try:
            while True:
                is_busy = self._has_ahead(2)
                room = self._buffer.take(most if is_busy else least, most)
                self._is_short = self._buffer.num_free < most
                if room is not None or not is_busy:
                    return room
                self._waits = True
                time.sleep(_POLL_S)
        finally:
            self._waits = False

    def _drop(self, parts: Sequence[ChunkPart]) -> None:
        """Parts that found no room; on any thread. Requests that only measure masses have no limit."""
        if parts:
            self._counters.add("publish_dropped", "capture_busy", len(parts))
        for one in parts:
            name = one.span.row.step.request_id
            if name in self._limits:
                self._limits[name] = min(one.chunk, self._limits[name])
