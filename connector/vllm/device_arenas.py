"""The daemon's arena on this worker's GPU as a tensor that kernels read in place.

Opened when maps there are first read. The memory stays readable when the daemon dies, until it is closed here; what
lies where is known only under a lease, so nothing is read that was leased by an earlier start.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from typing import Any

import torch

from mapflow.connector.messages import DeviceArena

logger = logging.getLogger(__name__)

_HANDLE_BYTES = 64


class DeviceArenas:
    """Of one worker."""

    def __init__(self, device: torch.device, offered: Callable[[bytes], DeviceArena | None]) -> None:
        """offered: what the daemon's start of a boot id offers on this GPU, if it is the one that we talk to."""
        self._device = device
        self._offered = offered
        self._boot_id = b""
        self._arena_id = 0
        self._whole: torch.Tensor | None = None
        self._address: Any = None

    def tensor(self, boot_id: bytes, arena_id: int) -> torch.Tensor | None:
        """u8 [bytes] of an arena of that boot, in place; None where it is not on this GPU or cannot be opened."""
        if boot_id != self._boot_id:
            arena = self._offered(boot_id)
            if arena is None:
                return None
            self.close()
            self._boot_id, self._arena_id = boot_id, arena.arena_id
            self._open(arena)
        return self._whole if arena_id == self._arena_id else None

    def close(self) -> None:
        """Let go of it, when the GPU has done all that it was told."""
        if self._address is None:
            return
        from cuda.bindings import driver

        torch.cuda.synchronize(self._device)
        driver.cuIpcCloseMemHandle(self._address)
        self._whole = self._address = None

    def _open(self, arena: DeviceArena) -> None:
        try:
            from cuda.bindings import driver
        except ImportError as error:
            logger.warning(
                'mapflow: the daemon\'s GPU arena needs cuda-bindings (%s): pip install "mapflow[gpu]"', error
            )
            return
        handle = driver.CUipcMemHandle()
        if len(arena.handle) != _HANDLE_BYTES:
            logger.warning("mapflow: the daemon's GPU arena has a handle of %d bytes, not 64", len(arena.handle))
            return
        ctypes.memmove(handle.getPtr(), arena.handle, _HANDLE_BYTES)
        torch.cuda.current_stream(self._device).query()  # makes the device's context current
        status, address = driver.cuIpcOpenMemHandle(handle, 1)  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        if int(status):
            logger.warning("mapflow: the daemon's GPU arena cannot be opened (%s); maps are copied", status)
            return
        self._address = address
        self._whole = torch.as_tensor(_Bytes(int(address), arena.num_bytes), device=self._device)
        logger.info("mapflow: reads maps in place in a GPU arena of %.1f GiB", arena.num_bytes / 2**30)


class _Bytes:
    """Device memory as torch takes it over without a copy."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }
