"""``load``: fills a state, on all ranks; or returns a nested dict, in this process alone."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlanner
from typing_extensions import Unpack

from dcp_datastates.config import check_options
from dcp_datastates.dcp.reader import DataStatesReader
from dcp_datastates.errors import ConfigurationError, DataStatesError
from dcp_datastates.format.name_patterns import renamed_path
from dcp_datastates.format.nesting import empty_in, nested, path_of
from dcp_datastates.format.validate import check_covered
from dcp_datastates.loading.fit import Fit, FitOptions
from dcp_datastates.loading.fitting import FittingPlanner
from dcp_datastates.process.forks import enter
from dcp_datastates.ranks.rank_set import check_group
from dcp_datastates.storage.object_path import AnyPath

__all__ = ["load", "load_values", "load_with"]


def load(
    path: AnyPath | Sequence[AnyPath],
    state: dict[str, Any] | None = None,
    only: str | Iterable[str] | None = None,
    *,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    allow_objects: bool = True,
    share_reads: bool | None = None,
    storage_options: Mapping[str, Any] | None = None,
    **options: Unpack[FitOptions],
) -> dict[str, Any]:
    """Load the checkpoint at ``path`` into ``state``, or into a new dict if ``state`` is None.

    With ``state``, this is :func:`torch.distributed.checkpoint.load`: all ranks of the group call it, at any world
    size, mesh or placement. It fills tensors in place, replaces objects, and passes the loaded values to ``Stateful``
    objects. It loads only the values whose names are in ``state``. (:meth:`CheckpointManager.restore` also loads what
    is stored below a dict or an object of the state.) If ``state`` does not fit, it stays unchanged on every rank.

    Without ``state``, the call is not collective and needs no process group: it returns the state as it was saved at
    any world size, nested, with full tensors on the CPU, which must fit in memory. Every byte read is verified.

    Args:
        path: Directory of the checkpoint, or a URL such as ``"s3://bucket/run/step-100"``. A list of them means tiers,
            as ``latest([...])`` returns: each file is read from the nearest undamaged copy.
        state: The state to load into. None makes a new dict.
        only: Load only the values under these names: full names, or prefixes that end before a dot, such as ``"model"``
            or ``"model.layers.0"``; ``*`` stands for any text. In lists, skipped elements before a loaded one are None.
        process_group: With ``state``: the ranks that load together; default: all.
        no_dist: With ``state``: this process loads alone, even if there are process groups.
        allow_objects: As for :class:`~dcp_datastates.DataStatesReader`.
        share_reads: As for :class:`~dcp_datastates.DataStatesReader`. Without ``state``, it has no effect.
        storage_options: As for :class:`~dcp_datastates.DataStatesReader`.
        options: :class:`FitOptions`: ``exclude``, ``rename``, ``missing``, ``unexpected``, ``cast``. Without ``state``,
            the last three have no effect.

    Returns:
        ``state``, or the new dict.

    Raises:
        ConfigurationError: an argument cannot work.
        IncompatibleStateError: the checkpoint has no value under one of ``only`` (the error lists similar names), or
            ``state`` does not fit the checkpoint: the error has all names, shapes and dtypes that differ.
        CheckpointNotFoundError, CheckpointCorruptError, CheckpointReplacedError, UnsafeObjectError, StorageError:
            as for :class:`~dcp_datastates.DataStatesReader`. If ranks fail differently, all raise the same error.
        DataStatesError: anything else that failed on a rank, which the message names.
    """
    enter("load()")
    check_options("load", options, FitOptions)
    check_group(process_group)
    if path is None:
        raise ConfigurationError("path=None: load(path, state) needs the checkpoint's directory")
    planner = FittingPlanner(Fit.of(options, only), path)
    return load_with(
        planner,
        path,
        state,
        process_group=process_group,
        no_dist=no_dist,
        allow_objects=allow_objects,
        share_reads=share_reads,
        storage_options=storage_options,
    )


def load_with(
    planner: FittingPlanner,
    path: AnyPath | Sequence[AnyPath],
    state: dict[str, Any] | None,
    *,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    allow_objects: bool = True,
    share_reads: bool | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """:func:`load`, of what ``planner`` chooses."""
    reader = _Reader(
        path,
        planner,
        allow_objects=allow_objects,
        share_reads=False if state is None or no_dist else share_reads,
        storage_options=storage_options,
    )
    if state is None:
        return _load_everything(reader, planner)
    if not isinstance(state, dict):
        raise ConfigurationError(
            f"state is a {type(state).__name__}; pass a dict of names to tensors, objects and dicts"
        )
    others = planner.keep_tensors(state)
    before = dict(others)
    try:
        with warnings.catch_warnings():  # DCP warns that there is no process group
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(  # type: ignore[attr-defined]
                others,
                storage_reader=reader,
                planner=planner,
                process_group=process_group,
                no_dist=no_dist,
            )
    except CheckpointException as error:
        own = error.failures.get(0 if no_dist else _rank_in(process_group))
        if own is not None and not isinstance(own[0], Exception):
            # An interrupt of this rank. The others are told by an ordinary error.
            raise own[0] from None
        rank = min(error.failures)
        cause = error.failures[rank][0]
        if isinstance(cause, DataStatesError):
            raise cause from error
        raise DataStatesError(
            f"loading {path} failed on rank {rank}: {type(cause).__name__}: {cause}"
        ) from error
    finally:
        reader.reset()  # the error holds it, and it may hold a socket
        for name, value in others.items():
            if value is not before[name] and name in state:
                state[name] = value
    planner.put_tensors(state)
    return state


def _rank_in(process_group: dist.ProcessGroup | None) -> int:
    """This process's rank in a group; 0 without one."""
    return dist.get_rank(process_group) if dist.is_available() and dist.is_initialized() else 0


class _Reader(DataStatesReader):
    """Reads what a planner has chosen; leaving the rest unread is intended."""

    def __init__(
        self,
        path: AnyPath | Sequence[AnyPath],
        planner: FittingPlanner,
        **options: Any,
    ) -> None:
        super().__init__(path, **options)
        self._fit = planner.fit
        self._planner = planner

    def _not_left(self, unread: list[str]) -> list[str]:
        return self._planner.unasked(unread)

    def _held(self, planner: LoadPlanner) -> Iterable[str]:
        return self._planner.held if planner is self._planner else super()._held(planner)


def load_values(
    path: AnyPath | Sequence[AnyPath], names: Iterable[str], *, allow_objects: bool = True
) -> dict[str, Any]:
    """The values stored under ``names``, by these, in this process alone. Raises as :func:`load`."""
    wanted = list(names)
    if not wanted:
        return {}
    planner = FittingPlanner(Fit.of({"unexpected": "ignore"}, wanted), path)
    reader = _Reader(path, planner, allow_objects=allow_objects, share_reads=False)
    try:
        return _read_values(reader, planner, reader.read_metadata())
    finally:
        reader.reset()


def _load_everything(reader: _Reader, planner: FittingPlanner) -> dict[str, Any]:
    metadata = reader.read_metadata()
    values = _read_values(reader, planner, metadata)
    paths = {
        name: renamed_path(path_of(old, metadata.planner_data), old, name)
        for name, old in _chosen(planner, metadata).items()
    }
    return nested(values, paths)


def _read_values(reader: _Reader, planner: FittingPlanner, metadata: Metadata) -> dict[str, Any]:
    """What the planner's ``fit`` takes, by name."""
    reader.set_up_storage_reader(metadata, True)
    stored, names = metadata.state_dict_metadata, _chosen(planner, metadata)
    values = {name: _place_for(old, stored[old]) for name, old in names.items() if old in stored}
    planner.set_up_planner(values, metadata, True)
    plans = reader.prepare_global_plan([reader.prepare_local_plan(planner.create_local_plan())])
    reader.read_data(planner.finish_plan(plans[0]), planner)
    return values


def _chosen(planner: FittingPlanner, metadata: Metadata) -> dict[str, str]:
    return planner.fit.names([*metadata.state_dict_metadata, *empty_in(metadata)])


def _place_for(name: str, saved: STORAGE_TYPES) -> torch.Tensor | None:
    """A new tensor to load into; None for an object.

    Raises :class:`IncompatibleStateError` if the chunks do not cover the tensor: the rest would be uninitialized
    memory.
    """
    if not isinstance(saved, TensorStorageMetadata):
        return None
    way_out = "choose others with only, or load it into a sharded state"
    check_covered(name, saved.size, (chunk.sizes for chunk in saved.chunks), way_out)
    return torch.empty(saved.size, dtype=saved.properties.dtype, device="cpu")
