"""``load``: fills a state, on all ranks; or returns a nested dict, in this process alone."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import STORAGE_TYPES, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan

from dcp_datastates.dcp.reader import DataStatesReader
from dcp_datastates.errors import (
    CheckpointCorruptError,
    ConfigurationError,
    DataStatesError,
    IncompatibleStateError,
)
from dcp_datastates.format.stored_names import as_keys, chosen, wrappers

__all__ = ["load", "nested"]


def load(
    path: str | os.PathLike[str],
    state: dict[str, Any] | None = None,
    only: str | Iterable[str] | None = None,
    *,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    allow_objects: bool = True,
    allow_cast: bool = False,
    strict: bool = False,
) -> dict[str, Any]:
    """Load the checkpoint at ``path`` into ``state``, or, if that is None, into a new dict.

    With ``state``, this is :func:`torch.distributed.checkpoint.load`: all ranks of the group call it, at any world
    size, mesh or placement. It fills tensors in place, replaces objects, and passes the loaded values to ``Stateful``
    objects. Without ``state``, the call is not collective and needs no process group: it returns the state as it was
    saved at any world size, nested, with full tensors on the CPU, which must fit in memory. Every byte read is
    verified.

    Args:
        path: Directory of the checkpoint.
        state: The state to load into. None makes a new dict.
        only: Load only the values under these names: full names, or prefixes that end before a dot, such as ``"model"``
            or ``"model.layers.0"``. In lists, skipped elements before a loaded one are None.
        process_group: With ``state``: the ranks that load together; default: all.
        no_dist: With ``state``: this process loads alone, even if there are process groups.
        allow_objects: As for :class:`~dcp_datastates.DataStatesReader`.
        allow_cast: With ``state``: as for :class:`~dcp_datastates.DataStatesReader`.
        strict: With ``state``: whether a stored value that is not loaded is an error, rather than a warning. Values
            that ``only`` exclude do not count.

    Returns:
        ``state``, or the new dict.

    Raises:
        ConfigurationError: an argument cannot work.
        IncompatibleStateError: the checkpoint has no value under one of ``only`` (the error lists similar names), or
        ``state`` does not fit the checkpoint. CheckpointNotFoundError, CheckpointCorruptError, CheckpointReplacedError,
        UnsafeObjectError, StorageError:
            as for :class:`~dcp_datastates.DataStatesReader`. If ranks fail differently, all raise the same error. Other
            errors (``state`` has a name that was not saved, say) are raised as DCP's ``CheckpointException``.
    """
    names = None if only is None else as_keys("only", only)
    reader = _Reader(path, names, allow_objects=allow_objects, allow_cast=allow_cast, strict=strict)
    if state is None:
        return _load_everything(reader)
    if not isinstance(state, dict):
        raise ConfigurationError(
            f"state is a {type(state).__name__}; pass a dict of names to tensors, objects and dicts"
        )
    try:
        with warnings.catch_warnings():  # DCP warns that there is no process group
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(  # type: ignore[attr-defined]
                state, storage_reader=reader, process_group=process_group, no_dist=no_dist
            )
    except CheckpointException as error:
        cause = error.failures[min(error.failures)][0]
        if isinstance(cause, DataStatesError):
            raise cause from error
        raise
    return state


class _Reader(DataStatesReader):
    """Reads only the values under ``only`` (None: all); leaving the rest unread is intended."""

    def __init__(
        self, path: str | os.PathLike[str], keys: frozenset[str] | None, **options: Any
    ) -> None:
        super().__init__(path, **options)
        self._keys = keys
        self.names: frozenset[str] = frozenset()

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)
        names = metadata.state_dict_metadata
        found = list(names) if self._keys is None else chosen(names, self._keys)
        self.names = frozenset(found).union(wrappers(found))

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        plan.items = [item for item in plan.items if item.storage_index.fqn in self.names]
        return super().prepare_local_plan(plan)

    def _leaves(self, name: str) -> bool:
        return name not in self.names


def _load_everything(reader: _Reader) -> dict[str, Any]:
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, True)
    stored = metadata.state_dict_metadata
    values = {name: _place_for(name, stored[name]) for name in stored if name in reader.names}
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(values, metadata, True)
    plans = reader.prepare_global_plan([reader.prepare_local_plan(planner.create_local_plan())])
    reader.read_data(planner.finish_plan(plans[0]), planner)
    return nested(planner.state_dict, metadata.planner_data)


def _place_for(name: str, saved: STORAGE_TYPES) -> torch.Tensor | None:
    """A new tensor to load into; None for an object.

    Raises :class:`IncompatibleStateError` if the chunks do not cover the tensor: the rest would be uninitialized
    memory.
    """
    if not isinstance(saved, TensorStorageMetadata):
        return None
    stored = sum(math.prod(chunk.sizes) for chunk in saved.chunks)
    if stored < math.prod(saved.size):
        raise IncompatibleStateError(
            f"of {name!r}, {stored} of {math.prod(saved.size)} elements are stored (a rank saved its shard alone?); "
            f"choose others with only, or load it into a sharded state"
        )
    return torch.empty(saved.size, dtype=saved.properties.dtype, device="cpu")


_MOST_SKIPPED = 1 << 20
"""Elements of a list that a checkpoint may lack before one that it has."""


def nested(values: Mapping[str, Any], paths: Any) -> dict[str, Any]:
    """The values, nested by the paths that the save's planner stored."""
    nested: dict[str, Any] = {}
    for name, value in values.items():
        path = paths.get(name) if isinstance(paths, dict) else None
        try:
            _put(nested, path if isinstance(path, tuple) and path else (name,), value)
        except (TypeError, AttributeError) as error:
            raise CheckpointCorruptError(
                f"the metadata give {name!r} the path {path!r}, on which another value lies"
            ) from error
    return nested


def _put(root: dict[str, Any], path: tuple[str | int, ...], value: Any) -> None:
    """Put ``value`` at ``path``: an integer key is an index into a list."""
    container: Any = root
    for key, following in zip(path, (*path[1:], None), strict=True):
        if isinstance(key, int):
            if not 0 <= key <= len(container) + _MOST_SKIPPED:
                raise TypeError("no index into a list")
            container.extend([None] * (key + 1 - len(container)))
            present = container[key]
        else:
            present = container.get(key)
        if following is None:
            if present is not None:
                raise TypeError("there is a value already")
            container[key] = value
        elif present is None:
            present = container[key] = [] if isinstance(following, int) else {}
        container = present
