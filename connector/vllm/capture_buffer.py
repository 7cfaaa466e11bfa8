"""GPU memory that a step's captures lie in until the publisher's threads have copied them to the host.

A fixed amount, taken at the start. The engine's thread takes room; the publisher's threads copy, on streams of the
buffer's own, and wait for their copies. Room goes back when nobody refers to it any more, so what is under way is never
overwritten. Without a GPU the same code copies at once.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch

from mapflow.kernels.blob_layout import align

ALIGNMENT = 256  # bytes; where rooms and the sections in them begin


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Room:
    """Bytes [begin, end) of the buffer, for as long as there is a reference to it."""

    begin: int
    end: int

    @property
    def num_bytes(self) -> int:
        """Length of the room."""
        return self.end - self.begin


class CaptureBuffer:
    """See the module. `take` and `ready` are the engine thread's, all else is the publisher threads'."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        """Take `num_bytes` of the device's memory.

        Raises:
            torch.OutOfMemoryError: they are not there.
        """
        self._data = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._rooms: dict[int, int] = {}  # begin -> end
        self._ends: deque[tuple[int, int]] = deque()  # begin and new end of rooms that became smaller, on any thread
        is_cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if is_cuda else None  # looks at what was measured
        self._out = torch.cuda.Stream(device) if is_cuda else None  # copies it to the daemon's memory

    @property
    def num_bytes(self) -> int:
        """Bytes of the buffer."""
        return self._data.shape[0]

    @property
    def device(self) -> torch.device:
        """Whose memory it is."""
        return self._data.device

    @property
    def num_free(self) -> int:
        """Bytes that were in no room when the last one was taken."""
        return self.num_bytes - sum(end - begin for begin, end in self._rooms.items())

    def take(self, least: int, most: int) -> Room | None:
        """The room of `most` bytes that lies first, or else the largest one of at least `least`; None without any."""
        while self._ends:
            begin, end = self._ends.popleft()
            self._rooms[begin] = end
            if end == begin:
                del self._rooms[begin]
        least, most = (align(max(size, 1), ALIGNMENT) for size in (least, most))
        best: tuple[int, int] | None = None
        start = 0
        for begin, end in (*sorted(self._rooms.items()), (self.num_bytes, self.num_bytes)):
            size = min(begin - start, most) // ALIGNMENT * ALIGNMENT
            if size >= least and (best is None or size > best[1] - best[0]):
                best = (start, start + size)
            if size >= most:
                break
            start = end
        if best is None:
            return None
        room = Room(*best)
        self._rooms[room.begin] = room.end
        weakref.finalize(room, self._ends.append, (room.begin, room.begin)).atexit = False
        return room

    def shrink(self, room: Room, num_bytes: int) -> None:
        """Give back what lies behind the first `num_bytes` of a room; on any thread."""
        end = room.begin + -(-max(num_bytes, 1) // ALIGNMENT) * ALIGNMENT
        if end < room.end:
            self._ends.append((room.begin, end))

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

    @contextlib.contextmanager
    def looking(self, ready: Any) -> Iterator[None]:
        """What is launched inside runs on a stream of the buffer's own, after the event `ready`."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(ready)
            yield

    def to_host(self, *tensors: torch.Tensor) -> list[npt.NDArray[Any]]:
        """Copies of what was launched on the current stream; waits for them alone, without the GIL."""
        if self._stream is None:
            return [tensor.numpy() for tensor in tensors]
        copies = [torch.empty(one.shape, dtype=one.dtype, pin_memory=True) for one in tensors]
        for target, source in zip(copies, tensors):
            target.copy_(source, non_blocking=True)
        event = torch.cuda.Event(blocking=True)
        event.record()
        event.synchronize()
        return [copy.numpy() for copy in copies]

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Begin to copy what has been looked at, u8 [bytes], into page-locked memory; on any thread."""
        with torch.cuda.stream(self._out):
            target.copy_(source, non_blocking=True)

    def wait(self) -> None:
        """Until all copies that were begun are made; without the GIL."""
        if self._out is not None:
            self._out.synchronize()


def is_done(ready: Any) -> bool:
    """Whether an event of `CaptureBuffer.ready` has come; waits for nothing."""
    return ready is None or bool(ready.query())
