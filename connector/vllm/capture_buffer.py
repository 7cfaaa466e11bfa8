"""GPU memory that a step's captures lie in until the publisher's thread has copied them to the host.

A fixed amount, taken at the start. The engine's thread takes room and never waits for any; the publisher's thread
copies by way of page-locked memory, on a stream of its own, and gives the room back when the copy is done. So what is
under way is never overwritten. Without a GPU the same code copies at once.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import torch

from mapflow.kernels.upload import pinned

ALIGNMENT = 256  # bytes; where rooms and the sections in them begin
_PINNED_BYTES = 16 << 20  # of the page-locked memory that copies pass through


@dataclass(frozen=True, slots=True, eq=False)
class Room:
    """Bytes [begin, end) of the buffer."""

    begin: int
    end: int

    @property
    def num_bytes(self) -> int:
        """Length of the room."""
        return self.end - self.begin


class CaptureBuffer:
    """See the module. `take` and `ready` are the engine thread's, `to_host` is the publisher thread's."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        """Take `num_bytes` of the device's memory.

        Raises:
            torch.OutOfMemoryError: they are not there.
        """
        self._data = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._rooms: list[Room] = []  # ascending
        self._lock = threading.Lock()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._pinned = pinned(torch.empty(_PINNED_BYTES, dtype=torch.uint8), device)

    @property
    def num_bytes(self) -> int:
        """Bytes of the buffer."""
        return self._data.shape[0]

    @property
    def device(self) -> torch.device:
        """Whose memory it is."""
        return self._data.device

    def take(self, least: int, most: int) -> Room | None:
        """The room of `most` bytes that lies first, or else the largest one of at least `least`; None without any."""
        with self._lock:
            best: Room | None = None
            begin = 0
            for end in (*(one.begin for one in self._rooms), self.num_bytes):
                size = min(end - begin, most) // ALIGNMENT * ALIGNMENT
                if size >= least and (best is None or size > best.num_bytes):
                    best = Room(begin, begin + size)
                if size >= most:
                    break
                begin = next((one.end for one in self._rooms if one.begin == end), end)
            if best is not None:
                self._rooms.append(best)
                self._rooms.sort(key=lambda one: one.begin)
            return best

    def release(self, room: Room) -> None:
        """Give room back that nothing reads any more."""
        with self._lock:
            self._rooms = [one for one in self._rooms if one is not room]

    def data(self, room: Room) -> torch.Tensor:
        """u8 [bytes] of a room, on the device."""
        return self._data[room.begin : room.end]

    def ready(self) -> Any:
        """A CUDA event: all that was launched on the current stream so far. None without a GPU."""
        if self._stream is None:
            return None
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def to_host(self, source: torch.Tensor, ready: Any) -> torch.Tensor:
        """A copy of u8 [bytes] in ordinary memory, made after the event `ready`; the host waits, without the GIL."""
        if self._stream is None:
            return source.clone()
        out = torch.empty(source.shape[0], dtype=torch.uint8)
        halves = self._pinned.chunk(2)
        under_way: list[tuple[torch.Tensor, torch.Tensor, Any]] = []  # one is copied on while the next one comes
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(ready)
            for number, (part, target) in enumerate(
                zip(source.split(halves[0].shape[0]), out.split(halves[0].shape[0]))
            ):
                half = halves[number % 2][: part.shape[0]]
                half.copy_(part, non_blocking=True)
                done = torch.cuda.Event(blocking=True)
                done.record(self._stream)
                under_way.append((target, half, done))
                if number:
                    _land(*under_way.pop(0))
        for one in under_way:
            _land(*one)
        return out


def _land(target: torch.Tensor, half: torch.Tensor, done: Any) -> None:
    done.synchronize()
    target.copy_(half)
