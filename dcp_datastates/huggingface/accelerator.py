"""An ``Accelerator`` whose ``save_state`` starts a save of this package, and whose ``load_state`` loads it.

Models and optimizers are saved as shards, whatever the FSDP plugin's ``state_dict_type``. Schedulers, samplers, data
loaders, the scaler, random numbers and registered objects are saved and loaded by Accelerate's own code, as files of
each rank. All is one committed checkpoint.
"""

from __future__ import annotations

import os
import re
import tempfile
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

from dcp_datastates.checkpoints.answers import from_first_rank
from dcp_datastates.checkpoints.find import latest
from dcp_datastates.checkpoints.retention import retain_here
from dcp_datastates.errors import (
    CheckpointNotFoundError,
    ConfigurationError,
    IncompatibleStateError,
)
from dcp_datastates.huggingface.files import read_files, write_files
from dcp_datastates.manager.background import BackgroundSaves, take_options
from dcp_datastates.manager.library_state import (
    files_from,
    is_ours,
    is_ours_here,
    load_models,
    load_optimizers,
    state_of,
    with_files,
)

__all__ = ["DataStatesAccelerator"]

_REFUSED: Final = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA)
_NAME: Final = re.compile(r"checkpoint_([0-9]+)")
_CUSTOM: Final = re.compile(r"custom_checkpoint_[0-9]+\.pkl")


class DataStatesAccelerator(Accelerator):  # type: ignore[misc]
    """An ``Accelerator`` with saves that do not stop training, for FSDP2, FSDP1, DDP and one process.

    Args:
        strict: whether a failed save ends the training: the next save, or :meth:`wait_for_saves`, then raises its
            error. Each save then waits for the one before it. By default, a failed save is logged.
        keywords: the options of :class:`~dcp_datastates.DataStatesWriter` (``host_cache_size``, ``read_window``,
            ``read_deadline``, ``defer``, ``commit_timeout``, ``exit_timeout``, ``max_in_flight``, ``when_behind``), and
            those of ``Accelerator``.

    Raises :class:`ConfigurationError` for an option that cannot work, and for DeepSpeed, Megatron-LM and XLA.

    Threads: one thread calls the methods. The first rank deletes checkpoints in a thread.
    """

    def __init__(self, *arguments: Any, strict: bool = False, **keywords: Any) -> None:
        self._saves = BackgroundSaves(take_options(keywords), strict=strict)
        self._checked_names = False
        super().__init__(*arguments, **keywords)
        if self.distributed_type in _REFUSED:
            raise ConfigurationError(
                f"distributed_type={self.distributed_type.value}: it saves by its own means; use Accelerate's "
                f"Accelerator (for DeepSpeed, see dcp_datastates.deepspeed)"
            )

    def wait_for_saves(self) -> None:
        """Return when the outcome of every save is known. With ``strict``, raises the error of a failed one."""
        self._saves.wait()

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

        Raises ValueError, as Accelerate does, if the automatic name is that of a checkpoint from before.
        """
        configuration = self.project_configuration
        if configuration.automatic_checkpoint_naming:
            path = self._folder / f"checkpoint_{self.save_iteration}"
            self._check_name(path)
        elif output_dir is None:
            raise ValueError("no output_dir, and no automatic_checkpoint_naming: name a directory")
        else:
            path = Path(os.path.expanduser(output_dir))
        with tempfile.TemporaryDirectory(prefix="dcp_datastates-") as folder:
            for hook in self._save_model_state_pre_hook.values():
                sharded = (
                    self.distributed_type == DistributedType.FSDP
                )  # Accelerate passes none then
                weights = [] if sharded else [each.state_dict() for each in self._models]
                hook(self._models, weights, folder)
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
        self._saves.start(with_files(state_of(*self._trained()), files), path)
        if configuration.automatic_checkpoint_naming and configuration.total_limit is not None:
            keep = max(1, configuration.total_limit)
            self._saves.when_committed(
                partial(retain_here, path.parent, keep=keep, among=lambda each: bool(_number(each)))
            )
        configuration.iteration += 1
        return str(path)

    def load_state(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: dict[str, Any] | None = None,
        **load_model_func_kwargs: Any,
    ) -> None:
        """Load the states from ``input_dir``; with ``automatic_checkpoint_naming``, None is the newest committed one.

        All ranks call this, at any number of ranks. Checkpoints that Accelerate itself has saved are loaded by it.

        Raises :class:`CheckpointNotFoundError` if there is no committed checkpoint; :class:`IncompatibleStateError` if
        other objects are registered than were saved; and the errors of :func:`~dcp_datastates.load`.
        """
        path = self._to_load(input_dir)
        if not is_ours(path):
            super().load_state(str(path), load_kwargs, **load_model_func_kwargs)
            return
        models, optimizers = self._trained()
        load_models(path, models)
        load_optimizers(path, models, optimizers)
        files = files_from(path)
        saved = len(list(filter(_CUSTOM.fullmatch, files)))
        if saved != len(self._custom_objects):
            raise IncompatibleStateError(
                f"{path} has {saved} registered objects, and {len(self._custom_objects)} are registered now; register "
                f"the same ones, in the same order"
            )
        with tempfile.TemporaryDirectory(prefix="dcp_datastates-") as folder:
            write_files(Path(folder), files)
            for hook in self._load_model_state_pre_hook.values():
                hook([], folder)
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
        number = _number(path)
        if number and self.project_configuration.automatic_checkpoint_naming:
            self.project_configuration.iteration = int(number[1]) + 1

    def _trained(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Models and optimizers, by the names under which they are saved."""
        models = {f"model_{number}": model for number, model in enumerate(self._models)}
        optimizers = {
            f"optimizer_{number}": wrapped.optimizer
            for number, wrapped in enumerate(self._optimizers)
        }
        return models, optimizers

    @property
    def _folder(self) -> Path:
        return Path(self.project_dir) / "checkpoints"

    def _check_name(self, path: Path) -> None:
        """Of the first automatic name: raise ValueError if a checkpoint is committed there."""
        if not self._checked_names and from_first_rank(
            partial(_is_committed, path), "is_committed", "whether a checkpoint is there"
        ):
            raise ValueError(
                f"{path} is a checkpoint already; load the newest one with load_state(), or set "
                f"project_configuration.iteration to the next number"
            )
        self._checked_names = True

    def _to_load(self, input_dir: str | os.PathLike[str] | None) -> Path:
        if input_dir is not None:
            return Path(os.path.expanduser(input_dir))
        if not self.project_configuration.automatic_checkpoint_naming:
            raise ValueError("no input_dir, and no automatic_checkpoint_naming: name a directory")
        newest = latest(self._folder)
        if newest is None:
            raise CheckpointNotFoundError(f"no committed checkpoint in {self._folder}")
        return newest


def _number(path: Path) -> re.Match[str] | None:
    return _NAME.fullmatch(path.name)


def _is_committed(path: Path) -> bool:
    try:
        return is_ours_here(path)
    except CheckpointNotFoundError:
        return False
