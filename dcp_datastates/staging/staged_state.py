"""A staged state: the copy of a state dict as it was at the call, and columns over its tensors.

One traversal makes it (:func:`traverse`). Values other than tensors are copied there. Tensors are only listed;
:mod:`dcp_datastates.staging.stage` decides which are copied now and which are read later.

The columns give the state's fingerprint, too: its structure without values. Equal fingerprints mean equal plans.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import io
import operator
import pickle
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain, compress
from typing import Any, Final

import numpy as np
import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.tensor import DTensor

from dcp_datastates._native import DeviceEvent, ExpectedBytes, Slab
from dcp_datastates.errors import UnsupportedStateError, UnsupportedTensorError
from dcp_datastates.format.ragged import Ints
from dcp_datastates.format.stored_names import WRAPPER
from dcp_datastates.io.devices import HOST, DeviceCopies
from dcp_datastates.io.tensor_memory import (
    copy_sharded,
    local_tensor,
    opened,
    take_shards_of,
    tensors_over,
    wrappers_in,
)
from dcp_datastates.staging.ownership import STABLE, Ownership

_ATOMS: Final = frozenset(
    {
        *(type(None), bool, int, float, complex, str, bytes),
        *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format),
    }
)
_COMMON: Final = frozenset({torch.Tensor, DTensor})
_COMMON_OR_ATOMS: Final = _ATOMS | _COMMON
_JUST_TENSORS: Final = frozenset({torch.Tensor})
_JUST_STRINGS: Final = frozenset({str})
_PLAIN: Final = frozenset({torch.Tensor, torch.nn.Parameter, DTensor})
_DTYPE: Final = operator.attrgetter("dtype")
_REQUIRES_GRAD: Final = operator.attrgetter("requires_grad")
_SHAPE: Final = operator.attrgetter("shape")
_NOTHING: Final = torch.empty(0, dtype=torch.uint8, device="cpu")


@dataclass
class Columns:
    """Columns over the tensors of a state dict, with one entry per tensor."""

    tensors: list[torch.Tensor] = field(default_factory=list)
    """The values in the staged state: the local tensor itself, or a DTensor around it."""
    locals: list[torch.Tensor] = field(default_factory=list)
    """The local tensors, which have the memory."""
    containers: list[Any] = field(default_factory=list)
    """The staged dict or list that contains each tensor, under its key."""
    keys: list[Any] = field(default_factory=list)
    prefixes: list[str] = field(default_factory=list)

    def name(self, position: int) -> str:
        """The FQN, as DCP flattens state dicts."""
        return f"{self.prefixes[position]}{self.keys[position]}"

    def where(self, mask: Iterable[bool]) -> Columns:
        """The entries for which ``mask`` is true."""
        mask = list(mask)
        return Columns(*(list(compress(column, mask)) for column in vars(self).values()))


@dataclass
class DeferredTensors:
    """The deferred tensors, and columns about them."""

    columns: Columns = field(default_factory=Columns)
    groups: list[int] = field(default_factory=list)
    addresses: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    devices: list[int] = field(default_factory=list)
    """Each tensor's device; -1 for the host."""
    storages: list[torch.UntypedStorage] = field(default_factory=list)

    def where(self, mask: list[bool]) -> DeferredTensors:
        """The entries for which ``mask`` is true."""
        columns, *further = vars(self).values()
        return DeferredTensors(
            columns.where(mask), *(list(compress(each, mask)) for each in further)
        )


@dataclass
class Traversal:
    """The result of a traversal."""

    columns: Columns = field(default_factory=Columns)
    structure: list[tuple[Any, tuple[type, ...]]] = field(default_factory=list)
    """For every container: the keys of a mapping, or the name of a list; and the types of the values."""
    wrappers: list[torch.Tensor] = field(default_factory=list)
    """The wrappers whose parts are among the tensors."""


def traverse(state_dict: Mapping[Any, Any]) -> tuple[dict[Any, Any], Traversal]:
    """The staged copy of ``state_dict``, which contains the original tensors, and columns over them.

    Containers that DCP flattens are copied; other objects are deep-copied; a dict of its parts replaces each wrapper
    (:mod:`dcp_datastates.io.tensor_memory`). Raises :class:`UnsupportedStateError` if the
    state is not a mapping, or, naming it, for an object that cannot be stored.
    """
    check_mapping(state_dict)
    found = Traversal()
    source = opened(state_dict)
    if source is not state_dict:
        found.wrappers = wrappers_in(state_dict)
    return _mapping(source, "", found), found


def check_mapping(state: object) -> None:
    """Raise :class:`UnsupportedStateError` unless ``state`` is a mapping, as DCP requires."""
    if not isinstance(state, Mapping):
        raise UnsupportedStateError(
            f"the state is a {type(state).__name__}, and DCP saves a mapping of names to tensors and objects: "
            f'pass {{"state": …}}, or model.state_dict(); it is save(state, path)'
        )


def _mapping(source: Mapping[Any, Any], prefix: str, found: Traversal) -> dict[Any, Any]:
    columns = found.columns
    keys: tuple[Any, ...] = tuple(source)
    if not set(map(type, keys)) <= _JUST_STRINGS:
        # 1, 1.0 and True are equal, but DCP names them differently.
        keys = tuple((type(key), key) for key in keys)
    found.structure.append((keys, tuple(map(type, source.values()))))
    staged: dict[Any, Any] = (
        OrderedDict(source) if isinstance(source, OrderedDict) else dict(source)
    )
    # The common case in a few C-level passes: nearly all values are tensors or numbers.
    tensors = [value for value in source.values() if type(value) in _COMMON]
    locals_ = [value._local_tensor if type(value) is DTensor else value for value in tensors]
    done = _ATOMS
    if set(map(type, locals_)) <= _JUST_TENSORS:
        columns.tensors += tensors
        columns.locals += locals_
        columns.containers += [staged] * len(tensors)
        columns.keys += [key for key, value in source.items() if type(value) in _COMMON]
        columns.prefixes += [prefix] * len(tensors)
        done = _COMMON_OR_ATOMS
    for key, value in source.items():
        if type(value) not in done:
            staged[key] = _leaf(staged, key, value, prefix, found)
    return staged


def _leaf(container: Any, key: Any, value: Any, prefix: str, found: Traversal) -> Any:
    """The staged value that replaces ``value``."""
    if type(value) is torch.nn.Parameter:
        # An alias: assigning ``parameter.data`` does not change the memory of the alias.
        value = local = take_shards_of(value, value.detach())
    elif isinstance(value, ShardedTensor):
        return copy_sharded(value, f"{prefix}{key}")
    elif isinstance(value, torch.Tensor):
        local = local_tensor(value)
    elif isinstance(value, Mapping):
        return _mapping(value, f"{prefix}{key}.", found)
    elif type(value) is list and not all(type(element) in _ATOMS for element in value):
        staged: list[Any] = list(value)
        found.structure.append((f"{prefix}{key}", tuple(map(type, value))))
        for position, element in enumerate(value):
            if type(element) not in _ATOMS:
                staged[position] = _leaf(staged, position, element, f"{prefix}{key}.", found)
        return staged
    else:
        return _copy_object(value, f"{prefix}{key}")
    columns = found.columns
    columns.tensors.append(value)
    columns.locals.append(local)
    columns.containers.append(container)
    columns.keys.append(key)
    columns.prefixes.append(prefix)
    return value


def _copy_object(value: Any, name: str) -> Any:
    try:
        try:
            copied = copy.deepcopy(value)
        except Exception:  # torch.save can often store objects that cannot be deep-copied
            copied = _through_torch(value)
        if not _is_plain(copied):
            # deepcopy returns a function, say, itself, which cannot be stored.
            _Pickling(_Nowhere()).dump(copied)
        return copied
    except Exception as error:
        raise UnsupportedStateError(
            f"object {name!r} of the state, a {type(value).__name__}, cannot be stored: it can be neither copied "
            f"nor pickled ({error}); leave it out, or put what it stands for in its place"
        ) from error


def _through_torch(value: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)  # bytes written just above


def _is_plain(value: Any) -> bool:
    """Whether a quick check shows that ``value`` can be pickled."""
    if type(value) in (list, tuple, set, frozenset):
        return set(map(type, value)) <= _ATOMS
    return type(value) is np.ndarray and not value.dtype.hasobject


class _Nowhere(io.RawIOBase):
    def write(self, data: Any) -> int:
        return memoryview(data).nbytes


class _Pickling(pickle.Pickler):
    """Pickles objects as ``torch.save``, without tensors' contents. Refuses shards: one rank's object is stored."""

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, DTensor):
            placed = zip(value.placements, value.device_mesh.shape, strict=True)
            if not all(each.is_replicate() or count == 1 for each, count in placed):
                raise pickle.PicklingError("it holds a shard of a DTensor; use a dict or a list")
        return "left out" if isinstance(value, (torch.Tensor, torch.UntypedStorage)) else None


@dataclass(frozen=True)
class Fingerprint:
    """The fingerprint of a state. Hashable; holds no tensor."""

    structure: tuple[Any, ...]
    """The keys of every container and the types of its values, in the order of the traversal."""
    forms: tuple[Any, ...]
    """Shape, dtype, and so on, of the tensors, in the same order."""
    specs: tuple[Any, ...]
    """Mesh, placements and global shape of the DTensors. They are compared, not hashed: hashing takes longer, while
    comparing is fast for identical objects, which they usually are from save to save.
    """

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.structure, self.forms, len(self.specs)))


# ---- the state ----------------------------------------------------------------------------------


@dataclass
class StagedState:
    """A staged state. ``buffer`` holds the eager copies, at ``offsets``."""

    root: dict[Any, Any]
    traversal: Traversal
    is_cacheable: bool
    """Whether plans for this state may be cached: all tensors are plain, in memory that the engine can
    read.
    """
    is_deferred: list[bool]
    """For each tensor, in the order of the traversal: whether it is deferred."""
    ownership: Ownership
    """The optimizers' tensors at the call."""
    strides: list[tuple[int, ...]]
    """Of the memory of all tensors at the call, if plans have them: copies may have others."""
    at_call: Fingerprint | None = None
    """The fingerprint at the call; None if plans for this state are not cached."""
    deferred: DeferredTensors = field(default_factory=DeferredTensors)
    eager: Columns = field(default_factory=Columns)
    offsets: list[int] = field(default_factory=list)
    shapes: list[torch.Size] = field(default_factory=list)
    dtypes: list[torch.dtype] = field(default_factory=list)
    """Shapes and dtypes of the eager tensors at the call: their own may have changed since."""
    buffer: torch.Tensor = _NOTHING
    slab: Slab | None = None
    """The host cache's memory that ``buffer`` is in."""
    eager_bytes: int = 0
    cache_seconds: float = 0.0
    """How long staging has waited for room in the host cache."""
    fences: list[DeviceEvent] = field(default_factory=list)
    """One event per device, behind all work that its streams had received at the call, eager copies included."""
    call_events: list[Any] = field(default_factory=list)
    """Events of the call, which work that another thread gives to devices must wait for."""
    copying: DeviceCopies = field(default_factory=DeviceCopies)
    """The eager copies that devices are making. Before the host reads ``buffer``, wait for them."""
    looking: DeviceCopies = field(default_factory=DeviceCopies)
    """What devices are copying into ``buffer`` for ``expected``. It is there when any deferred read is done: ``fences``
    come after it.
    """
    expected: ExpectedBytes | None = None
    """What the deferred tensors hold at the call; None if there are none."""

    def await_copies(self) -> None:
        """Return when no device uses ``buffer`` any more.

        Raises :class:`DeviceError` if a copy has failed.
        """
        try:
            self.copying.wait()
        finally:
            self.looking.wait()

    def free(self) -> None:
        """Give the memory of ``buffer`` back; never, if a device may still write to it. Idempotent."""
        slab, self.slab = self.slab, None
        if slab is not None and (self.copying.abandoned or self.looking.abandoned):
            slab.abandon()
        elif slab is not None:
            slab.release()

    def owned(self) -> tuple[bool, ...]:
        """For each tensor, in the order of the traversal: whether an optimizer owns it."""
        return self.ownership.owns(self.traversal.columns.locals)

    def fingerprint(self) -> Fingerprint | None:
        """The state's fingerprint; None if it is not :attr:`is_cacheable`."""
        columns, structure = self.traversal.columns, self.traversal.structure
        if not self.is_cacheable:
            return None
        kinds = list(chain.from_iterable(types for _, types in structure))
        all_seen = sum(map(_PLAIN.__contains__, kinds)) == len(columns.tensors)
        if not all_seen or any(map(_is_peculiar, set(kinds))):
            return None  # DCP will see tensors that are not in the columns
        forms = (
            tuple(map(_SHAPE, columns.locals)),
            tuple(map(_DTYPE, columns.locals)),
            tuple(
                map(_REQUIRES_GRAD, columns.tensors)
            ),  # the DTensor's: its local tensor's may differ
            tuple(self.strides),
        )
        specs = tuple([each._spec for each in columns.tensors if type(each) is DTensor])
        return Fingerprint(tuple(structure), forms, specs)

    def as_captured(self, items: list[WriteItem]) -> list[WriteItem]:
        """The items of a plan for this state, with the strides of its tensors as they were at the call.

        Raises :class:`UnsupportedTensorError` if the plan stores the parts of a wrapper as an object.
        """
        columns = self.traversal.columns
        _check_parts_planned(columns, items)
        if not self.strides or not items:
            return items
        position = {columns.name(number): number for number in range(len(columns.keys))}
        changed = []
        for item in items:
            at = position.get(item.index.fqn)
            data = item.tensor_data
            if (
                data is not None
                and at is not None
                and data.chunk.sizes == columns.locals[at].shape
                and data.properties.strides != self.strides[at]  # type: ignore[attr-defined]
            ):
                properties = dataclasses.replace(data.properties, strides=self.strides[at])  # type: ignore[call-arg]
                data = dataclasses.replace(data, properties=properties)
                item = dataclasses.replace(item, tensor_data=data)
            changed.append(item)
        return changed

    def is_plain(self) -> bool:
        """Whether every tensor's memory holds the bytes as they are to be written."""
        deferred = self.deferred.columns.locals
        return all(map(torch.Tensor.is_contiguous, deferred)) and not (
            any(map(torch.Tensor.is_neg, deferred)) or any(map(torch.Tensor.is_conj, deferred))
        )

    def bases(self) -> tuple[Ints, Ints, Ints | None]:
        """Address, group and device (None: all on the host) of all tensors, in the order of the traversal."""
        addresses = np.empty(len(self.is_deferred), np.int64)
        groups = np.full(len(self.is_deferred), STABLE, np.int64)
        is_deferred = np.array(self.is_deferred, bool)
        addresses[is_deferred] = self.deferred.addresses
        groups[is_deferred] = self.deferred.groups
        addresses[~is_deferred] = np.array(self.offsets, np.int64) + self.buffer.data_ptr()
        if not self.fences:
            return addresses, groups, None
        devices = np.full(len(self.is_deferred), HOST, np.int64)
        devices[is_deferred] = self.deferred.devices
        return addresses, groups, devices

    def materialize(self) -> dict[Any, Any]:
        """Build the state dict as it was at the call: puts tensors over the eager copies in their places. Callable
        once.
        """
        eager = self.eager
        copies = tensors_over(self.buffer, self.offsets, self.shapes, self.dtypes)
        for container, key, tensor, copied in zip(
            eager.containers, eager.keys, eager.tensors, copies, strict=True
        ):
            take_shards_of(tensor, copied)
            if isinstance(tensor, DTensor):
                copied = DTensor(copied, tensor._spec, requires_grad=False)  # type: ignore[no-untyped-call]
            container[key] = copied
        self.eager, self.shapes, self.dtypes = Columns(), [], []
        return self.root


def _check_parts_planned(columns: Columns, items: list[WriteItem]) -> None:
    """A planner that does not flatten plans an object for each nested dict, and so for the parts of a wrapper. No load
    would put them into the wrapper.
    """
    if WRAPPER not in columns.keys or not items:
        return
    planned = {item.index.fqn for item in items}
    for position, (key, prefix) in enumerate(zip(columns.keys, columns.prefixes, strict=True)):
        if key == WRAPPER and columns.name(position) not in planned:
            raise UnsupportedTensorError(
                f"tensor {prefix[:-1]!r} cannot be stored: it wraps other tensors, and the planner does not plan them; "
                f"pass a planner with flatten_state_dict=True"
            )


def _is_peculiar(kind: type) -> bool:
    """Whether DCP may plan tensors inside a value of this type that the traversal does not see."""
    return kind not in _PLAIN and (
        issubclass(kind, torch.Tensor)
        or (issubclass(kind, list) and kind is not list)
        or hasattr(kind, "__create_write_items__")
    )
