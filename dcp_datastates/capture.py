"""What a state dict holds at the call of ``async_save``: tensors to read later, and copies of the rest.

Each tensor is *deferred* (an optimizer owns it, so the step gate can hold its change back) or *eager*
(copied now). Everything that is not a tensor is copied now. The result is a :class:`StagedStateDict`,
the mapping that DCP's thread plans and saves.

Speed matters here and nowhere else in this package's Python: this runs in the training thread.
"""

from __future__ import annotations

import copy
import io
import operator
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import compress, count
from typing import Any, Final, cast

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

_NBYTES: Final = operator.attrgetter("nbytes")
_IS_CPU: Final = operator.attrgetter("is_cpu")

_SLOT: Final = 64
"""Eager copies are aligned to this many bytes in their buffer."""

_ATOMS: Final = frozenset(
    {
        *(type(None), bool, int, float, complex, str, bytes),
        *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format),
    }
)
_COMMON: Final = frozenset({torch.Tensor, DTensor})
_JUST_TENSORS: Final = frozenset({torch.Tensor})
_COMMON_OR_ATOMS: Final = _ATOMS | _COMMON
# dtypes whose memory is the value: not complex (may be lazily conjugated), not quantized.
_PLAIN: Final = {
    dtype
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
    groups: list[int] = field(default_factory=list)
    addresses: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    """Bytes, if contiguous; else one element's."""
    names: list[tuple[str, Any]] = field(default_factory=list)
    """(prefix, key), which together are the FQN."""


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
    walk = _Walk()
    root = walk.mapping(state_dict, "")
    deferred, copied = _classify(walk, ownership, defer)
    content = Transfer()
    nbytes = 0
    eager = []
    for position in copied:
        container, key = walk.containers[position], walk.keys[position]
        tensor, local = walk.tensors[position], walk.locals[position]
        if _is_unusual(local):
            container[key] = _copy_unusual(tensor, local, walk.name(position))
            continue
        eager.append((container, key, tensor, local, nbytes))
        if local.nbytes:
            add_region(content, nbytes, local, local.nbytes, 0)
            nbytes += local.nbytes + -local.nbytes % _SLOT
    buffer = None
    if eager:
        buffer = allocate(max(nbytes, 1))
        engine.gather(content, buffer.data_ptr(), nbytes)
    return Capture(root, deferred, eager, buffer, nbytes)


class _Walk:
    """One walk over a state dict: its staged copy, and columns over its tensors."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.locals: list[torch.Tensor] = []
        self.containers: list[Any] = []
        self.prefixes: list[str] = []
        self.keys: list[Any] = []

    def name(self, position: int) -> str:
        return f"{self.prefixes[position]}{self.keys[position]}"

    def mapping(self, source: Mapping[Any, Any], prefix: str) -> dict[Any, Any]:
        staged: dict[Any, Any] = (
            OrderedDict(source) if isinstance(source, OrderedDict) else dict(source)
        )
        # The common case in a few passes of C: nearly all values are tensors or numbers.
        tensors = [value for value in source.values() if type(value) in _COMMON]
        locals_ = [value._local_tensor if type(value) is DTensor else value for value in tensors]
        if set(map(type, locals_)) <= _JUST_TENSORS:
            self.tensors += tensors
            self.locals += locals_
            self.keys += [key for key, value in source.items() if type(value) in _COMMON]
            self.containers += [staged] * len(tensors)
            self.prefixes += [prefix] * len(tensors)
            done = _COMMON_OR_ATOMS
        else:
            done = _ATOMS
        others = [(key, value) for key, value in source.items() if type(value) not in done]
        for key, value in others:
            staged[key] = self._leaf(staged, key, value, type(value), prefix)
        return staged

    def _leaf(self, container: Any, key: Any, value: Any, kind: type, prefix: str) -> Any:
        """What to put in ``value``'s place."""
        if kind is torch.Tensor:
            local = value
        elif kind is torch.nn.Parameter:
            # An alias of our own: ``parameter.data = …`` cannot take the memory from under it.
            value = local = value.detach()
        elif isinstance(value, ShardedTensor):
            return _copy_sharded(value, f"{prefix}{key}")
        elif isinstance(value, torch.Tensor):
            local = local_tensor(value)
        elif isinstance(value, Mapping):
            return self.mapping(value, f"{prefix}{key}.")
        elif kind is list and not all(type(element) in _ATOMS for element in value):
            staged: list[Any] = list(value)
            inner = f"{prefix}{key}."
            for position, element in enumerate(value):
                if type(element) not in _ATOMS:
                    staged[position] = self._leaf(staged, position, element, type(element), inner)
            return staged
        else:
            return _copy_object(value, f"{prefix}{key}")
        self.tensors.append(value)
        self.locals.append(local)
        self.containers.append(container)
        self.prefixes.append(prefix)
        self.keys.append(key)
        return value


def _classify(
    walk: _Walk, ownership: Ownership, defer: Defer
) -> tuple[DeferredTensors, Iterable[int]]:
    """The deferred tensors, and the positions of those to copy.

    Works by columns: a call per tensor and attribute from C costs half of what it costs in a loop.
    """
    locals_ = walk.locals
    if defer == "none":
        return DeferredTensors(), range(len(locals_))
    try:
        addresses = list(map(torch.Tensor.data_ptr, locals_))
        sizes = list(map(_NBYTES, locals_))
        groups = ownership.groups(locals_)
        dense = list(map(torch.Tensor.is_contiguous, locals_))
        on_host = map(_IS_CPU, locals_)
    except (RuntimeError, NotImplementedError, TypeError):  # one without memory of its own
        _check_all(walk)
        raise
    unowned = UNOWNED if defer == "all" else None
    if unowned is not None:
        groups = [
            unowned if group is None and not _is_unusual(local) else group
            for group, local in zip(groups, locals_, strict=True)
        ]
    late = [
        group is not None and nbytes >= EAGER_BELOW_BYTES and host
        for group, nbytes, host in zip(groups, sizes, on_host, strict=True)
    ]
    deferred = DeferredTensors(
        list(compress(walk.tensors, late)),
        list(compress(locals_, late)),
        list(compress(cast("list[int]", groups), late)),
        list(compress(addresses, late)),
        list(compress(sizes, late)),
        list(compress(zip(walk.prefixes, walk.keys, strict=True), late)),
    )
    if not all(dense):
        for position, local in enumerate(deferred.locals):
            if not local.is_contiguous():
                deferred.sizes[position] = local.element_size()
    return deferred, compress(count(), map(operator.not_, late))


def _check_all(walk: _Walk) -> None:
    for position, local in enumerate(walk.locals):
        check_storable(local, walk.name(position))


def _is_unusual(local: torch.Tensor) -> bool:
    """Whether the memory at ``data_ptr()`` is not simply the value, dense or strided, on the host."""
    return (
        local.dtype not in _PLAIN
        or not local.is_cpu
        or local.layout is not torch.strided
        or local.is_neg()
        or local.is_nested
        or type(local) is not torch.Tensor
    )


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
