"""The daemon's shared memory as tensors that a GPU copies from and to at full speed: registered with CUDA, in pieces.

Registering takes most of a second per GB, so a thread does it; until a piece is done its copies are merely slower.
"""

from __future__ import annotations

import logging
import threading

import torch

from mapflow.connector.arena import Arena
from mapflow.connector.messages import Extent

logger = logging.getLogger(__name__)

PIECE_BYTES = 64 << 30  # of one registration: larger ones fail on some drivers


class PinnedArenas:
    """Tensors over mapped arenas, by (boot, arena)."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._tensors: dict[tuple[bytes, int], torch.Tensor] = {}
        self._registered: dict[tuple[bytes, int], list[int]] = {}
        self._lock = threading.Lock()
        self._adding = threading.Lock()

    def tensor(self, boot_id: bytes, arena: Arena) -> torch.Tensor:
        """u8 [bytes] of the whole arena, in place."""
        whole = self._tensors.get((boot_id, arena.arena_id))
        if whole is None:
            with self._adding:  # an engine that sends and receives asks on two threads
                whole = self._tensors.get((boot_id, arena.arena_id))
                whole = self._add(boot_id, arena) if whole is None else whole
        return whole

    def close(self) -> None:
        """Let go of all arenas; no copy from them may be under way."""
        with self._lock:
            for pointers in self._registered.values():
                _unregister(pointers)
            self._registered.clear()
            self._tensors.clear()

    def _add(self, boot_id: bytes, arena: Arena) -> torch.Tensor:
        key = (boot_id, arena.arena_id)
        if any(old != boot_id for old, _ in self._tensors):  # the daemon was started anew
            torch.cuda.synchronize(self.device)
            self.close()
        whole = torch.frombuffer(arena.view(Extent(arena.arena_id, 0, arena.num_bytes)), dtype=torch.uint8)
        self._tensors[key] = whole
        if self.device.type == "cuda":
            threading.Thread(target=self._register, args=(key, whole), name="mapflow-pin", daemon=True).start()
        return whole

    def _register(self, key: tuple[bytes, int], whole: torch.Tensor) -> None:
        torch.cuda.set_device(self.device)
        for begin in range(0, whole.shape[0], PIECE_BYTES):
            pointer, num_bytes = whole.data_ptr() + begin, min(PIECE_BYTES, whole.shape[0] - begin)
            status = int(torch.cuda.cudart().cudaHostRegister(pointer, num_bytes, 0))
            if status != 0:
                text = "mapflow: CUDA cannot pin %d bytes of the daemon's arena (error %d); copies from it are slower"
                logger.warning(text, num_bytes, status)
                return
            with self._lock:
                if self._tensors.get(key) is not whole:  # closed while it was registered
                    _unregister([pointer])
                    return
                self._registered.setdefault(key, []).append(pointer)
        logger.info("mapflow: pinned an arena of %.1f GiB", whole.shape[0] / 2**30)


def _unregister(pointers: list[int]) -> None:
    for pointer in pointers:
        torch.cuda.cudart().cudaHostUnregister(pointer)
