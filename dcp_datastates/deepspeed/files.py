"""One of DeepSpeed's files, as values that a checkpoint can store: its tensors by name, and all the rest pickled.

The pickle keeps Python's types (keys that are ints, ordered dicts, namespaces), and contains a reference where a tensor
was. ``torch.save`` does the same. Unpickling runs code, as ``torch.load`` with ``weights_only=False`` does, which is
what DeepSpeed uses: load only files that you trust.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from dcp_datastates.io.tensor_memory import is_unusual

MapLocation = str | torch.device | dict[str, str] | Callable[[Any, str], Any] | None
"""``map_location`` of ``torch.load``."""

STRUCTURE = "structure"
TENSORS = "tensors"


class _Reference(NamedTuple):
    """Stands for a tensor in the pickle. It is pickled as a plain tuple."""

    name: str
    is_parameter: bool
    requires_grad: bool
    device: str


def pack(state: Any) -> dict[str, Any]:
    """The values to store for ``state``, any object that ``torch.save`` can store.

    Returns two values: the bytes of the pickle, and a dict of names to tensors, which share the memory of those in
    ``state``. Tensors over the same elements are stored once. The Python values are those of the time of the call.
    Raises what pickle raises for an object that cannot be pickled.
    """
    buffer = io.BytesIO()
    packer = _Packer(buffer, state)
    packer.dump(state)
    return {STRUCTURE: buffer.getvalue(), TENSORS: packer.tensors}


def unpack(values: Mapping[str, Any], map_location: MapLocation = None) -> Any:
    """The state whose values :func:`pack` has returned; ``map_location`` as for ``torch.load``."""
    buffer = io.BytesIO(values[STRUCTURE])
    return _Unpacker(buffer, values.get(TENSORS, {}), map_location).load()


class _Packer(pickle.Pickler):
    def __init__(self, buffer: io.BytesIO, state: Any) -> None:
        super().__init__(buffer)
        self.tensors: dict[str, torch.Tensor] = {}
        self._names = {id(tensor): name for name, tensor in _named(state, "", set())}
        self._stored: dict[Any, str] = {}

    def persistent_id(self, value: Any) -> tuple[Any, ...] | None:
        if type(value) not in (torch.Tensor, torch.nn.Parameter):
            return None
        # An alias: assigning ``value.data`` does not change the memory of the alias.
        tensor = value.detach()
        if is_unusual(tensor):
            return None  # a sparse tensor, say: a part of the pickle
        reference = _Reference(
            self._name(value, tensor),
            isinstance(value, torch.nn.Parameter),
            value.requires_grad,
            str(tensor.device),
        )
        return tuple(reference)

    def _name(self, value: torch.Tensor, tensor: torch.Tensor) -> str:
        place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        name = self._stored.get(place)
        if name is None:
            wanted = name = self._names.get(id(value), "tensor")
            while name in self.tensors:
                name = f"{wanted}#{len(self.tensors)}"
            self._stored[place] = name
            self.tensors[name] = tensor
        return name


def _named(value: Any, name: str, within: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in dicts, lists and tuples, named by their keys and positions. Others are found by the pickle."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, (Mapping, list, tuple)) and id(value) not in within:
        within = within | {id(value)}
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, element in items:
            yield from _named(element, f"{name}.{key}" if name else str(key), within)


class _Unpacker(pickle.Unpickler):
    def __init__(
        self, buffer: io.BytesIO, tensors: Mapping[str, torch.Tensor], map_location: MapLocation
    ) -> None:
        super().__init__(buffer)
        self._tensors = tensors
        self._map_location = map_location
        self._moved: dict[str, torch.Tensor] = {}
        self._made: dict[_Reference, torch.Tensor] = {}

    def persistent_load(self, pid: Any) -> torch.Tensor:
        reference = _Reference(*pid)
        made = self._made.get(reference)
        if made is None:
            made = self._made[reference] = self._make(reference)
        return made

    def _make(self, reference: _Reference) -> torch.Tensor:
        tensor = self._moved.get(reference.name)
        if tensor is None:
            tensor = _moved(self._tensors[reference.name], reference.device, self._map_location)
            self._moved[reference.name] = tensor
        if reference.is_parameter:
            return torch.nn.Parameter(tensor, requires_grad=reference.requires_grad)
        return tensor.detach().requires_grad_(reference.requires_grad)


def _moved(tensor: torch.Tensor, device: str, map_location: MapLocation) -> torch.Tensor:
    """``tensor``, which was saved on ``device``, at the device that ``map_location`` chooses for it."""
    if map_location is None:
        return tensor.to(device)
    if isinstance(map_location, dict):
        return tensor.to(map_location.get(device, device))
    if callable(map_location):
        chosen = map_location(tensor.untyped_storage(), device)
        return tensor.to(device if chosen is None else chosen.device)
    return tensor.to(map_location)
