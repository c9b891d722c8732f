"""One traversal of a state dict: its staged copy, and columns over its tensors.

Values other than tensors are copied here. Tensors are only listed; :mod:`dcp_datastates.staging.stage` decides which
are copied now and which are read later.

The columns give the state's fingerprint, too: its structure without values. Equal fingerprints mean equal plans.
"""

from __future__ import annotations

import copy
import functools
import io
import pickle
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import compress
from typing import Any, Final

import numpy as np
import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor

from dcp_datastates.errors import UnsupportedStateError
from dcp_datastates.io.tensor_memory import (
    copy_sharded,
    local_tensor,
    opened,
    take_shards_of,
    wrappers_in,
)

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
            return _through_torch(value)
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
    """Pickles objects as ``torch.save`` does, without the contents of tensors."""

    def persistent_id(self, value: Any) -> Any:
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
