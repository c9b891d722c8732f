"""Tensors as memory: which tensors can be stored, copies of unusual ones, the layout of their bytes, the tensors of a
state, and tensors that hold shards of their own, or consist of other tensors.
"""

from __future__ import annotations

import copy
import importlib
import operator
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed.checkpoint._sharded_tensor_utils import _flatten_sharded_tensors
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list, _init_state_dict
from torch.distributed.checkpoint.utils import find_state_dict_object
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.masked import MaskedTensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from dcp_datastates._native import Transfer
from dcp_datastates.errors import IncompatibleStateError, UnsupportedTensorError
from dcp_datastates.format.key_paths import KeyPath, flatten
from dcp_datastates.format.stored_names import WRAPPER, Box, shard_name

try:
    protocol: Any = importlib.import_module("torch.distributed.checkpoint.protocol")
except ImportError:  # before 2.15
    protocol = None
_CheckpointableTensor: Final[Any] = getattr(protocol, "CheckpointableTensor", None)


_ATTRIBUTES: Final = ("global_shape", "global_offsets", "local_offsets", "local_sizes")
"""The attributes of a plain tensor that describe the shards it holds: ``CheckpointableTensor``, from torch 2.15 on.
Copies and aliases do not inherit them.
"""


def holds_shards(tensor: torch.Tensor) -> bool:
    """Whether DCP treats ``tensor`` as shards of a larger tensor."""
    return (
        _CheckpointableTensor is not None
        and hasattr(tensor, "global_shape")  # faster than an isinstance() check of the protocol
        and isinstance(tensor, _CheckpointableTensor)
    )


def any_hold_shards(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether any of ``tensors`` holds shards."""
    return _CheckpointableTensor is not None and any(map(holds_shards, tensors))


def take_shards_of(tensor: torch.Tensor, copied: torch.Tensor) -> torch.Tensor:
    """Give ``copied`` the shard attributes of ``tensor``, if it has any; returns ``copied``."""
    if holds_shards(tensor):
        for name in _ATTRIBUTES:
            setattr(copied, name, getattr(tensor, name))
    return copied


def shard_with(tensor: Any, offsets: Sequence[int]) -> tuple[torch.Tensor, int] | None:
    """The shard in ``tensor`` that contains the chunk at ``offsets``, and the chunk's first row in the shard; None if
    there is none.
    """
    for starts, within, sizes in zip(
        tensor.global_offsets, tensor.local_offsets, tensor.local_sizes, strict=True
    ):
        if tuple(starts[1:]) == tuple(offsets[1:]) and (
            not starts or starts[0] <= offsets[0] < starts[0] + max(sizes[0], 1)
        ):
            box = tuple(slice(at, at + size) for at, size in zip(within, sizes, strict=True))
            return tensor[box], int(offsets[0] - starts[0]) if starts else 0
    return None


PLAIN_DTYPES: Final = frozenset(
    dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
    and not dtype.is_complex
    and not str(dtype).startswith("torch.q")
)
"""Dtypes whose memory always holds the plain values: not complex (may be lazily conjugated), not quantized."""


def is_wrapper(value: Any) -> bool:
    """Whether ``value`` is a tensor that consists of other tensors, or a DTensor around one."""
    if isinstance(value, DTensor):
        value = value._local_tensor
    return (
        isinstance(value, torch.Tensor)
        and type(value) is not torch.Tensor
        and value.layout is torch.strided
        and not isinstance(value, AsyncCollectiveTensor)
        and is_traceable_wrapper_subclass(value)
    )


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that has the memory: a DTensor's local shard, or a collective's result, waited for."""
    if isinstance(tensor, DTensor):
        tensor = tensor._local_tensor
    if isinstance(tensor, AsyncCollectiveTensor):
        tensor = tensor.wait()
    return tensor


def check_storable(tensor: torch.Tensor, name: str) -> None:
    """Raise :class:`UnsupportedTensorError` unless ``tensor`` is dense strided memory on a device."""
    reason, way_out = without_bytes(tensor) or (None, "")
    if reason is None and is_wrapper(tensor):
        reason = f"a {type(tensor).__name__}, which wraps other tensors"
        way_out = (
            "pass planner=DataStatesSavePlanner(), which stores them, or save it with async_save"
        )
    if reason is not None:
        raise UnsupportedTensorError(f"tensor {name!r} cannot be stored: it is {reason}; {way_out}")


def without_bytes(tensor: torch.Tensor) -> tuple[str, str] | None:
    """What ``tensor`` is, if it has no dense strided memory, and what to do instead; else None. A wrapper has its own
    tensors' memory.
    """
    if is_lazy(tensor):  # first: it refuses further questions
        return "uninitialized and has no data", "call the lazy module once, or initialize it"
    if isinstance(tensor, FakeTensor):
        return "a fake tensor and has no data", "make the state outside FakeTensorMode"
    if isinstance(tensor, MaskedTensor):
        return "masked", "use its get_data() and get_mask()"
    if tensor.is_quantized:
        return "quantized", "dequantize() it, or use its int_repr() and scales"
    if tensor.is_nested:
        return "nested", "use the tensors of its unbind()"
    if tensor.layout is not torch.strided:
        return f"of layout {tensor.layout}", "convert it to_dense(), or use its parts"
    if tensor.device.type == "meta":
        return "on the meta device and has no data", "materialize it first"
    return None


PLAIN_TYPES: Final = frozenset({torch.Tensor, torch.nn.Parameter})
_DEVICE, _DTYPE, _LAYOUT, _IS_META, _IS_NESTED = map(
    operator.attrgetter, ("device", "dtype", "layout", "is_meta", "is_nested")
)


def local_tensors(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """:func:`local_tensor` of each."""
    return tensors if set(map(type, tensors)) <= PLAIN_TYPES else list(map(local_tensor, tensors))


def are_unusual(locals_: Sequence[torch.Tensor]) -> list[bool]:
    """:func:`is_unusual` of each. Of usual ones, it is asked in passes over all: 0.3 us for each, not 2."""
    if (
        set(map(type, locals_)) <= PLAIN_TYPES
        and set(map(_DTYPE, locals_)) <= PLAIN_DTYPES
        and set(map(_LAYOUT, locals_)) <= {torch.strided}
        and not any(map(_IS_META, locals_))
        and not any(map(torch.Tensor.is_neg, locals_))
        and not any(map(_IS_NESTED, locals_))
    ):
        return [False] * len(locals_)
    return list(map(is_unusual, locals_))


def is_unusual(local: torch.Tensor) -> bool:
    """Whether the memory at ``data_ptr()`` does not hold the plain values, dense or strided."""
    return (
        type(local) not in PLAIN_TYPES  # first: an uninitialized one refuses further questions
        or local.dtype not in PLAIN_DTYPES
        or local.device.type == "meta"
        or local.layout is not torch.strided
        or local.is_neg()
        or local.is_nested
    )


def tensors_over(
    buffer: torch.Tensor,
    offsets: Sequence[int],
    shapes: Sequence[torch.Size],
    dtypes: Sequence[torch.dtype],
) -> Iterator[torch.Tensor]:
    """Dense tensors over ``buffer`` (``uint8``), each at an offset in bytes that is a multiple of its element size.

    A view of one tensor per dtype costs 1.4 us, a tensor of its own 3.3.
    """
    storage, first = buffer.untyped_storage(), buffer.storage_offset()
    whole: dict[torch.dtype, torch.Tensor] = {}
    strides: dict[torch.Size, tuple[int, ...]] = {}
    for offset, shape, dtype in zip(offsets, shapes, dtypes, strict=True):
        if dtype not in whole:
            whole[dtype] = torch.empty(0, dtype=dtype, device="cpu").set_(storage)
        if shape not in strides:
            strides[shape] = tuple(dense_strides(shape, 1))
        yield whole[dtype].as_strided(shape, strides[shape], (first + offset) // dtype.itemsize)


def dense_strides(sizes: Sequence[int], itemsize: int) -> list[int]:
    """The strides of a row-major array of these sizes, in bytes."""
    strides = [itemsize] * len(sizes)
    for dimension in reversed(range(1, len(sizes))):
        strides[dimension - 1] = strides[dimension] * sizes[dimension]
    return strides


def add_region(
    content: Transfer,
    offset: int,
    tensor: torch.Tensor,
    nbytes: int,
    group: int = 0,
    device: int = -1,
) -> None:
    """Add the dense (row-major) bytes of a tensor to ``content`` at ``offset``. Device -1 is the host."""
    if tensor.is_contiguous():
        content.add(offset, nbytes, tensor.data_ptr(), group, device)
        return
    itemsize = tensor.element_size()
    sizes = list(tensor.shape)
    dense = dense_strides(sizes, itemsize)
    strides = [stride * itemsize for stride in tensor.stride()]
    content.add_strided(offset, itemsize, sizes, dense, tensor.data_ptr(), strides, group, device)


def copy_unusual(tensor: torch.Tensor, local: torch.Tensor, name: str) -> torch.Tensor:
    """A host copy of a tensor that the fast path cannot copy: on an unknown device, complex, conjugated …"""
    check_storable(local, name)
    copied = local.detach().resolve_conj().resolve_neg()
    copied = copied.clone(memory_format=torch.contiguous_format) if copied.is_cpu else copied.cpu()
    if isinstance(tensor, DTensor):
        copied = DTensor(copied, tensor._spec, requires_grad=False)  # type: ignore[no-untyped-call]
    return take_shards_of(tensor, copied)


def copy_sharded(tensor: ShardedTensor, name: str) -> ShardedTensor:
    """A host copy of a ``ShardedTensor`` (FSDP1); never deferred, because it cannot be associated with an optimizer."""
    shards = []
    for shard in tensor.local_shards():
        if isinstance(shard.tensor, ShardedTensor):
            copied: torch.Tensor = copy_sharded(shard.tensor, name)
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


# ---- a state, as DCP's loads see it --------------------------------------------------------------


def flattened(state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, KeyPath]]:
    """The values in ``state`` by their names, and where they are.

    If there is a process group, tensors on the meta device get memory, in ``state``, too, as by DCP. Raises
    :class:`IncompatibleStateError` if two values have one name, or a container contains itself.
    """
    try:
        values, paths = flatten(state)
        tensors = [each for each in values.values() if isinstance(each, torch.Tensor)]
        has_meta = any(device.type == "meta" for device in set(map(_DEVICE, tensors)))
        if has_meta and dist.is_initialized():
            _init_state_dict(state)
            values, paths = flatten(state)
        if any(issubclass(kind, ShardedTensor) for kind in set(map(type, values.values()))):
            values, paths = flatten(_flatten_sharded_tensors(state))
        return values, paths
    except ValueError as error:
        raise IncompatibleStateError(f"two values of the state have one name: {error}") from error
    except RecursionError as error:
        raise IncompatibleStateError(
            "the state cannot be loaded into: a dict or list in it contains itself"
        ) from error


def shards_as_dcp_sees_them(
    name: str, value: Any
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], torch.Tensor]]:
    """Where each shard that this rank has of ``value`` begins, its sizes, in elements, and the shard."""
    for number, chunk in enumerate(_create_chunk_list(value)):
        at = MetadataIndex(name, chunk.offsets, number)
        yield tuple(chunk.offsets), tuple(chunk.sizes), find_state_dict_object({name: value}, at)


def is_elsewhere(value: Any) -> bool:
    """Whether it is a DTensor of whose mesh this rank is no part: it holds nothing of it."""
    return isinstance(value, DTensor) and value.device_mesh.get_coordinate() is None


# ---- wrapper subclasses: tensors that consist of other tensors -----------------------------------
# Such as torchao's 8-bit optimizer states. A wrapper `w` is stored as its parts: a nested dict that has each inner
# tensor under its attribute's name, and under `__wrapper__` a text (UTF-8, `uint8`) with the class and the context of
# `__tensor_flatten__`. A DTensor around a wrapper has such a dict for each shard, under the shard's place:
# `w.[0:128,0:64].codes`.


_CANNOT_CONTAIN: Final = frozenset(
    {torch.Tensor, torch.nn.Parameter, type(None), bool, int, float, complex, str, bytes}
)
_VARIES: Final = re.compile(r" at 0x[0-9a-f]+|device\(.*?\)")
"""What the text of a context need not have in common with that of another process."""


def opened(value: Any) -> Any:
    """``value`` with the parts of each wrapper in its place, in nested dicts and lists; itself if it has no wrapper."""
    if isinstance(value, Mapping):
        kinds = {
            type(each._local_tensor if type(each) is DTensor else each) for each in value.values()
        }
        if kinds <= _CANNOT_CONTAIN:  # most often
            return value
        found = {key: opened(each) for key, each in value.items()}
        return value if all(map(operator.is_, found.values(), value.values())) else found
    if type(value) is list:
        elements = list(map(opened, value))
        return value if all(map(operator.is_, elements, value)) else elements
    if not is_wrapper(value):
        return value
    if is_elsewhere(value):
        # This rank is not in the mesh: DCP leaves the DTensor out, but would store an empty dict.
        return DTensor(
            torch.empty(0, dtype=value.dtype, device="cpu"), value._spec, requires_grad=False
        )  # type: ignore[no-untyped-call]
    return parts(value)


def parts(wrapper: torch.Tensor) -> dict[str, Any]:
    """The tensors of a wrapper, or of a DTensor around one; wrappers among them as their parts."""
    if isinstance(wrapper, DTensor):
        return {shard_name(box(wrapper)): parts(local_tensor(wrapper))}
    names, _context = wrapper.__tensor_flatten__()  # type: ignore[attr-defined]
    found = {name: opened(getattr(wrapper, name)) for name in names}
    text = bytearray(kind(wrapper).encode())
    return {**found, WRAPPER: torch.frombuffer(text, dtype=torch.uint8)}


def kind(wrapper: torch.Tensor) -> str:
    """The class and the context of a wrapper, and of the wrappers within it."""
    names, context = wrapper.__tensor_flatten__()  # type: ignore[attr-defined]
    of = type(wrapper)
    said = f"{of.__module__}.{of.__qualname__} {_VARIES.sub('', repr(context))}"
    within = {name: getattr(wrapper, name) for name in names}
    return said + "".join(
        f"; {name}: {kind(local_tensor(inner))}"
        for name, inner in within.items()
        if is_wrapper(inner)
    )


def box(tensor: torch.Tensor) -> Box:
    """The begin and end, in each dimension, of what this rank holds of a tensor. It must be in a DTensor's mesh."""
    if not isinstance(tensor, DTensor):
        return tuple((0, size) for size in tensor.shape)
    sizes, begins = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return tuple((begin, begin + size) for begin, size in zip(begins, sizes, strict=True))


def inner_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The local tensors with the memory of ``tensor``: itself, or the innermost tensors of a wrapper."""
    if not is_wrapper(tensor):
        return [local_tensor(tensor)]
    wrapper = local_tensor(tensor)
    names, _context = wrapper.__tensor_flatten__()  # type: ignore[attr-defined]
    return [inner for name in names for inner in inner_tensors(getattr(wrapper, name))]


def layers(tensor: torch.Tensor) -> list[torch.Tensor]:
    """``tensor`` and all tensors within it: the local tensor of a DTensor, the inner tensors of a wrapper. Each has a
    version counter of its own.
    """
    if isinstance(tensor, DTensor):
        return [tensor, *layers(tensor._local_tensor)]
    if not is_wrapper(tensor):
        return [tensor]
    names, _context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    return [tensor, *(layer for name in names for layer in layers(getattr(tensor, name)))]


def wrappers_in(value: Any) -> list[torch.Tensor]:
    """The wrappers in nested dicts and lists, and the DTensors around them."""
    if isinstance(value, Mapping):
        return [wrapper for each in value.values() for wrapper in wrappers_in(each)]
    if type(value) is list:
        return [wrapper for each in value for wrapper in wrappers_in(each)]
    return [value] if is_wrapper(value) else []
