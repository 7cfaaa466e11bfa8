"""Device arenas on NVIDIA GPUs, by NVIDIA's `cuda-bindings`: memory that other processes can open, and copies into it.

The host arena is registered with the driver once, for all devices. Which bytes go where is the core's affair; what
calls this is `promoter.py`. Imports cuda-bindings only when arenas are opened.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any
from uuid import UUID

from mapflow.cache_service.config import GpuArena
from mapflow.cache_service.errors import StartupError
from mapflow.cache_service.promoter import Pair

_PIECE_BYTES = 64 << 30  # of one registration: larger ones fail on some drivers
_PAGE_BYTES = 2 << 20  # smaller allocations may share a page, and with it their handle
_HANDLE_BYTES = 64


class CudaError(RuntimeError):
    """A call of the driver that failed."""


class _Driver:
    """The driver's functions; errors are raised."""

    def __init__(self) -> None:
        try:
            self._driver = importlib.import_module("cuda.bindings.driver")
        except ImportError as error:
            raise StartupError(
                f'a GPU arena needs cuda-bindings, which cannot be imported ({error}): pip install "mapflow[gpu]"'
            ) from error

    def __call__(self, name: str, *arguments: Any) -> Any:
        status, *values = getattr(self._driver, name)(*arguments)
        if int(status):
            _, text = self._driver.cuGetErrorString(status)
            raise CudaError(f"{name}: {text.decode() if text else int(status)}")
        return values[0] if values else None

    def quietly(self, name: str, *arguments: Any) -> None:
        """Call something that gives up what nobody uses any more, whether or not it still can be."""
        getattr(self._driver, name)(*arguments)


class CudaMemory:
    """One device arena: a `promoter.DeviceMemory`."""

    def __init__(self, driver: _Driver, context: Any, device_uuid: str, num_bytes: int) -> None:
        """Allocate in a context that is current.

        Raises:
            CudaError: the driver refuses.
        """
        self.device_uuid = device_uuid
        self.num_bytes = num_bytes
        self._driver = driver
        self.context = context
        self._host_address = 0
        self._address, self.handle = _allocate(driver, num_bytes)
        self._stream = driver("cuStreamCreate", 1)  # CU_STREAM_NON_BLOCKING

    def copy_from(self, host_address: int) -> None:
        """Say where the host arena begins in this process."""
        self._host_address = host_address

    def copy_in(self, pairs: Sequence[Pair]) -> None:
        """Copy from the host arena; when it returns or raises, no copy is under way.

        Raises:
            CudaError: what was to be copied is not there.
        """
        driver, stream = self._driver, self._stream
        driver("cuCtxSetCurrent", self.context)
        try:
            for source, target, num_bytes in within_pieces(pairs):
                driver("cuMemcpyHtoDAsync", self._address + target, self._host_address + source, num_bytes, stream)
        finally:
            driver("cuStreamSynchronize", stream)

    def close(self) -> None:
        """Copy no more. Memory and context go with the process.

        Engines may have the memory open. Freed under them it would be undefined; what a process leaves behind stays
        readable until they close it.
        """
        self._driver.quietly("cuCtxSetCurrent", self.context)
        self._driver.quietly("cuStreamDestroy", self._stream)


class CudaArenas:
    """The memory of all device arenas of a daemon.

    Made in two steps, so that a stop in between is noticed: the constructor allocates, then `register` must be run to
    its end before anything is copied.
    """

    def __init__(self, wanted: Sequence[GpuArena]) -> None:
        """Allocate.

        Raises:
            StartupError: no cuda-bindings, driver or device, or too little memory.
        """
        self._driver = _Driver()
        self.memories: list[CudaMemory] = []
        with ExitStack() as stack:
            num_devices = self._count_devices()
            for arena in wanted:
                if arena.device >= num_devices:
                    raise StartupError(
                        f"GPU arena on device {arena.device}: this host has {num_devices} GPUs, numbered from 0; "
                        "name another one (CUDA_VISIBLE_DEVICES counts too)"
                    )
                self.memories.append(self._open(arena, stack))
            self._stack = stack.pop_all()

    def register(self, host_address: int, num_bytes: int) -> Iterator[int]:
        """Register the host arena, piece by piece, which takes most of a second per GiB; yields the bytes done so far.

        Raises:
            StartupError: the driver refuses.
        """
        for start in range(0, num_bytes, _PIECE_BYTES):
            size = min(_PIECE_BYTES, num_bytes - start)
            try:
                self._driver("cuCtxSetCurrent", self.memories[0].context)
                self._driver("cuMemHostRegister", host_address + start, size, 1)  # CU_MEMHOSTREGISTER_PORTABLE
            except CudaError as error:
                raise StartupError(
                    f"bytes {start} to {start + size} of the arena cannot be registered for copies to a GPU ({error}); "
                    "choose a smaller arena"
                ) from error
            self._stack.callback(self._driver.quietly, "cuMemHostUnregister", host_address + start)
            self._stack.callback(self._driver.quietly, "cuCtxSetCurrent", self.memories[0].context)
            yield start + size
        for memory in self.memories:
            memory.copy_from(host_address)

    def close(self) -> None:
        """Undo everything but the memory, see `CudaMemory.close`; nothing may be copied any more."""
        self._stack.close()

    def _count_devices(self) -> int:
        try:
            self._driver("cuInit", 0)
            return int(self._driver("cuDeviceGetCount"))
        except (RuntimeError, ImportError, OSError) as error:  # cuda-bindings has its own errors for a missing driver
            raise StartupError(f"a GPU arena needs an NVIDIA driver that works ({error}); or leave it out") from error

    def _open(self, arena: GpuArena, stack: ExitStack) -> CudaMemory:
        try:
            device = self._driver("cuDeviceGet", arena.device)
            uuid = UUID(bytes=bytes(self._driver("cuDeviceGetUuid", device).bytes))
            context = self._driver("cuDevicePrimaryCtxRetain", device)
            self._driver("cuCtxSetCurrent", context)
            if (free := int(self._driver("cuMemGetInfo"))) < arena.num_bytes:
                raise StartupError(
                    f"GPU arena on device {arena.device} needs {arena.num_bytes} bytes but {free} are free there; "
                    "choose a smaller one or free some"
                )
            memory = CudaMemory(self._driver, context, f"GPU-{uuid}", arena.num_bytes)
        except CudaError as error:
            raise StartupError(
                f"GPU arena of {arena.num_bytes} bytes on device {arena.device} cannot be made ({error}); "
                "choose a smaller one or another device"
            ) from error
        stack.callback(memory.close)
        return memory


def within_pieces(pairs: Sequence[Pair], piece_bytes: int = _PIECE_BYTES) -> Iterator[Pair]:
    """The same copies, cut where one registration of the host arena ends: the driver copies across none."""
    for source, target, num_bytes in pairs:
        done = 0
        while done < num_bytes:
            size = min(num_bytes - done, piece_bytes - (source + done) % piece_bytes)
            yield source + done, target + done, size
            done += size


def _allocate(driver: _Driver, num_bytes: int) -> tuple[int, bytes]:
    """Address of memory in the current context, and the handle that opens it elsewhere (`cuIpcOpenMemHandle`)."""
    address = driver("cuMemAlloc", -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES)
    handle = driver("cuIpcGetMemHandle", address)
    return int(address), ctypes.string_at(handle.getPtr(), _HANDLE_BYTES)
