"""What a training framework saves: models and optimizers by name, and the files of each rank; and its way back."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)

from dcp_datastates.checkpoints.answers import from_first_rank
from dcp_datastates.dcp.loading import load
from dcp_datastates.dcp.reader import DataStatesReader
from dcp_datastates.errors import (
    CheckpointNotFoundError,
    ForeignCheckpointError,
)
from dcp_datastates.io.committed import open_committed
from dcp_datastates.manager.optimizer_state import (
    members_of,
    optimizer_state,
    set_optimizer_state,
    state_to_fill,
)
from dcp_datastates.manager.trainable import Trainable
from dcp_datastates.manager.training_state import model_of
from dcp_datastates.storage import attempts, local

__all__ = [
    "files_from",
    "holds",
    "is_ours",
    "is_ours_here",
    "load_models",
    "load_optimizers",
    "state_of",
    "state_of_optimizer",
    "with_files",
]

Models = Mapping[str, "torch.nn.Module | Trainable"]
Optimizers = Mapping[str, torch.optim.Optimizer]

_FILES: Final = "files"


def state_of(models: Models, optimizers: Optimizers) -> dict[str, Any]:
    """The state of models and optimizers, under their names, by parameters' names.

    Shards stay shards, and no tensor is copied (FSDP1 makes new ones).
    """
    state = {name: _state_of_model(model) for name, model in models.items()}
    for name, optimizer in optimizers.items():
        state[name] = state_of_optimizer(models, optimizer)
    return state


def state_of_optimizer(models: Models, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state of an optimizer of one of ``models``, to save it."""
    return optimizer_state(_owner(models, optimizer), optimizer)


def load_models(path: str | os.PathLike[str], models: Models, *, strict: bool = True) -> None:
    """Load models in place, at any number of ranks. All ranks call this.

    With ``strict=False``, values that were not saved stay as they are. Raises as :func:`~dcp_datastates.load`.
    """
    stored = _stored_names(path)
    state = {
        name: _state_of_model(model, [each.removeprefix(f"{name}.") for each in stored])
        for name, model in models.items()
    }
    if not strict:
        for name, values in state.items():
            state[name] = {key: values[key] for key in values if f"{name}.{key}" in stored}
    state = {name: values for name, values in state.items() if values}
    load(path, state, only=state)
    for name, model in models.items():
        if isinstance(model, Trainable):
            model.load_state_dict(state.get(name, {}))
        else:
            options = StateDictOptions(strict=strict)
            set_model_state_dict(model, state.get(name, {}), options=options)


def load_optimizers(path: str | os.PathLike[str], models: Models, optimizers: Optimizers) -> None:
    """Load optimizers of ``models``, like :func:`load_models`."""
    if optimizers:
        stored = _stored_names(path)
        state = {
            name: state_to_fill(_owner(models, each), each, name, stored)
            for name, each in optimizers.items()
        }
        members = {name: members_of(each) for name, each in state.items()}
        load(path, state, only=state)
        for name, optimizer in optimizers.items():
            set_optimizer_state(_owner(models, optimizer), optimizer, state[name], members[name])


def holds(path: str | os.PathLike[str], name: str) -> bool:
    """Whether the checkpoint has values below ``name``."""
    return any(each.startswith(f"{name}.") for each in _stored_names(path))


def _state_of_model(
    model: torch.nn.Module | Trainable, stored: Collection[str] = ()
) -> dict[str, Any]:
    return (
        model.to_fill(stored) if isinstance(model, Trainable) else dict(get_model_state_dict(model))
    )


def _owner(models: Models, optimizer: torch.optim.Optimizer) -> torch.nn.Module:
    whole = [each.model if isinstance(each, Trainable) else each for each in models.values()]
    return whole[0] if len(whole) == 1 else model_of(whole, optimizer, type(optimizer).__name__)


def with_files(state: Mapping[str, Any], files: Mapping[str, bytes]) -> dict[str, Any]:
    """``state`` with this rank's ``files``, by their names. Each rank writes its own."""
    return {**state, _FILES: {_rank_key(_rank()): dict(files)}}


def files_from(path: str | os.PathLike[str]) -> dict[str, bytes]:
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


def is_ours(path: str | os.PathLike[str]) -> bool:
    """:func:`is_ours_here`, the same on every rank; all ranks call this."""
    return from_first_rank(lambda: is_ours_here(path), "is_ours", f"who saved {path}")


def is_ours_here(path: str | os.PathLike[str]) -> bool:
    """Whether a checkpoint of this package is committed at ``path``.

    False for what another program saved, and for a path without any checkpoint. Raises
    :class:`CheckpointNotFoundError` for a save of this package that was not committed, and as
    :class:`~dcp_datastates.DataStatesReader` for one that cannot be read.
    """
    directory = local.local_path(path)
    try:
        open_committed(directory)
    except ForeignCheckpointError:
        return False
    except CheckpointNotFoundError:
        if attempts.present(directory):
            raise
        return False
    return True


def _stored_names(path: str | os.PathLike[str]) -> set[str]:
    return set(DataStatesReader(path).read_metadata().state_dict_metadata)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _rank_key(rank: int) -> str:
    return f"rank-{rank}"
