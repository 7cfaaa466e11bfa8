"""GPU memory that maps are copied into ahead of the layers that read them.

Host code only decides; the GPU does the waiting. A copy runs on the buffer's own stream and starts once the layers
whose room it takes have read it; a layer waits, on the stream it computes on, for its own copy. Without a GPU the same
code copies at once, which is how it is tested.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(slots=True, eq=False)
class Region:
    """Bytes [begin, end) of the buffer, for one layer's maps.

    copied, consumed: CUDA events. turn: when it was consumed, counted; None while layers that read it are still to be
    launched.
    """

    begin: int
    end: int
    copied: Any = None
    consumed: Any = None
    turn: int | None = None

    @property
    def is_free(self) -> bool:
        """Whether all that read it is done; waits for nothing."""
        return self.turn is not None and (self.consumed is None or self.consumed.query())


class StagingBuffer:
    """Room for the maps of a few layers; see the module."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        """Take `num_bytes` of the device's memory.

        Raises:
            torch.OutOfMemoryError: they are not there.
        """
        self._data = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._regions: list[Region] = []
        self._turn = 0
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._timed: deque[tuple[Any, Any, int, int]] = deque()  # in the stream's order

    @property
    def num_bytes(self) -> int:
        """Bytes of the buffer."""
        return self._data.shape[0]

    @property
    def device(self) -> torch.device:
        """Whose memory it is."""
        return self._data.device

    def data(self, region: Region) -> torch.Tensor:
        """u8 [bytes] of a region."""
        return self._data[region.begin : region.end]

    def load(self, parts: Sequence[tuple[int, torch.Tensor]], num_bytes: int) -> Region | None:
        """Start to copy `parts` (offset in the region, u8 bytes on the host) into a new region of `num_bytes`.

        None if there is no room before layers that are still to be launched have consumed theirs.
        """
        region = self._allocate(num_bytes)
        if region is None:
            return None
        target = self.data(region)
        if self._stream is None:
            for offset, part in parts:
                target[offset : offset + part.shape[0]] = part
        else:
            started, region.copied = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            with torch.cuda.stream(self._stream):
                started.record(self._stream)
                for offset, part in parts:
                    target[offset : offset + part.shape[0]].copy_(part, non_blocking=True)
                region.copied.record(self._stream)
            self._timed.append((started, region.copied, num_bytes, len(parts)))
        return region

    def copies_done(self) -> list[tuple[int, float, int]]:
        """Bytes, seconds and number of parts of each `load` whose copies ended since the last call; waits for none."""
        done = []
        while self._timed and self._timed[0][1].query():
            started, ended, num_bytes, num_parts = self._timed.popleft()
            done.append((num_bytes, 1e-3 * started.elapsed_time(ended), num_parts))
        return done

    def wait(self, region: Region) -> None:
        """Let the current stream wait until a region is filled."""
        if region.copied is not None:
            torch.cuda.current_stream(self._data.device).wait_event(region.copied)

    def consume(self, region: Region) -> None:
        """All that reads a region has been launched on the current stream."""
        if self._stream is not None:
            region.consumed = torch.cuda.current_stream(self._data.device).record_event()
        self._turn += 1
        region.turn = self._turn

    def consume_all(self) -> None:
        """A step ended, whatever came of it."""
        for region in self._regions:
            if region.turn is None:
                self.consume(region)

    def synchronize(self) -> None:
        """Wait on the host until no copy is under way."""
        if self._stream is not None:
            self._stream.synchronize()

    def _allocate(self, num_bytes: int) -> Region | None:
        """Where nothing lies, else where what lies there was consumed longest ago."""
        self._regions = [one for one in self._regions if not one.is_free]
        best: tuple[int, int, list[Region]] | None = None
        for begin in (0, *(one.end for one in self._regions)):
            end = begin + num_bytes
            there = [one for one in self._regions if one.begin < end and begin < one.end]
            turns = [one.turn for one in there if one.turn is not None]
            if end > self.num_bytes or len(turns) < len(there):
                continue
            if best is None or max(turns, default=0) < best[0]:
                best = (max(turns, default=0), begin, there)
        if best is None:
            return None
        _, begin, there = best
        for one in there:
            if self._stream is not None:
                self._stream.wait_event(one.consumed)
            self._regions.remove(one)
        region = Region(begin, begin + num_bytes)
        self._regions.append(region)
        return region
