"""What a training framework saves: models and optimizers by name, and the files of each rank; and its way back."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch.distributed as dist
from typing_extensions import Unpack

from dcp_datastates.checkpoints.first_rank import from_first_rank
from dcp_datastates.checkpoints.formats import Format, format_of
from dcp_datastates.dcp.reader import DataStatesReader
from dcp_datastates.io.committed import open_committed
from dcp_datastates.loading.fit import Fit, FitOptions
from dcp_datastates.loading.load import DEFAULT_TIMEOUT, load
from dcp_datastates.loading.session import load_session
from dcp_datastates.manager.naming import names_below
from dcp_datastates.manager.training_state import TrainingState
from dcp_datastates.ranks.rank_set import rank_set_of
from dcp_datastates.storage.object_path import ObjectPath, locate

_FILES: Final = "files"


def state_of(parts: Mapping[str, Any], names: Iterable[str] | None = None) -> dict[str, Any]:
    """The states of models and optimizers, under their names: of all ``parts``, or of those of these ``names``.

    Parameters have the names that they have in the models among ``parts``. Shards stay shards, and no tensor is copied
    (FSDP1 makes new ones).
    """
    found = TrainingState(parts, rank_set_of(None)).parts
    return {name: found[name].state_dict() for name in (parts if names is None else names)}


def load_parts(
    path: str | os.PathLike[str] | ObjectPath,
    parts: Mapping[str, Any],
    names: Iterable[str],
    **options: Unpack[FitOptions],
) -> None:
    """Load those of the models and optimizers ``parts`` that have these ``names``, in place, at any number of ranks.
    All ranks call this.

    ``options`` are those of :func:`~dcp_datastates.load`; a ``rename`` of a model renames what optimizers have of it.
    Raises as that.
    """
    place, rank_set = locate(path), rank_set_of(None)
    state = TrainingState(parts, rank_set)
    fit = Fit.of(options)
    with load_session(rank_set, place, "load()", DEFAULT_TIMEOUT) as session:
        to_load = fit.names(open_committed(place).table.catalog.names)
        # With nothing to load and nothing stored, a name would be an error.
        there = [
            name
            for name in names
            if names_below(to_load, name)
            or (fit.missing == "error" and state.parts[name].state_dict())
        ]
        if there:
            state.load(session, [place], Fit.of(options, only=there), there)


def holds(path: str | os.PathLike[str] | ObjectPath, name: str) -> bool:
    """Whether the checkpoint has values below ``name``."""
    return bool(names_below(_stored_names(path), name))


def with_files(state: Mapping[str, Any], files: Mapping[str, bytes]) -> dict[str, Any]:
    """``state`` with this rank's ``files``, by their names. Each rank writes its own."""
    return {**state, _FILES: {_rank_key(_rank()): dict(files)}}


def files_from(path: str | os.PathLike[str] | ObjectPath) -> dict[str, bytes]:
    """The files of the first rank, and, instead of those of the same names, those of this rank.

    Not collective. Raises as :func:`~dcp_datastates.load`.
    """
    ranks = (_rank_key(0), _rank_key(_rank()))
    prefixes = [f"{_FILES}.{rank}" for rank in ranks]
    names = [
        name for name in _stored_names(path) if name.startswith(tuple(f"{p}." for p in prefixes))
    ]
    if not names:
        return {}
    found = load(path, only=names)[_FILES]
    return {**found.get(ranks[0], {}), **found.get(ranks[1], {})}


def is_ours(path: str | os.PathLike[str] | ObjectPath) -> bool:
    """:func:`is_ours_here`, the same on every rank; all ranks call this."""
    return from_first_rank(lambda: is_ours_here(path), "is_ours", f"who saved {path}")


def is_ours_here(path: str | os.PathLike[str] | ObjectPath) -> bool:
    """Whether a checkpoint of this package is committed at ``path``.

    False for what another program saved, and for a path without any checkpoint. Raises as
    :func:`~dcp_datastates.checkpoints.formats.format_of`: :class:`CheckpointNotFoundError` for a save of this package
    that was not committed.
    """
    return format_of(path) is Format.DATASTATES


def _stored_names(path: str | os.PathLike[str] | ObjectPath) -> set[str]:
    return set(DataStatesReader(path).read_metadata().state_dict_metadata)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _rank_key(rank: int) -> str:
    return f"rank-{rank}"
