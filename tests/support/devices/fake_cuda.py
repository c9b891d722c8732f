"""A device for machines without one: CPU tensors that the fake CUDA driver takes for memory of a device.

What is done to them goes through the driver's streams (:meth:`FakeCuda.write`), and happens when the fake driver
pleases, in no other order than CUDA promises. ``native/tests/fake_cuda/fake_cuda.h`` has the rules.

A test that wants ordinary torch code to run on the device puts memory there, and runs the code within
:meth:`FakeCuda.kernels`, which makes every operation on that memory a kernel::

    def test_a_write(cuda: FakeCuda, tmp_path: Path) -> None:       # the fixture of tests/device
        model = cuda.adopt_module(Model())                          # or cuda.adopt(tensor): its storage
        with cuda.kernels():
            optimizer = track(torch.optim.AdamW(model.parameters()))    # its state is on the device, too
            then = cuda.values(model.weight)                        # as the stream will have made it; waits for nothing
            future = save(tmp_path / "a", model.state_dict())
            with torch.no_grad():
                model.weight.clamp_(min=0)                          # returns at once; the bytes change later
            error = future.exception()

``cuda.configure(seed=..., max_delay_us=20000, piece=16384)`` makes kernels and copies late and slow;
``cuda.current(cuda.new_stream())`` changes the current stream; ``cuda.synchronize()`` waits for all. DTensors, FSDP2's
modules and other wrappers are adopted by their local tensors, and need nothing else. Outside ``kernels()``, torch
changes adopted memory immediately, and the driver does not know. ``support/devices/fake_kernels.py`` says how it works.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

import dcp_datastates
from dcp_datastates import DataStatesReader, DataStatesWriter
from dcp_datastates._native import MIN_HOST_CACHE_BYTES
from dcp_datastates.io import devices, engine
from dcp_datastates.io.tensor_memory import local_tensor
from support.devices.fake_kernels import DevicePool, Kernels, at_address

ROOT = Path(__file__).parents[3]
BUILD = ROOT / "build" / "fake-cuda"
LIBRARY = BUILD / "libfake_cuda.so"
PATIENCE = 120.0


def build() -> Path:
    """The library, made if it is nowhere or older than its sources."""
    sources = [
        *(ROOT / "native" / "tests" / "fake_cuda").iterdir(),
        ROOT / "native" / "CMakeLists.txt",
    ]
    BUILD.mkdir(parents=True, exist_ok=True)
    with open(BUILD / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # workers of one run
        newest = max(source.stat().st_mtime for source in sources)
        if not LIBRARY.exists() or LIBRARY.stat().st_mtime < newest:
            path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
            options = ("CMAKE_BUILD_TYPE=RelWithDebInfo", "DATASTATES_BUILD_FAKE_CUDA=ON")
            options += ("DATASTATES_BUILD_MODULE=OFF", "DATASTATES_BUILD_TESTS=OFF")
            for command in (
                ["cmake", "-S", str(ROOT / "native"), "-B", str(BUILD), "-G", "Ninja"]
                + [f"-D{option}" for option in options],
                ["cmake", "--build", str(BUILD), "--target", "fake_cuda"],
            ):
                subprocess.run(
                    command, check=True, env={**os.environ, "PATH": path}, stdout=sys.stderr
                )
            found = next(BUILD.rglob("libfake_cuda.so"))
            if found != LIBRARY:
                LIBRARY.unlink(missing_ok=True)
                LIBRARY.symlink_to(found)
            os.utime(found)
    return LIBRARY


class FakeCuda(devices.Cuda):
    """The driver's controls, and torch's view of the tensors that are its memory."""

    def __init__(self, library: Path) -> None:
        self.lib = ctypes.CDLL(str(library))
        self.lib.fake_cuda_count.restype = ctypes.c_uint64
        self.lib.fake_cuda_contexts_created.restype = ctypes.c_uint64
        self._adopted: dict[int, tuple[int, Any]] = {}  # by address: device, what keeps it
        self._here = threading.local()
        self._kernels: Kernels | None = None
        self._launched: list[Any] = []  # kernels may run until the reset
        self.pool = DevicePool()
        self.in_capture = False

    # ---- devices.Cuda ------------------------------------------------------------------------

    def numbers(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        found = map(self.device_of, tensors)
        return [devices.HOST if device is None else device for device in found]

    def used(self) -> list[int]:
        return sorted({device for device, _ in self._adopted.values()})

    def stream(self, device: int) -> int:
        return int(getattr(self._here, "streams", {}).get(device, 0)) or self.main_stream(device)

    def dense(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_contiguous():
            return tensor
        device = self.device_of(tensor) or 0
        made = torch.empty(0, dtype=tensor.dtype, device="cpu")
        made.set_(self.allocate(tensor.nbytes, device), 0, tensor.shape)
        source, target = at_address(tensor), at_address(made)
        self.launch(lambda: target().copy_(source()), device)
        return made

    def mark(self, devices_: Iterable[int]) -> list[Any]:
        native = engine.engine(MIN_HOST_CACHE_BYTES)
        events = []
        for device in {*self.used(), *filter(lambda device: device >= 0, devices_)}:
            with contextlib.suppress(RuntimeError):  # without a driver
                native.open_device(device)
                stream = self.stream(device)
                events.append((stream, native.record_event(device, stream)))
        return events

    def follow(self, events: list[Any]) -> None:
        for before, event in events:
            if self.stream(event.device) != before:
                event.hold(self.stream(event.device))

    def capturing(self) -> bool:
        return self.in_capture

    # ---- what tests do -------------------------------------------------------------------------

    def configure(self, *, seed: int, max_delay_us: int = 2000, piece: int = 65536) -> None:
        self.lib.fake_cuda_configure(
            0, ctypes.c_uint64(seed), ctypes.c_uint32(max_delay_us), ctypes.c_uint64(piece)
        )

    def adopt(self, tensor: torch.Tensor, device: int = 0) -> torch.Tensor:
        """From now on ``tensor`` and all that shares its storage are on ``device``."""
        storage = local_tensor(tensor.detach()).untyped_storage()
        if storage.nbytes():
            self._adopt(storage, device)
            if self._kernels is not None:
                self._kernels.adopted(storage)
        return tensor

    def _adopt(self, storage: torch.UntypedStorage, device: int) -> None:
        _check(
            self.lib.fake_cuda_adopt(
                device, ctypes.c_void_p(storage.data_ptr()), ctypes.c_uint64(storage.nbytes())
            )
        )
        self._adopted[storage.data_ptr()] = (device, storage)

    def adopt_module(self, module: torch.nn.Module, device: int = 0) -> torch.nn.Module:
        """From now on its parameters and buffers are on ``device``."""
        for tensor in (*module.parameters(), *module.buffers()):
            self.adopt(tensor, device)
        return module

    def device_of(self, tensor: torch.Tensor) -> int | None:
        """None: on the host."""
        if tensor.layout != torch.strided or tensor.device.type != "cpu":
            return None
        return self._adopted.get(tensor.untyped_storage().data_ptr(), (None,))[0]

    def allocate(self, nbytes: int, device: int = 0) -> torch.UntypedStorage:
        """Memory of the device, from a caching allocator that reuses memory in the order of the current stream."""
        storage, block = self.pool.take(device, self.stream(device), nbytes)
        if storage.data_ptr() not in self._adopted:
            _check(
                self.lib.fake_cuda_adopt(
                    device,
                    ctypes.c_void_p(storage.data_ptr()),
                    ctypes.c_uint64(ctypes.sizeof(block)),
                )
            )
            self._adopted[storage.data_ptr()] = (device, block)
        return storage

    @contextmanager
    def kernels(self) -> Iterator[None]:
        """Whatever torch does to memory of devices, in this thread, is a kernel on the current stream."""
        self.synchronize()
        self._kernels = Kernels(self)
        try:
            with self._kernels:
                yield
        finally:
            self._kernels = None

    def values(self, tensor: torch.Tensor) -> torch.Tensor:
        """What ``tensor`` will hold when all that torch did within :meth:`kernels` has run."""
        assert self._kernels is not None
        return self._kernels.values(local_tensor(tensor.detach()))

    def memory(self, tensor: torch.Tensor) -> torch.Tensor:
        """What ``tensor``, which is dense, holds at this moment, whatever the streams still have to do."""
        local = local_tensor(tensor.detach())
        taken = bytearray(ctypes.string_at(local.data_ptr(), local.nbytes))
        return torch.frombuffer(taken, dtype=local.dtype).view(local.shape)

    def launch(self, kernel: Callable[[], Any], device: int = 0) -> None:
        """Enqueue a function on the current stream; a thread of the driver calls it."""

        @_KERNEL
        def callback(_: int) -> None:
            kernel()

        self._launched.append(callback)
        stream = ctypes.c_size_t(self.stream(device))
        _check(self.lib.fake_cuda_launch(device, stream, callback, None))

    def main_stream(self, device: int) -> int:
        """The stream that the training thread uses where it says nothing else."""
        streams = self.__dict__.setdefault("_main", {})
        if device not in streams:
            streams[device] = self.new_stream(device)
        return int(streams[device])

    def new_stream(self, device: int = 0, *, foreign: bool = False) -> int:
        """A stream of the device's primary context, or of another one."""
        handle = ctypes.c_size_t()
        if foreign:
            _check(self.lib.fake_cuda_create_foreign_stream(device, ctypes.byref(handle)))
        else:
            _check(self.lib.fake_cuda_create_stream(device, 0, ctypes.byref(handle)))
        return handle.value

    @contextmanager
    def current(self, stream: int, device: int = 0) -> Iterator[None]:
        """``stream`` is this thread's current stream on ``device``."""
        streams = self._here.__dict__.setdefault("streams", {})
        before = streams.get(device, 0)
        streams[device] = stream
        try:
            yield
        finally:
            streams[device] = before

    def write(self, tensor: torch.Tensor, values: torch.Tensor, device: int = 0) -> None:
        """A kernel on the current stream that sets ``tensor``, which is dense, to ``values`` as they are now."""
        values = values.detach().to(tensor.dtype).contiguous()
        local = local_tensor(tensor.detach())
        assert local.is_contiguous()
        assert local.shape == values.shape
        if local.numel():
            self.write_bytes(local.data_ptr(), values.data_ptr(), local.nbytes, device)
        if self._kernels is not None:
            self._kernels.written(local, values)

    def write_bytes(self, to: int, values: int, nbytes: int, device: int) -> None:
        """:meth:`write`, by addresses."""
        _check(
            self.lib.fake_cuda_write(
                device,
                ctypes.c_size_t(self.stream(device)),
                ctypes.c_void_p(to),
                ctypes.c_void_p(values),
                ctypes.c_uint64(nbytes),
            )
        )

    def synchronize(self) -> None:
        _check(self.lib.fake_cuda_synchronize_all(ctypes.c_double(PATIENCE)))

    def count(self, what: str) -> int:
        return int(self.lib.fake_cuda_count(what.encode()))

    def fail_next(self, symbol: str, code: int, skip: int = 0) -> None:
        self.lib.fake_cuda_fail_next(symbol.encode(), code, skip)

    def be_hostile(self, way: str = "all", value: int = 1) -> None:
        _check(self.lib.fake_cuda_be_hostile(way.encode(), ctypes.c_uint64(value)))

    def watch_interpreter(self) -> None:
        """From now on the driver counts calls in threads that hold the GIL ("held_interpreter")."""
        self.lib.fake_cuda_watch_interpreter(ctypes.pythonapi.PyGILState_Check)

    def contexts(self, device: int) -> int:
        return int(self.lib.fake_cuda_contexts_created(device))

    def await_pinned(self, nbytes: int) -> None:
        """Until the engine's whole cache is pinned: copies wait for nothing then."""
        native = engine.engine(nbytes)
        native.open_device(0)
        deadline = threading.Event()
        for _ in range(int(PATIENCE * 100)):
            if native.devices_prepared and native.pinned_bytes >= native.host_cache_bytes:
                return
            deadline.wait(0.01)
        raise AssertionError(f"not pinned: {native.pin_fault}")

    # ---- life ------------------------------------------------------------------------------------

    def reset(self) -> None:
        self.__dict__.pop("_main", None)
        self.in_capture = False
        self.lib.fake_cuda_reset()
        self._adopted.clear()
        self._launched.clear()
        self.pool = DevicePool()


_KERNEL = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def _check(code: int) -> None:
    if code:
        raise AssertionError(f"the fake driver returned {code}")


@contextmanager
def installed() -> Iterator[FakeCuda]:
    """An engine of its own that uses the fake driver, until the end."""
    library = build()
    fake = FakeCuda(library)
    engine._shut_down()
    fake.reset()
    fake.watch_interpreter()
    before = os.environ.get("DCP_DATASTATES_CUDA_LIBRARY")
    os.environ["DCP_DATASTATES_CUDA_LIBRARY"] = str(library)
    replaced = ("numbers", "used", "stream", "dense", "mark", "follow", "capturing")
    vars(devices.accelerator).update({name: getattr(fake, name) for name in replaced})
    devices._refused.clear()
    devices._reported.clear()
    try:
        yield fake
    finally:
        vars(devices.accelerator).clear()
        if before is None:
            del os.environ["DCP_DATASTATES_CUDA_LIBRARY"]
        else:
            os.environ["DCP_DATASTATES_CUDA_LIBRARY"] = before
        fake.lib.fake_cuda_stall(0)
        engine._shut_down()
        gc.collect()  # what still has streams and events
        fake.reset()


CACHE = 64 << 20


class Stepper(torch.optim.Optimizer):
    """Its step is a kernel for each tensor: every value grows by one."""

    def __init__(
        self, cuda: FakeCuda, parameters: dict[str, torch.Tensor], device: int = 0
    ) -> None:
        super().__init__(list(parameters.values()), {})
        self.cuda = cuda
        self.device = device
        self.named = parameters
        self.values = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        for parameter in parameters.values():
            cuda.adopt(parameter, device)
        dcp_datastates.track(self)

    def step(self, closure: Any = None) -> None:
        for name, parameter in self.named.items():
            self.values[name] = self.values[name] + 1
            self.cuda.write(parameter, self.values[name], self.device)

    def write_all(self, amount: float) -> None:
        """As ``p.add_(amount)`` of all, without a step: the version counters move."""
        for name, parameter in self.named.items():
            self.values[name] = self.values[name] + amount
            self.cuda.write(parameter, self.values[name], self.device)
            torch.autograd.graph.increment_version(parameter)

    def now(self) -> dict[str, torch.Tensor]:
        """What the stream will have made of the parameters, when all that it was given has run."""
        return {name: values.clone() for name, values in self.values.items()}


def model(count: int = 3, rows: int = 257, columns: int = 1024) -> dict[str, torch.Tensor]:
    return {
        f"layer.{index}": torch.nn.Parameter(torch.randn(rows, columns)) for index in range(count)
    }


def load(path: Path, like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = {name: torch.full_like(value, -1) for name, value in like.items()}
    dcp.load(found, storage_reader=DataStatesReader(path))
    return found


def differing(path: Path, expected: dict[str, torch.Tensor]) -> list[str]:
    found = load(path, expected)
    return [name for name, value in expected.items() if not torch.equal(found[name], value)]


def writer(path: Path, **options: Any) -> DataStatesWriter:
    return DataStatesWriter(path, **{"host_cache_size": CACHE, "reads": "immediate", **options})


def save(path: Path, state: dict[str, Any], **options: Any) -> Any:
    return dcp.async_save(state, storage_writer=writer(path, **options))


@contextmanager
def saved_as_now(stepper: Stepper, path: Path, **options: Any) -> Iterator[None]:
    """A save whose checkpoint holds what the stream had made of the parameters at its call, whatever the block does."""
    expected = stepper.now()
    future = save(path, stepper.named, **options)
    yield
    future.result()
    assert differing(path, expected) == []
