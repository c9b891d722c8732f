"""Wrapper subclasses: tensors that consist of other tensors, such as torchao's 8-bit optimizer states.

A wrapper ``w`` is stored as its parts: a nested dict that has each inner tensor under its attribute's name, and under
``__wrapper__`` a text (UTF-8, ``uint8``) with the class and the context of ``__tensor_flatten__``. A DTensor around a
wrapper has such a dict for each shard, under the shard's place: ``w.[0:128,0:64].codes``.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from dcp_datastates.format.stored_names import WRAPPER, Box, shard_name
from dcp_datastates.io.tensor_memory import is_wrapper, local_tensor

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
    if isinstance(value, DTensor) and value.device_mesh.get_coordinate() is None:
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
