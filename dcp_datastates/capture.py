"""What a state dict holds at the call of ``async_save``: tensors to read later, and copies of the rest.

Each tensor is *deferred* (an optimizer owns it, so the step gate can hold its change back) or *eager*
(copied now). Everything that is not a tensor is copied now. The result is a :class:`StagedStateDict`,
the mapping that DCP's thread plans and saves.

Speed matters here and nowhere else in this package's Python: this runs in the training thread.
"""

from __future__ import annotations

import copy
import io
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from dcp_datastates._native import Engine, Transfer
from dcp_datastates.config import EAGER_BELOW_BYTES, Defer
from dcp_datastates.errors import ConfigurationError, UnsupportedTensorError
from dcp_datastates.ownership import UNOWNED, Ownership, local_tensor

__all__ = ["Capture", "DeferredTensors", "StagedStateDict", "capture", "check_storable"]

_SLOT: Final = 64
"""Eager copies are aligned to this many bytes in their buffer."""

_ATOMS: Final = frozenset(
    {
        *(type(None), bool, int, float, complex, str, bytes),
        *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format),
    }
)
# dtypes whose memory is the value: not complex (may be lazily conjugated), not quantized.
_PLAIN: Final = {
    dtype: dtype.itemsize
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
    and not dtype.is_complex
    and not str(dtype).startswith("torch.q")
}


def _is_wrapper(tensor: Any) -> bool:
    return not isinstance(tensor, DTensor) and is_traceable_wrapper_subclass(tensor)


def check_storable(tensor: torch.Tensor, name: str) -> None:
    """Raise :class:`UnsupportedTensorError` unless ``tensor`` is dense strided memory on a device."""
    if tensor.is_quantized:
        reason, way_out = "quantized", "dequantize() it, or save its int_repr() and scales"
    elif tensor.is_nested or tensor.layout is not torch.strided:
        reason, way_out = f"of layout {tensor.layout}", "convert it to_dense(), or save its parts"
    elif tensor.device.type == "meta":
        reason, way_out = "on the meta device and has no data", "materialize it before saving"
    elif _is_wrapper(tensor):
        reason = f"a {type(tensor).__name__}, which wraps other tensors"
        way_out = "save the tensors inside it"
    else:
        return
    raise UnsupportedTensorError(f"tensor {name!r} cannot be stored: it is {reason}; {way_out}")


@dataclass
class DeferredTensors:
    """Columns over the deferred tensors: one entry each."""

    tensors: list[torch.Tensor] = field(default_factory=list)
    """As they stand in the staged state: the local tensor itself, or a DTensor around it."""
    locals: list[torch.Tensor] = field(default_factory=list)
    storages: list[torch.UntypedStorage] = field(default_factory=list)
    """Keep the memory alive, also when ``tensor.data`` is replaced."""
    groups: list[int] = field(default_factory=list)
    addresses: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    """Bytes, if contiguous; else one element's."""
    names: list[str] = field(default_factory=list)


@dataclass
class _Eager:
    """Copies to make, and where the tensors over them belong."""

    content: Transfer = field(default_factory=Transfer)
    places: list[tuple[Any, Any, torch.Tensor, torch.Tensor, int]] = field(default_factory=list)
    """(container, key, tensor, its local tensor, offset in the buffer)"""
    nbytes: int = 0


@dataclass
class Capture:
    """All that was captured. ``buffer`` holds the eager copies."""

    root: dict[Any, Any]
    deferred: DeferredTensors
    eager: list[tuple[Any, Any, torch.Tensor, torch.Tensor, int]]
    buffer: torch.Tensor | None
    eager_bytes: int

    def materialize(self) -> dict[Any, Any]:
        """Put tensors over the eager copies in their places; the state dict as it was at the call."""
        for container, key, tensor, local, offset in self.eager:
            assert self.buffer is not None
            copied = _over(self.buffer, offset, local)
            if isinstance(tensor, DTensor):
                copied = DTensor(copied, tensor._spec, requires_grad=False)  # type: ignore[no-untyped-call]
            container[key] = copied
        self.eager = []
        self.buffer = None
        return self.root


def _over(buffer: torch.Tensor, offset: int, like: torch.Tensor) -> torch.Tensor:
    """A dense tensor over ``buffer`` at ``offset``, with the shape and dtype of ``like``."""
    shape = like.shape
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    element = like.element_size()
    result = torch.empty(0, dtype=like.dtype)
    return result.set_(
        buffer.untyped_storage(),
        (buffer.storage_offset() + offset) // element,
        shape,
        strides[::-1],
    )


def capture(
    state_dict: Mapping[str, Any],
    ownership: Ownership,
    defer: Defer,
    engine: Engine,
    allocate: Callable[[int], torch.Tensor],
) -> Capture:
    """Classify every leaf of ``state_dict`` and copy what cannot be read later.

    ``allocate`` gives a ``uint8`` host buffer of the size asked for; it is called at most once. Raises
    :class:`UnsupportedTensorError` naming a tensor that cannot be stored, before anything is copied.
    """
    pass_ = _Pass(ownership, defer)
    root = pass_.mapping(state_dict, "")
    eager = pass_.eager
    buffer = None
    if eager.places:
        buffer = allocate(max(eager.nbytes, 1))
        engine.gather(eager.content, buffer.data_ptr(), eager.nbytes)
    return Capture(root, pass_.deferred, eager.places, buffer, eager.nbytes)


class _Pass:
    """One walk over a state dict, building its staged copy and the columns."""

    def __init__(self, ownership: Ownership, defer: Defer) -> None:
        self.deferred = DeferredTensors()
        self.eager = _Eager()
        self._group = ownership.group
        self._unowned = UNOWNED if defer == "all" else None
        self._eager_below = EAGER_BELOW_BYTES if defer != "none" else math.inf
        self._columns: tuple[list[int], list[int], list[int]] = ([], [], [])

    def mapping(self, source: Mapping[Any, Any], prefix: str) -> dict[Any, Any]:
        staged: dict[Any, Any] = (
            {} if type(source) is dict else OrderedDict() if isinstance(source, OrderedDict) else {}
        )
        for key, value in source.items():
            staged[key] = value
            kind = type(value)
            if kind in _ATOMS:
                continue
            if isinstance(value, torch.Tensor):
                self._tensor(staged, key, value, kind, prefix)
            else:
                self._other(staged, key, value, prefix)
        return staged

    def _other(self, container: Any, key: Any, value: Any, prefix: str) -> None:
        if isinstance(value, Mapping):
            container[key] = self.mapping(value, f"{prefix}{key}.")
        elif type(value) is list and not all(type(element) in _ATOMS for element in value):
            staged: list[Any] = list(value)
            container[key] = staged
            for position, element in enumerate(value):
                if isinstance(element, torch.Tensor):
                    self._tensor(staged, position, element, type(element), f"{prefix}{key}.")
                elif type(element) not in _ATOMS:
                    self._other(staged, position, element, f"{prefix}{key}.")
        else:
            container[key] = _copy_object(value, f"{prefix}{key}")

    def _tensor(
        self, container: Any, key: Any, tensor: torch.Tensor, kind: type, prefix: str
    ) -> None:
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            local = tensor
        elif isinstance(tensor, ShardedTensor):
            container[key] = _copy_sharded(tensor, f"{prefix}{key}")
            return
        else:
            local = local_tensor(tensor)
        itemsize = _PLAIN.get(local.dtype)
        if (
            itemsize is None
            or not local.is_cpu
            or local.layout is not torch.strided
            or local.is_neg()
            or local.is_nested
            or not (type(local) is torch.Tensor or type(local) is torch.nn.Parameter)
        ):
            container[key] = _copy_unusual(tensor, local, f"{prefix}{key}")
            return
        address = local.data_ptr()
        nbytes = local.numel() * itemsize
        if nbytes >= self._eager_below:
            group = self._group(address - int(local.storage_offset()) * itemsize)
            if group is None:
                group = self._unowned
            if group is not None:
                if kind is torch.nn.Parameter:
                    # An alias of our own: ``parameter.data = …`` cannot take the memory from under it.
                    container[key] = tensor = local = local.detach()
                deferred = self.deferred
                deferred.tensors.append(tensor)
                deferred.locals.append(local)
                deferred.storages.append(local.untyped_storage())
                deferred.groups.append(group)
                deferred.addresses.append(address)
                deferred.sizes.append(nbytes if local.is_contiguous() else itemsize)
                deferred.names.append(f"{prefix}{key}")
                return
        eager = self.eager
        eager.places.append((container, key, tensor, local, eager.nbytes))
        if nbytes:
            add_region(eager.content, eager.nbytes, local, nbytes, 0)
            eager.nbytes += nbytes + -nbytes % _SLOT


def add_region(
    content: Transfer, offset: int, tensor: torch.Tensor, nbytes: int, group: int
) -> None:
    """Add the dense (row-major) bytes of a host tensor to ``content`` at ``offset``."""
    if tensor.is_contiguous():
        content.add(offset, nbytes, tensor.data_ptr(), group)
        return
    itemsize = tensor.element_size()
    sizes = list(tensor.shape)
    dense = [0] * len(sizes)
    step = itemsize
    for dimension in reversed(range(len(sizes))):
        dense[dimension] = step
        step *= sizes[dimension]
    strides = [stride * itemsize for stride in tensor.stride()]
    content.add_strided(offset, itemsize, sizes, dense, tensor.data_ptr(), strides, group)


def _copy_unusual(tensor: torch.Tensor, local: torch.Tensor, name: str) -> torch.Tensor:
    """A host copy of a tensor that the fast path does not take: on a device, complex, conjugated …"""
    check_storable(local, name)
    copied = local.detach().resolve_conj().resolve_neg()
    copied = copied.clone(memory_format=torch.contiguous_format) if copied.is_cpu else copied.cpu()
    if isinstance(tensor, DTensor):
        copied = DTensor(copied, tensor._spec, requires_grad=False)  # type: ignore[no-untyped-call]
    return copied


def _copy_sharded(tensor: ShardedTensor, name: str) -> ShardedTensor:
    """A host copy of a ``ShardedTensor`` (FSDP1); never deferred, for nothing ties it to an optimizer."""
    shards = []
    for shard in tensor.local_shards():
        if isinstance(shard.tensor, ShardedTensor):
            copied: torch.Tensor = _copy_sharded(shard.tensor, name)
        else:
            check_storable(shard.tensor, name)
            copied = shard.tensor.detach().clone(memory_format=torch.contiguous_format)
            copied.requires_grad_(shard.tensor.requires_grad)
        shards.append(Shard(copied, copy.deepcopy(shard.metadata)))
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        shards,
        copy.deepcopy(tensor.metadata()),
        process_group=tensor._process_group,
        init_rrefs=tensor._init_rrefs,
        sharding_spec=tensor.sharding_spec(),
    )


def _copy_object(value: Any, name: str) -> Any:
    try:
        return copy.deepcopy(value)
    except Exception:  # what cannot be deep-copied can often be saved all the same, as DCP would
        buffer = io.BytesIO()
        try:
            torch.save(value, buffer)
        except Exception as error:
            raise TypeError(
                f"object {name!r} of type {type(value).__name__} can be neither copied nor pickled: {error}"
            ) from error
        buffer.seek(0)
        return torch.load(buffer, weights_only=False)  # our own bytes, written a line above


class StagedStateDict(Mapping[Any, Any]):
    """The state at the call, as DCP's thread sees it: built in full when first looked at.

    ``begin`` runs once, in the thread that first looks (DCP's, which thereby becomes the thread of this
    save) and returns the state dict. Until then it is a token. It cannot be pickled; who tries is told
    why, and ``abandon`` is called.
    """

    def __init__(
        self, begin: Callable[[], dict[Any, Any]], abandon: Callable[[BaseException], None]
    ) -> None:
        self._begin: Callable[[], dict[Any, Any]] | None = begin
        self._abandon = abandon
        self._staged: dict[Any, Any] = {}

    def _state(self) -> dict[Any, Any]:
        if self._begin is not None:
            begin, self._begin = self._begin, None
            self._staged = begin()
        return self._staged

    def __getitem__(self, key: Any) -> Any:
        return self._state()[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._state())

    def __len__(self) -> int:
        return len(self._state())

    def __reduce__(self) -> Any:
        error = ConfigurationError(
            "a state staged by DataStatesWriter lives in this process and cannot be sent to another: "
            "use async_checkpointer_type=AsyncCheckpointerType.THREAD (the default); "
            "AsyncCheckpointerType.PROCESS is not supported"
        )
        self._abandon(error)
        raise error
