"""An ``Accelerator`` whose ``save_state`` starts a save of this package, and whose ``load_state`` loads it.

Models and optimizers are saved as shards, whatever the FSDP plugin's ``state_dict_type``. Schedulers, samplers, data
loaders, the scaler, random numbers and registered objects are saved and loaded by Accelerate's own code, as files of
each rank. All is one committed checkpoint.
"""

from __future__ import annotations

import logging
import os
import re
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from accelerate import Accelerator, DistributedType
from accelerate.checkpointing import (
    load_accelerator_state,
    load_custom_state,
    save_accelerator_state,
    save_custom_state,
)

from dcp_datastates.checkpoints.first_rank import from_first_rank
from dcp_datastates.checkpoints.retention import retain_here
from dcp_datastates.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    ConfigurationError,
    IncompatibleStateError,
)
from dcp_datastates.huggingface.files import read_files, write_files
from dcp_datastates.manager.frameworks import (
    SavesInBackground,
    alike,
    files_from,
    is_ours,
    is_ours_here,
    load_parts,
    state_of,
    with_files,
)
from dcp_datastates.manager.step_directories import newest_numbered, number_of
from dcp_datastates.storage.object_path import Location, ObjectPath, locate
from dcp_datastates.training.models import model_state

logger = logging.getLogger(__name__)

_REFUSED: Final = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA)
_PREFIX: Final = "checkpoint_"
_STOCK_FILES: Final = "random_states_*.pkl"
"""What every rank of Accelerate's own ``save_state`` writes, as its last file but those of registered objects."""

_CUSTOM: Final = re.compile(r"custom_checkpoint_[0-9]+\.pkl")


class DataStatesAccelerator(SavesInBackground, Accelerator):  # type: ignore[misc]
    """An ``Accelerator`` with saves that do not stop training, for FSDP2, FSDP1, DDP and one process.

    Takes ``max_failures``, the options of :class:`~dcp_datastates.DataStatesWriter` and those of loads, as
    :class:`SavesInBackground`, beside those of ``Accelerator``.

    Raises :class:`ConfigurationError` for an option that cannot work, and for DeepSpeed, Megatron-LM and XLA.
    """

    _checked_names = False

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        if self.distributed_type in _REFUSED:
            raise ConfigurationError(
                f"distributed_type={self.distributed_type.value}: it saves by its own means; use Accelerate's "
                f"Accelerator (for DeepSpeed, see dcp_datastates.deepspeed)"
            )

    def end_training(self) -> None:
        """Wait for the saves in flight, then end the training as Accelerate does."""
        try:
            self._saves.wait()
        finally:
            super().end_training()

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        **save_model_func_kwargs: Any,
    ) -> str:
        """Start the save of the current states; returns the checkpoint's directory, without waiting for storage.

        All ranks call this. With ``automatic_checkpoint_naming``, the directory is
        ``project_dir/checkpoints/checkpoint_N``, and older checkpoints than the ``total_limit`` newest committed ones
        are deleted in the background once this one is committed. ``safe_serialization`` has no effect.

        Raises ValueError, as Accelerate does, if the automatic name is that of a checkpoint from before; and for a
        directory with a checkpoint of Accelerate's own, whose files its tools would go on loading.
        """
        configuration = self.project_configuration
        if configuration.automatic_checkpoint_naming:
            path = self._folder / f"{_PREFIX}{self.save_iteration}"
        elif output_dir is None:
            raise ValueError("no output_dir, and no automatic_checkpoint_naming: name a directory")
        else:
            path = _place(output_dir)
        self._check_name(path)
        models, optimizers = self._trained()
        with tempfile.TemporaryDirectory(prefix="dcp_datastates-") as folder:
            saved = models
            changed: dict[str, Any] = {}
            if self._save_model_state_pre_hook:
                saved, changed = self._without_saved_by_hooks(models, folder)
            save_accelerator_state(
                folder,
                [],
                [],
                self._schedulers,
                self._dataloaders,
                self.state.process_index,
                self.step,
                self.scaler,
            )
            for index, custom in enumerate(self._custom_objects):
                save_custom_state(custom, folder, index)
            files = read_files(Path(folder))
        state = state_of({**models, **optimizers}, [*saved, *optimizers])
        self._saves.start(with_files({**state, **changed}, files), path)
        if configuration.automatic_checkpoint_naming and configuration.total_limit is not None:
            keep = max(1, configuration.total_limit)
            self._saves.when_committed(
                partial(
                    retain_here,
                    path.parent,
                    keep=keep,
                    among=lambda each: number_of(each, _PREFIX) >= 0,
                )
            )
        configuration.iteration += 1
        return str(path)

    def _without_saved_by_hooks(
        self, models: dict[str, Any], folder: str
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Call the hooks; returns the models that are left to save, and the states that hooks have put in their places.

        A hook that saves a model by itself takes its weights out of the list; often only that of the first rank does.
        One may also change them. (With FSDP, Accelerate passes none.)
        """
        weights = {} if self._is_sharded else {n: each.state_dict() for n, each in models.items()}
        names = {name: list(each) for name, each in weights.items()}
        left = list(weights.values())
        for hook in self._save_model_state_pre_hook.values():
            hook(self._models, left, folder)
        changed: dict[str, Any] = {}
        if len(left) == len(weights):
            for (name, given), now in zip(weights.items(), left, strict=True):
                if now is not given or list(now) != names[name]:
                    ours = dict(zip(names[name], model_state([models[name]]), strict=True))
                    changed[name] = {ours.get(key, key): value for key, value in now.items()}
            return {n: each for n, each in models.items() if n not in changed}, changed
        mine = sorted(weights.keys() - _among(left, weights).keys())
        taken = from_first_rank(lambda: mine, "taken", "which models hooks save")
        return {name: model for name, model in models.items() if name not in taken}, {}

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: dict[str, Any] | None = None,
        **load_model_func_kwargs: Any,
    ) -> None:
        """Load the states from ``input_dir``; with ``automatic_checkpoint_naming``, None is the newest committed one.

        All ranks call this, at any number of ranks. If the newest one is damaged, the next older one is loaded, with a
        line in the log; a damaged one that is named is an error. Checkpoints that Accelerate itself has saved are
        loaded by it; automatic names are numbered from the loaded one on.

        Raises :class:`CheckpointNotFoundError` if there is no committed checkpoint, :class:`CheckpointCorruptError` if
        it is damaged, or if all are; :class:`IncompatibleStateError` if other objects are registered than were saved;
        and the errors of :func:`~dcp_datastates.load`.
        """
        left_out: list[str] = []
        while True:
            path = self._to_load(input_dir, left_out)
            try:
                if is_ours(path):
                    self._load(path, load_kwargs)
                else:
                    super().load_state(str(path), load_kwargs, **load_model_func_kwargs)
                break
            except CheckpointCorruptError as error:
                if input_dir is not None:  # the program goes by the number in its name
                    raise
                logger.error("leaving out checkpoint %s: %s", path, error)
                left_out.append(path.name)
        number = number_of(path, _PREFIX)
        if number >= 0 and self.project_configuration.automatic_checkpoint_naming:
            self.project_configuration.iteration = number + 1

    def _load(self, path: Location, load_kwargs: dict[str, Any] | None) -> None:
        models, optimizers = self._trained()
        files = alike(path, partial(files_from, path))
        saved = len(list(filter(_CUSTOM.fullmatch, files)))
        if saved != len(self._custom_objects):
            raise IncompatibleStateError(
                f"{path} has {saved} registered objects, and {len(self._custom_objects)} are registered now; register "
                f"the same ones, in the same order"
            )
        with tempfile.TemporaryDirectory(prefix="dcp_datastates-") as folder:
            write_files(Path(folder), files)
            # A hook that loads a model by itself takes it out of the list. (With FSDP, Accelerate passes none.)
            left = [] if self._is_sharded else list(self._models)
            for hook in self._load_model_state_pre_hook.values():
                hook(left, folder)
            by_us = models if self._is_sharded else _among(left, models)
            with self._loading():
                parts = {**models, **optimizers}
                load_parts(path, parts, [*by_us, *optimizers], **self._load_options)
            found = load_accelerator_state(
                folder,
                [],
                [],
                self._schedulers,
                self._dataloaders,
                self.state.process_index,
                self.scaler,
                "cpu",
                load_kwargs,
            )
            if "step" in found:
                self.step = found["step"]
            for index, custom in enumerate(self._custom_objects):
                load_custom_state(custom, folder, index)

    def _trained(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Models and optimizers, by the names under which they are saved."""
        models = {f"model_{number}": model for number, model in enumerate(self._models)}
        optimizers = {
            f"optimizer_{number}": wrapped.optimizer
            for number, wrapped in enumerate(self._optimizers)
        }
        return models, optimizers

    @property
    def _is_sharded(self) -> bool:
        """Whether Accelerate passes no models and weights to hooks."""
        return bool(self.distributed_type == DistributedType.FSDP)

    @property
    def _folder(self) -> Location:
        return _place(self.project_dir) / "checkpoints"

    def _check_name(self, path: Location) -> None:
        """Raise ValueError if a checkpoint is there that must stay: at an automatic name, the first time; or one of
        Accelerate's own.
        """
        automatic = self.project_configuration.automatic_checkpoint_naming
        if automatic and self._checked_names:
            return
        found = from_first_rank(partial(_found, path), "found", "whether a checkpoint is there")
        if found == "stock":
            raise ValueError(
                f"{path} has a checkpoint of Accelerate itself, whose files its tools would go on loading; name "
                f"another directory, or load the newest one with load_state(), from which numbers go on"
            )
        if found and automatic:
            raise ValueError(
                f"{path} is a checkpoint already; load the newest one with load_state(), or set "
                f"project_configuration.iteration to the next number"
            )
        self._checked_names = automatic

    def _to_load(
        self, input_dir: str | os.PathLike[str] | None, left_out: Sequence[str]
    ) -> Location:
        if input_dir is not None:
            return _place(input_dir)
        if not self.project_configuration.automatic_checkpoint_naming:
            raise ValueError("no input_dir, and no automatic_checkpoint_naming: name a directory")
        newest = newest_numbered(self._folder, _PREFIX, _is_stock, leave_out=left_out)
        if newest is not None:
            return newest
        raise CheckpointNotFoundError(
            f"no committed checkpoint in {self._folder}: a first run does not call load_state(). This line starts or "
            f"resumes: if dcp_datastates.latest({str(self._folder)!r}) is not None: accelerator.load_state()"
        )


def _place(path: str | os.PathLike[str]) -> Location:
    """A URL's place in its store. A path stays as it is, but for a ``~`` at its beginning."""
    if isinstance(location := locate(path), ObjectPath):
        return location
    return Path(os.path.expanduser(path))


def _among(left: list[Any], named: dict[str, Any]) -> dict[str, Any]:
    """Those of ``named`` that are in ``left``."""
    return {name: each for name, each in named.items() if any(each is one for one in left)}


def _found(path: Location) -> str | None:
    """Whose checkpoint is at ``path``: "ours", "stock" or None."""
    if _is_stock(path):
        return "stock"
    try:
        return "ours" if is_ours_here(path) else None
    except CheckpointNotFoundError:
        return None


def _is_stock(path: Location) -> bool:
    return isinstance(path, Path) and any(path.glob(_STOCK_FILES))
