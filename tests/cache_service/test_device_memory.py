"""Device arenas by the driver: on a stand-in for it wherever tests run, and on a GPU where there is one."""

# ruff: noqa: N802 - the driver names the functions
from __future__ import annotations

import asyncio
import ctypes
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mapflow.cache_service.arena import SEGMENT_FOLDER, Arena
from mapflow.cache_service.config import Config, Endpoint, GpuArena
from mapflow.cache_service.device_memory import CudaArenas, CudaError, within_pieces
from mapflow.cache_service.errors import StartupError
from mapflow.cache_service.server import serve
from mapflow.v1 import cache_pb2

PAGE = 2 << 20
SUCCESS, OUT_OF_MEMORY, NO_DEVICE = 0, 2, 100


class FakeDriver:
    """As much of `cuda.bindings.driver` as the daemon uses, over host memory; `failing` maps functions to errors."""

    def __init__(self, num_devices: int = 2, free: int = 8 * PAGE) -> None:
        self.num_devices = num_devices
        self.free = free
        self.failing: dict[str, int] = {}
        self.calls: list[str] = []
        self.buffers: dict[int, Any] = {}
        self.registered: dict[int, int] = {}
        self.contexts: list[int] = []
        self.streams = 0
        self.current = -1

    def __getattr__(self, name: str) -> Callable[..., tuple[Any, ...]]:
        act = getattr(type(self), f"_{name}")

        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append(name)
            if status := self.failing.get(name, SUCCESS):
                return (status, None)
            result = act(self, *arguments)
            return (SUCCESS, *result) if isinstance(result, tuple) else (SUCCESS, result)

        return call

    def _cuGetErrorString(self, status: int) -> bytes:
        return f"error {status}".encode()

    def _cuInit(self, flags: int) -> tuple[()]:
        return ()

    def _cuDeviceGetCount(self) -> int:
        return self.num_devices

    def _cuDeviceGet(self, number: int) -> int:
        return number

    def _cuDeviceGetUuid(self, device: int) -> Any:
        return SimpleNamespace(bytes=bytes(range(device, device + 16)))

    def _cuDevicePrimaryCtxRetain(self, device: int) -> int:
        self.contexts.append(device)
        return device

    def _cuCtxSetCurrent(self, context: int) -> tuple[()]:
        assert context in self.contexts
        self.current = context
        return ()

    def _cuMemGetInfo(self) -> tuple[int, int]:
        return self.free, 100 * PAGE

    def _cuMemAlloc(self, num_bytes: int) -> int:
        buffer = ctypes.create_string_buffer(num_bytes)
        self.buffers[ctypes.addressof(buffer)] = buffer
        return ctypes.addressof(buffer)

    def _cuIpcGetMemHandle(self, address: int) -> Any:
        handle = ctypes.create_string_buffer(address.to_bytes(8, "little") * 8, 64)
        return SimpleNamespace(getPtr=lambda: ctypes.addressof(handle), keep=handle)

    def _cuStreamCreate(self, flags: int) -> int:
        self.streams += 1
        return 7

    def _cuStreamDestroy(self, stream: int) -> tuple[()]:
        self.streams -= 1
        return ()

    def _cuStreamSynchronize(self, stream: int) -> tuple[()]:
        return ()

    def _cuMemHostRegister(self, address: int, num_bytes: int, flags: int) -> tuple[()]:
        assert flags == 1 and self.current in self.contexts
        self.registered[address] = num_bytes
        return ()

    def _cuMemHostUnregister(self, address: int) -> tuple[()]:
        assert self.current in self.contexts
        del self.registered[address]
        return ()

    def _cuMemcpyHtoDAsync(self, target: int, source: int, num_bytes: int, stream: int) -> tuple[()]:
        inside = [begin <= source and source + num_bytes <= begin + size for begin, size in self.registered.items()]
        assert any(inside)
        ctypes.memmove(target, source, num_bytes)
        return ()


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """The stand-in, where cuda-bindings would be imported from."""
    fake = FakeDriver()
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", fake)  # type: ignore[arg-type]
    return fake


@pytest.fixture
def arena(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Arena]:
    """A host arena of 1 MiB full of noise; for a GPU in shared memory, as CUDA registers no pages of a file."""
    folder = SEGMENT_FOLDER if request.node.get_closest_marker("gpu") else tmp_path
    with Arena(1 << 20, folder) as arena:
        list(arena.allocate())
        arena.write(0, random.Random(0).randbytes(1 << 20))
        yield arena


def nothing_left(driver: FakeDriver) -> bool:
    """But the memory and the contexts, which go with the process: engines may have them open."""
    return not (driver.streams or driver.registered)


def test_arenas_are_made_copied_into_and_undone(driver: FakeDriver, arena: Arena) -> None:
    cuda = CudaArenas([GpuArena(1, 4096), GpuArena(0, PAGE + 1)])
    assert list(cuda.register(arena.address, arena.num_bytes)) == [arena.num_bytes]
    first, second = cuda.memories
    assert (first.num_bytes, second.num_bytes) == (4096, PAGE + 1)
    assert first.device_uuid == "GPU-01020304-0506-0708-090a-0b0c0d0e0f10"
    assert second.device_uuid == "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"
    addresses = [int.from_bytes(memory.handle[:8], "little") for memory in (first, second)]
    assert [len(driver.buffers[address]) for address in addresses] == [PAGE, 2 * PAGE]
    first.copy_in([(100, 0, 64), (5000, 128, 3968)])
    second.copy_in([(0, 64, 1000)])
    assert ctypes.string_at(addresses[0], 64) == arena.read(100, 64)
    assert ctypes.string_at(addresses[0] + 128, 3968) == arena.read(5000, 3968)
    assert ctypes.string_at(addresses[1] + 64, 1000) == arena.read(0, 1000)
    assert driver.current == 0
    cuda.close()
    assert nothing_left(driver)


def test_a_copy_that_fails_is_waited_for(driver: FakeDriver, arena: Arena) -> None:
    cuda = CudaArenas([GpuArena(0, 4096)])
    list(cuda.register(arena.address, arena.num_bytes))
    for name in ("cuMemcpyHtoDAsync", "cuStreamSynchronize"):
        driver.failing = {name: 700}
        with pytest.raises(CudaError, match=f"{name}: error 700"):
            cuda.memories[0].copy_in([(0, 0, 64)])
        assert "cuStreamSynchronize" in driver.calls[-3:]
    driver.failing = dict.fromkeys(("cuStreamDestroy", "cuMemHostUnregister"), 700)
    cuda.close()  # what a broken GPU does not take back goes with the process


def open_and_close(arena: Arena) -> None:
    cuda = CudaArenas([GpuArena(0, 4096), GpuArena(1, 4096)])
    try:
        list(cuda.register(arena.address, arena.num_bytes))
    finally:
        cuda.close()


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        ({"num_devices": 1}, "GPU arena on device 1: this host has 1 GPUs, numbered from 0"),
        ({"free": 4095}, "GPU arena on device 0 needs 4096 bytes but 4095 are free there; choose a smaller one"),
        ({"failing": {"cuInit": NO_DEVICE}}, r"needs an NVIDIA driver that works \(cuInit: error 100\)"),
        (
            {"failing": {"cuMemAlloc": OUT_OF_MEMORY}},
            r"of 4096 bytes on device 0 cannot be made \(cuMemAlloc: error 2\)",
        ),
        ({"failing": {"cuIpcGetMemHandle": 801}}, r"cannot be made \(cuIpcGetMemHandle: error 801\); choose"),
        (
            {"failing": {"cuMemHostRegister": 2}},
            r"bytes 0 to 1048576 of the arena cannot be registered .* smaller arena",
        ),
    ],
)
def test_a_start_that_fails_says_why_and_leaves_nothing(
    driver: FakeDriver, arena: Arena, prepare: dict[str, Any], message: str
) -> None:
    for name, value in prepare.items():
        setattr(driver, name, value)
    with pytest.raises(StartupError, match=message) as caught:
        open_and_close(arena)
    assert "\n" not in str(caught.value)
    assert nothing_left(driver)


def serve_until(act: Callable[[], None], socket_folder: Path, device_arenas: int = 1) -> int:
    """Run a daemon until `act`, called when it serves, has it end; returns the exit status."""
    config = Config(
        endpoint=Endpoint(path=str(socket_folder / "s")),
        arena_bytes=1 << 20,
        drain_s=0.0,
        gpu_arenas=tuple(GpuArena(device, 4096) for device in range(device_arenas)),
    )

    async def run() -> int:
        served = asyncio.create_task(serve(config))
        while not served.done() and not (socket_folder / "s").exists():
            await asyncio.sleep(0.01)
        if not served.done():
            act()
        return await served

    return asyncio.run(run())


def stop_this_process() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_daemon_that_is_told_to_stop_gives_everything_back(driver: FakeDriver, socket_folder: Path) -> None:
    assert serve_until(stop_this_process, socket_folder, device_arenas=2) == 0
    assert nothing_left(driver)
    last = [name for name in driver.calls if name != "cuCtxSetCurrent"][-3:]
    undo = ["cuMemHostUnregister", "cuStreamDestroy", "cuStreamDestroy"]
    assert last == undo


def test_a_signal_during_registration_is_noticed(
    driver: FakeDriver, socket_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mapflow.cache_service.device_memory._PIECE_BYTES", 1 << 18)
    register = FakeDriver._cuMemHostRegister

    def register_and_stop(fake: FakeDriver, *arguments: int) -> tuple[()]:
        stop_this_process()
        time.sleep(0.1)
        return register(fake, *arguments)

    monkeypatch.setattr(FakeDriver, "_cuMemHostRegister", register_and_stop)
    assert serve_until(lambda: pytest.fail("it serves"), socket_folder) == 0
    assert driver.calls.count("cuMemHostRegister") == 1
    assert nothing_left(driver)


def test_a_daemon_that_cannot_start_undoes_everything(
    driver: FakeDriver, socket_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise StartupError("the address is taken")

    monkeypatch.setattr("mapflow.cache_service.server.sockets.bind", refuse)
    with pytest.raises(StartupError, match="is taken"):
        serve_until(lambda: None, socket_folder)
    assert "cuMemHostRegister" in driver.calls
    assert nothing_left(driver)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("mapflow-copier")]


def test_without_cuda_bindings_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(StartupError, match=r'pip install "mapflow\[gpu\]"'):
        CudaArenas([GpuArena(0, 4096)])


def test_copies_are_cut_between_registrations() -> None:
    assert list(within_pieces([(0, 7, 100), (90, 0, 10), (95, 1, 10), (199, 5, 202)], 100)) == [
        (0, 7, 100),
        (90, 0, 10),
        (95, 1, 5),
        (100, 6, 5),
        (199, 5, 1),
        (200, 6, 100),
        (300, 106, 100),
        (400, 206, 1),
    ]


@pytest.fixture
def cuda_driver() -> Any:
    """The driver itself, with device 0's context current."""
    driver = pytest.importorskip("cuda.bindings.driver")
    try:
        status = driver.cuInit(0)[0]
    except RuntimeError as error:
        pytest.skip(f"no CUDA: {error}")
    if int(status):
        pytest.skip(f"no CUDA: {status}")
    driver.cuCtxSetCurrent(driver.cuDevicePrimaryCtxRetain(driver.cuDeviceGet(0)[1])[1])
    return driver


def read_back(driver: Any, address: int, num_bytes: int) -> bytes:
    buffer = ctypes.create_string_buffer(num_bytes)
    (status,) = driver.cuMemcpyDtoH(ctypes.addressof(buffer), address, num_bytes)
    assert int(status) == 0, status
    return buffer.raw


def open_handle(driver: Any, handle: bytes) -> int:
    """Map a device arena of another process."""
    message = driver.CUipcMemHandle()
    ctypes.memmove(message.getPtr(), handle, len(handle))
    status, address = driver.cuIpcOpenMemHandle(message, 1)  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
    assert int(status) == 0, status
    return int(address)


READER = """
import ctypes, sys
from cuda.bindings import driver
driver.cuInit(0)
driver.cuCtxSetCurrent(driver.cuDevicePrimaryCtxRetain(driver.cuDeviceGet(0)[1])[1])
message = driver.CUipcMemHandle()
ctypes.memmove(message.getPtr(), bytes.fromhex(sys.argv[1]), 64)
status, address = driver.cuIpcOpenMemHandle(message, 1)
assert int(status) == 0, status
buffer = ctypes.create_string_buffer(int(sys.argv[3]))
(status,) = driver.cuMemcpyDtoH(ctypes.addressof(buffer), int(address) + int(sys.argv[2]), len(buffer))
assert int(status) == 0, status
print(buffer.raw.hex())
"""


@pytest.mark.gpu
def test_another_process_reads_what_was_copied(cuda_driver: Any, arena: Arena) -> None:
    cuda = CudaArenas([GpuArena(0, 1 << 20)])
    try:
        list(cuda.register(arena.address, arena.num_bytes))
        (memory,) = cuda.memories
        memory.copy_in([(4096, 64, 1000), (0, 8192, 100_000)])
        for offset, source, num_bytes in ((64, 4096, 1000), (8192, 0, 100_000)):
            command = [sys.executable, "-P", "-c", READER, memory.handle.hex(), str(offset), str(num_bytes)]
            done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
            assert bytes.fromhex(done.stdout.strip()) == arena.read(source, num_bytes)
    finally:
        cuda.close()


@pytest.mark.gpu
def test_more_than_there_is_names_what_is_free(cuda_driver: Any) -> None:
    with pytest.raises(StartupError, match=r"needs \d+ bytes but \d+ are free there"):
        CudaArenas([GpuArena(0, 1 << 45)])
    with pytest.raises(StartupError, match="GPU arena on device 99: this host has"):
        CudaArenas([GpuArena(99, 1 << 20)])


@pytest.mark.gpu
@pytest.mark.service
def test_a_mapped_arena_outlives_its_daemon(
    cuda_driver: Any, start_daemon: Callable[..., Any], connected: Callable[[str], AbstractContextManager[Any]]
) -> None:
    data, key = random.Random(1).randbytes(100_000), b"k" * 16
    daemon = start_daemon(options=("--gpu-arena", "0:64MiB"))
    with connected(daemon.endpoint) as client:
        (device_arena,) = client.stub.Handshake(cache_pb2.HandshakeRequest()).device_arenas
        address = open_handle(cuda_driver, device_arena.handle)
        client.publish(key, data)
        request = cache_pb2.LookupRequest(
            session_id=client.session,
            keys=key,
            key_bytes=16,
            wants=[cache_pb2.Want(kind=cache_pb2.KIND_MAP, model="m@1", layers=[0])],
            lease_s=30.0,
            device_arena_id=device_arena.arena_id,
        )
        client.stub.Lookup(request)
        give_up_at = time.monotonic() + 10.0
        while not (offsets := client.stub.Lookup(request).hits[0].device_offsets):
            assert time.monotonic() < give_up_at, "the copy was not made"
            time.sleep(0.01)
        assert read_back(cuda_driver, address + offsets[0], len(data)) == data
        daemon.kill()
    assert read_back(cuda_driver, address + offsets[0], len(data)) == data
    cuda_driver.cuIpcCloseMemHandle(address)
