"""Torch's operations as kernels of the fake device: within :func:`kernels`, whatever torch does to adopted memory is
enqueued on the current stream, as on a device, and happens when the fake driver pleases.

Every operation goes through torch's own dispatcher, so version counters, hooks, views, autograd and wrapper subclasses
behave as they do on a device. How it works: each storage on the device has a *twin* on the host, which holds what the
storage will hold when all that was enqueued has run. An operation computes with twins, at once; what it changes is
then enqueued as a write. What it returns lies on the device, in memory of :class:`DevicePool`, which reuses freed
memory at once, in the order of the stream, as torch's caching allocator does.

Not covered: collectives that write to adopted memory (they raise), and memory that is reached without torch.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_map_only

if TYPE_CHECKING:
    from support.devices.fake_cuda import FakeCuda

_COLLECTIVES: Final = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
_UNDECLARED_WRITES: Final = ("running_mean", "running_var")
"""Arguments that batch normalization writes to, whatever its schema says."""


def on_storage(storage: torch.UntypedStorage, like: torch.Tensor) -> torch.Tensor:
    """``like``'s view, on another storage."""
    with torch._C._AutoDispatchBelowAutograd():
        made = torch.empty(0, dtype=like.dtype, device="cpu")
        return made.set_(storage, like.storage_offset(), like.shape, like.stride())


def at_address(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Makes ``tensor`` again, from its address. Does not keep its memory."""
    address, dtype, shape, stride = tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
    nbytes = _extent(tensor)

    def make() -> torch.Tensor:
        memory = (ctypes.c_ubyte * nbytes).from_address(address)
        return torch.frombuffer(memory, dtype=dtype).as_strided(shape, stride)

    return make


def _extent(tensor: torch.Tensor) -> int:
    """Bytes from the first element to the end of the last."""
    if not tensor.numel():
        return 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (sum((count - 1) * stride for count, stride in steps) + 1) * tensor.element_size()


def _copy_of(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    copied = torch.UntypedStorage(storage.nbytes(), device="cpu")
    ctypes.memmove(copied.data_ptr(), storage.data_ptr(), storage.nbytes())
    return copied


class DevicePool:
    """A caching allocator: memory that tensors have freed goes to the next tensors of the same stream, without waiting
    for what the stream was given.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[int, int, int], list[Any]] = {}
        self.reused = 0

    def take(self, device: int, stream: int, nbytes: int) -> tuple[torch.UntypedStorage, Any]:
        """A storage, and the block that it lies in."""
        rounded = -(-nbytes // 512) * 512
        free = self._free.setdefault((device, stream, rounded), [])
        self.reused += bool(free)
        block = free.pop() if free else (ctypes.c_ubyte * rounded)()
        used = (ctypes.c_ubyte * nbytes).from_buffer(block)
        weakref.finalize(used, free.append, block).atexit = False
        return torch.frombuffer(used, dtype=torch.uint8).untyped_storage(), block


class Kernels(TorchDispatchMode):
    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__()
        self._cuda = cuda
        self._twins: dict[int, torch.UntypedStorage] = {}
        self._uploaded = cuda.count("bytes_to_device")

    # ---- twins -----------------------------------------------------------------------------------

    def values(self, tensor: torch.Tensor) -> torch.Tensor:
        """What ``tensor`` will hold when all that was enqueued has run."""
        return self._twin(tensor).clone() if self._is_on_device(tensor) else tensor.clone()

    def _is_on_device(self, tensor: torch.Tensor) -> bool:
        return self._cuda.device_of(tensor) is not None

    def _twin(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if self._cuda.count("bytes_to_device") != self._uploaded:  # something was loaded
            self._cuda.synchronize()
            self._twins.clear()
            self._uploaded = self._cuda.count("bytes_to_device")
        twin = self._twins.get(storage.data_ptr())
        if twin is None or twin.nbytes() != storage.nbytes():
            self._cuda.synchronize()
            twin = self._twins[storage.data_ptr()] = _copy_of(storage)
        return on_storage(twin, tensor)

    def adopted(self, storage: torch.UntypedStorage) -> None:
        """``storage`` is on the device from now on."""
        self._twins[storage.data_ptr()] = _copy_of(storage)

    def written(self, tensor: torch.Tensor, values: torch.Tensor) -> None:
        """Something else has enqueued a write of ``values`` to ``tensor``."""
        self._twin(tensor).copy_(values)

    # ---- operations ------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(each, FakeTensor) for each in types):
            return func(*args, **kwargs)  # shapes only
        if any(each.__torch_dispatch__ is not _NONE for each in types):
            return NotImplemented  # a wrapper, whose inner tensors come here next
        tensors = [each for each in tree_flatten((args, kwargs))[0] if torch.is_tensor(each)]
        if not any(map(self._is_on_device, tensors)) or _moves_no_data(func):
            return func(*args, **kwargs)
        return self._run(func, args, kwargs)

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        real_of: dict[int, torch.Tensor] = {}
        storages: dict[
            int, torch.UntypedStorage
        ] = {}  # of what is on the device, by its twin's address
        own: set[int] = set()  # of arguments on the host
        device = 0

        def twin(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal device
            if not self._is_on_device(tensor):
                own.add(tensor.untyped_storage().data_ptr())
                return tensor
            device = self._cuda.device_of(tensor) or 0
            made = self._twin(tensor)
            real_of[id(made)] = tensor
            storages[made.untyped_storage().data_ptr()] = tensor.untyped_storage()
            kept.append(made)
            return made

        kept: list[torch.Tensor] = []
        at = tree_map_only(torch.Tensor, twin, (args, kwargs))
        result = func(*at[0], **at[1])
        collective = func.namespace in _COLLECTIVES
        for each in _written(func, *at):
            if id(each) in real_of:
                if collective:
                    raise NotImplementedError(f"{func} writes to memory of the fake device")
                self._write(real_of[id(each)], each)

        def real(tensor: Any) -> Any:
            if not torch.is_tensor(tensor) or collective:
                return tensor
            if id(tensor) in real_of:
                return real_of[id(tensor)]
            address = tensor.untyped_storage().data_ptr()
            if address in storages:
                return on_storage(storages[address], tensor)
            if address in own or not tensor.numel():
                return tensor
            target = self._allocate(tensor, device)
            self._keep(target, tensor)
            return target

        return tree_map(real, result)

    def _allocate(self, like: torch.Tensor, device: int) -> torch.Tensor:
        storage = self._cuda.allocate(like.untyped_storage().nbytes(), device)
        return on_storage(storage, like)

    def _keep(self, target: torch.Tensor, values: torch.Tensor) -> None:
        """``values`` is the twin of ``target`` from now on."""
        self._twins[target.untyped_storage().data_ptr()] = values.untyped_storage()
        self._write(target, values)

    def _write(self, real: torch.Tensor, values: torch.Tensor) -> None:
        """Enqueue a kernel that makes the memory of ``real`` what ``values``, its twin, is now."""
        if nbytes := _extent(real):
            device = self._cuda.device_of(real) or 0
            self._cuda.write_bytes(real.data_ptr(), values.data_ptr(), nbytes, device)


_NONE: Final[Callable[..., Any]] = torch.Tensor.__torch_dispatch__


def _moves_no_data(func: Any) -> bool:
    """Views, and changes of a tensor's shape or storage alone."""
    if torch.Tag.inplace_view in func.tags or func is torch.ops.aten.set_data.default:
        return True
    infos = [each.alias_info for each in func._schema.arguments if each.alias_info is not None]
    returned = [each.alias_info for each in func._schema.returns if each.alias_info is not None]
    return bool(returned) and not any(each.is_write for each in infos)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    written = []
    for position, argument in enumerate(func._schema.arguments):
        declared = argument.alias_info is not None and argument.alias_info.is_write
        unsaid = func.namespace in _COLLECTIVES and not argument.name.startswith("input")
        if not (declared or unsaid or argument.name in _UNDECLARED_WRITES):
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        written += [each for each in tree_flatten(value)[0] if torch.is_tensor(each)]
    return written
