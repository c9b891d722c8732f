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

from dcp_datastates.checkpoints.first_rank import from_first_rank
from dcp_datastates.dcp.loading import load
from dcp_datastates.dcp.reader import DataStatesReader
from dcp_datastates.errors import (
    CheckpointNotFoundError,
    ForeignCheckpointError,
    IncompatibleStateError,
)
from dcp_datastates.io.committed import open_committed
from dcp_datastates.manager.parts import (
    WHOLE,
    give_whole_state,
    is_by_parameter,
    members_of,
    optimizer_state,
    set_optimizer_state,
    state_to_fill,
    whole_state,
)
from dcp_datastates.manager.trainable import Trainable
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
    """The state of an optimizer of ``models``, to save it: by parameters' names, or else as it gives it."""
    owner = _owner(models, optimizer)
    if owner is None or not is_by_parameter(optimizer):
        return whole_state(optimizer)
    return optimizer_state(owner, optimizer)


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
        state: dict[str, Any] = {}
        owners: dict[str, torch.nn.Module] = {}
        for name, each in optimizers.items():
            if any(known.startswith(f"{name}.{WHOLE}.") for known in stored):
                give_whole_state(each, load(path, only=f"{name}.{WHOLE}")[name])
                continue
            if (owner := _owner(models, each)) is None:
                raise IncompatibleStateError(
                    f"{path}: {name!r} was saved by names of parameters, and some of the optimizer's are in no model"
                )
            owners[name] = owner
            state[name] = state_to_fill(owner, each, name, stored)
        members = {name: members_of(each) for name, each in state.items()}
        if state:
            load(path, state, only=state)
        for name, owner in owners.items():
            set_optimizer_state(owner, optimizers[name], state[name], members[name])


def holds(path: str | os.PathLike[str], name: str) -> bool:
    """Whether the checkpoint has values below ``name``."""
    return any(each.startswith(f"{name}.") for each in _stored_names(path))


def _state_of_model(
    model: torch.nn.Module | Trainable, stored: Collection[str] = ()
) -> dict[str, Any]:
    return (
        model.to_fill(stored) if isinstance(model, Trainable) else dict(get_model_state_dict(model))
    )


def _owner(models: Models, optimizer: torch.optim.Optimizer) -> torch.nn.Module | None:
    """The model with the optimizer's parameters, or a module of several such models; None if some are in none."""
    whole = {
        name: each.model if isinstance(each, Trainable) else each for name, each in models.items()
    }
    wanted = {id(each) for group in optimizer.param_groups for each in group["params"]}
    found = {name: wanted & set(map(id, each.parameters())) for name, each in whole.items()}
    complete = [name for name, mine in found.items() if mine == wanted]
    if complete:
        return min(
            (whole[name] for name in complete), key=lambda each: len(list(each.parameters()))
        )
    if wanted - set().union(*found.values()):
        return None
    return torch.nn.ModuleDict({name: whole[name] for name, mine in found.items() if mine})


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
