"""A checkpoint on its way into a whole model, and what ``on_load_checkpoint`` makes of it.

What Lightning has saved through this package is also read whole in this process alone, wherever Lightning reads a file:
``LightningModule.load_from_checkpoint``, and trainers with strategies of Lightning's own. Both call one function of
Lightning for that; :func:`install` makes it read checkpoints of this package, too.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.fabric.plugins.io.torch_io
import lightning.pytorch.core.saving
import torch
from lightning.fabric.utilities import cloud_io, move_data_to_device

from dcp_datastates.errors import CheckpointNotFoundError, IncompatibleStateError
from dcp_datastates.format.stored_names import new_name
from dcp_datastates.format.structure import Structure, taken_apart
from dcp_datastates.lightning.stored import META, MODEL, OPTIMIZERS, lightning_checkpoint
from dcp_datastates.loading.fit import Fit, FitOptions
from dcp_datastates.loading.load import load
from dcp_datastates.manager.frameworks import files_from, is_ours_here

logger = logging.getLogger(__name__)


def plain(key: str) -> str:
    """The name under which a value of a model is stored: without what ``torch.compile`` of its modules adds."""
    return key.replace("_orig_mod.", "")


@dataclass
class Loaded:
    """What was given to the hooks, to compare it with what they leave."""

    path: str
    model: dict[str, Any] = field(default_factory=dict)
    optimizers: Any = None
    moved: dict[str, str] = field(default_factory=dict)
    """The new names of values that hooks have renamed."""

    @staticmethod
    def of(path: str, checkpoint: Mapping[str, Any]) -> Loaded:
        """Notes what is in a checkpoint."""
        return Loaded(path, dict(checkpoint[MODEL]), _noted(checkpoint.get(OPTIMIZERS)))

    def take_model(self, state: Mapping[str, Any]) -> None:
        """The hooks have left this state of the model: find what they have renamed, by identity."""
        now = {id(value): key for key, value in state.items()}
        for key, value in self.model.items():
            new = now.get(id(value), key)
            if isinstance(value, torch.Tensor) and state.get(key) is not value and new != key:
                self.moved[f"{MODEL}.{plain(key)}"] = f"{MODEL}.{plain(new)}"
        self.model = {}

    def has_other_optimizers(self, checkpoint: Mapping[str, Any]) -> bool:
        """Whether the hooks have changed the states of optimizers."""
        tensors, versions, structure = _noted(checkpoint.get(OPTIMIZERS))
        before = self.optimizers
        self.optimizers = None
        return (
            structure != before[2]
            or versions != before[1]
            or any(each is not before[0][path] for path, each in tensors.items())
        )

    def options(self, given: FitOptions) -> FitOptions:
        """The options of a load of optimizers, which follows the hooks."""
        if not self.moved:
            return given
        first = given.get("rename")

        def rename(old: str) -> str:
            name = old if first is None else new_name(old, first)[0]
            return self.moved.get(name, name)

        return {**given, "rename": rename}


def chosen(state: Mapping[str, Any], options: FitOptions) -> dict[str, Any]:
    """The values of a stored model that ``options`` choose, by the program's names."""
    start = f"{MODEL}."
    names = Fit.of(options).names(f"{start}{name}" for name in state)
    return {new.removeprefix(start): state[old.removeprefix(start)] for new, old in names.items()}


def fitted(
    module: torch.nn.Module, state: Mapping[str, Any], options: FitOptions
) -> dict[str, Any]:
    """``state`` with the keys that the module has now. What is excluded, or may be missing, is there as it is; what may
    be unexpected is left out.

    Raises :class:`IncompatibleStateError` for another dtype with ``cast=False``.
    """
    own, fit = module.state_dict(), Fit.of(options)
    keys = {plain(key): key for key in own}
    found = {keys.get(plain(key), key): value for key, value in state.items()}
    stays = [key for key in own if not fit.takes(f"{MODEL}.{plain(key)}")]
    missing = [key for key in own if key not in found and key not in stays]
    unexpected = [key for key in found if key not in own]
    for option, names, outcome in (
        ("missing", missing, "not in the checkpoint, and stay as the program made them"),
        ("unexpected", unexpected, "not in the model, and stay unread"),
    ):
        if names and options.get(option) == "warn":
            logger.warning("%d values are %s: %s", len(names), outcome, ", ".join(names))
    if options.get("missing", "error") != "error":
        stays += missing
    if options.get("unexpected", "error") != "error":
        found = {key: value for key, value in found.items() if key in own}
    if options.get("cast") is False:
        _check_dtypes(found, own)
    return {**found, **{key: own[key] for key in stays}}


def _check_dtypes(state: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    unfit = {
        key: f"saved as {value.dtype}, here {own[key].dtype}"
        for key, value in state.items()
        if isinstance(value, torch.Tensor) and key in own and value.dtype != own[key].dtype
    }
    if unfit:
        lines = [f"  {key!r}: {reason}" for key, reason in unfit.items()]
        raise IncompatibleStateError(
            "\n".join(["tensors have other dtypes than the checkpoint's, and cast=False:", *lines]),
            unfit=unfit,
        )


def _noted(states: Any) -> tuple[dict[str, torch.Tensor], list[int], Structure]:
    tensors, structure = taken_apart(states)
    return tensors, [each._version for each in tensors.values()], structure


def meta_of(path: str, weights_only: bool | None) -> tuple[dict[str, Any], dict[str, bytes]]:
    """What Lightning has saved beside models and optimizers, and all files of this rank.

    Raises :class:`CheckpointNotFoundError` if Lightning did not save the checkpoint.
    """
    files = files_from(path)
    if META not in files:
        raise CheckpointNotFoundError(
            f"{path} is a checkpoint of this package, but Lightning did not save it: it has no {META}"
        )
    return torch.load(io.BytesIO(files[META]), weights_only=weights_only), files


def install() -> None:
    """Replace the function where Lightning has imported it; called once, at the import."""
    for module in (lightning.fabric.plugins.io.torch_io, lightning.pytorch.core.saving):
        module.pl_load = _load


def _load(path_or_url: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
    """As ``_load`` of ``lightning.fabric.utilities.cloud_io``. Tensors are on the CPU, unless ``map_location`` is a
    device.
    """
    path = str(path_or_url)
    is_path = isinstance(path_or_url, (str, Path)) and not path.startswith("http")
    if not (is_path and is_ours_here(path)):
        return cloud_io._load(path_or_url, map_location, weights_only)
    meta, _ = meta_of(path, weights_only)
    stored = load(path, exclude="files", allow_objects=weights_only is False)
    found = lightning_checkpoint(stored, meta)
    if isinstance(map_location, (str, torch.device)):
        return move_data_to_device(found, torch.device(map_location))
    return found
