"""What a training framework saves: models and optimizers by name, and the files of each rank; and its way back."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final

import torch
import torch.distributed as dist
from typing_extensions import Unpack

from dcp_datastates.checkpoints.first_rank import from_first_rank
from dcp_datastates.checkpoints.formats import Format, format_of
from dcp_datastates.dcp.fit import Fit, FitOptions
from dcp_datastates.dcp.fitting import FittingPlanner
from dcp_datastates.dcp.loading import load, load_with
from dcp_datastates.dcp.reader import DataStatesReader
from dcp_datastates.manager.naming import names_below
from dcp_datastates.manager.optimizer_names import load_options
from dcp_datastates.manager.optimizers import OptimizerPart, layouts_of
from dcp_datastates.manager.trainable import ModelPart, Trainable
from dcp_datastates.storage.object_path import ObjectPath

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
    state = {name: ModelPart(model).state_dict() for name, model in models.items()}
    for name, optimizer in optimizers.items():
        state[name] = state_of_optimizer(models, optimizer)
    return state


def state_of_optimizer(models: Models, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state of an optimizer of ``models``, to save it, by parameters' names."""
    return _part_of("", models, optimizer).state_dict()


def load_models(
    path: str | os.PathLike[str] | ObjectPath, models: Models, **options: Unpack[FitOptions]
) -> None:
    """Load models in place, at any number of ranks. All ranks call this.

    ``options`` are those of :func:`~dcp_datastates.load`. Raises as that.
    """
    strict = options.get("missing", "error") == "error"
    stored = _stored_names(path)
    parts = {
        name: ModelPart(model, strict, names_below(stored, name)) for name, model in models.items()
    }
    # With nothing to load and nothing stored, a name would be an error.
    there = {n: each for n, each in parts.items() if each.stored or (strict and each.state_dict())}
    fit = Fit.of(options, only=there)
    load_with(FittingPlanner(fit, path), path, dict(there))


def load_optimizers(
    path: str | os.PathLike[str] | ObjectPath,
    models: Models,
    optimizers: Optimizers,
    **options: Unpack[FitOptions],
) -> None:
    """Load optimizers of ``models``, like :func:`load_models`. A ``rename`` of a model renames what they have of it."""
    if not optimizers:
        return
    parts = {name: _part_of(name, models, each) for name, each in optimizers.items()}
    names = _stored_names(path)
    fit, needed = load_options(Fit.of(options, only=parts), names, list(parts.values()))
    layouts = layouts_of(parts.values(), [path])
    load_with(FittingPlanner(fit, path, lay_out=layouts, needed=needed), path, dict(parts))


def holds(path: str | os.PathLike[str] | ObjectPath, name: str) -> bool:
    """Whether the checkpoint has values below ``name``."""
    return bool(names_below(_stored_names(path), name))


def _part_of(name: str, models: Models, optimizer: torch.optim.Optimizer) -> OptimizerPart:
    modules = {key: ModelPart(each).modules for key, each in models.items()}
    several = dist.is_initialized() and dist.get_world_size() > 1
    return OptimizerPart(name, optimizer, modules, _rank() if several else None)


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
