"""A ``Trainer`` whose checkpoints are saved and loaded through this package.

It differs from that of transformers only in these points:

* a checkpoint is one save of this package: the shards of model and optimizer, and the small files that the Trainer
  writes (its state, the scheduler, the random numbers of each rank). The Trainer goes on at once;
* ``train(resume_from_checkpoint=True)`` resumes from the newest committed checkpoint;
* ``save_total_limit`` counts committed checkpoints, and old ones are deleted when a newer one is committed;
* of a model with adapters of PEFT, a checkpoint has what is trained, and no frozen parameter;
* at its end, the training waits for the saves in flight.
"""

from __future__ import annotations

import copy
import logging
import os
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from transformers import Trainer, TrainingArguments
from transformers.trainer import SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.utils import is_peft_available

from dcp_datastates.checkpoints.first_rank import from_first_rank
from dcp_datastates.checkpoints.retention import retain_here
from dcp_datastates.errors import CheckpointNotFoundError, ConfigurationError
from dcp_datastates.huggingface.files import read_files, write_files
from dcp_datastates.manager.background import SavesInBackground
from dcp_datastates.manager.frameworks import tell_if_untested
from dcp_datastates.manager.library_state import (
    files_from,
    holds,
    is_ours,
    is_ours_here,
    load_models,
    load_optimizers,
    state_of,
    with_files,
)
from dcp_datastates.manager.step_directories import newest_numbered, number_of
from dcp_datastates.manager.trainable import Trainable
from dcp_datastates.storage import local
from dcp_datastates.storage.object_path import Location

__all__ = ["DataStatesTrainer", "DataStatesTrainerMixin"]

logger = logging.getLogger(__name__)

tell_if_untested("transformers", transformers.__version__)

_PREFIX: Final = "checkpoint-"
_MODEL: Final = "model"
_OPTIMIZER: Final = "optimizer"


class DataStatesTrainerMixin(SavesInBackground):
    """For a ``Trainer`` or a class derived from it: ``class T(DataStatesTrainerMixin, SFTTrainer)``.

    Takes ``strict`` and the options of :class:`~dcp_datastates.DataStatesWriter`, as :class:`SavesInBackground`, beside
    those of the trainer; with ``strict``, the end of ``train`` raises the error of a failed save, too.

    Raises :class:`ConfigurationError` for an option that cannot work, for DeepSpeed and pushing every save, and for an
    ``output_dir`` that is a URL.
    """

    _resumed_from: str | None = None
    """The checkpoint that ``train`` resumes from, if it is one of this package."""

    _trainable: Trainable | None = None
    """What is saved of a model with adapters."""

    _written_to: str | None = None
    """During a save: the temporary directory to which the Trainer writes its small files."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        for given in (*arguments, *keywords.values()):
            if isinstance(given, TrainingArguments):
                local.local_path(given.output_dir, name="output_dir")  # the Trainer makes it
        super().__init__(*arguments, **keywords)
        if self.is_deepspeed_enabled:  # type: ignore[attr-defined]
            raise ConfigurationError(
                "DeepSpeed saves by its own means; use the Trainer of transformers (and see dcp_datastates.deepspeed)"
            )
        args = self.args  # type: ignore[attr-defined]
        if args.push_to_hub and args.hub_strategy != "end":
            raise ConfigurationError(
                f"hub_strategy={str(args.hub_strategy)!r} pushes the files of every save, which is in flight then; "
                f"use hub_strategy='end'"
            )

    # ---- saving --------------------------------------------------------------------------------

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        run = super()._get_output_dir(trial)  # type: ignore[misc]
        state = self.state  # type: ignore[attr-defined]
        if state.best_global_step and state.best_global_step == state.global_step:
            state.best_model_checkpoint = os.path.join(run, f"{_PREFIX}{state.best_global_step}")
        best = state.best_model_checkpoint
        with tempfile.TemporaryDirectory(prefix="dcp_datastates-") as folder:
            self._written_to = folder
            try:
                super()._save_checkpoint(model, trial)  # type: ignore[misc]
            finally:
                self._written_to = None
            name = f"{_PREFIX}{state.global_step}"
            if state.best_model_checkpoint != best:  # the Trainer has found the temporary directory
                state.best_model_checkpoint = best
                if self.args.should_save:  # type: ignore[attr-defined]
                    state.save_to_json(os.path.join(folder, name, TRAINER_STATE_NAME))
            files = read_files(Path(folder, name))
        optimizers = {} if self.args.save_only_model else self._saved_optimizers  # type: ignore[attr-defined]
        saved = state_of(self._saved_models, optimizers)
        self._saves.start(with_files(saved, files), os.path.join(run, name))
        self._delete_old(Path(run))

    def _get_output_dir(self, trial: Any) -> str:
        if self._written_to is not None:
            return self._written_to
        return super()._get_output_dir(trial)  # type: ignore[misc, no-any-return]

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Export the model, as the Trainer does. (Not called for checkpoints.)"""
        if self._written_to is None:
            super().save_model(output_dir, _internal_call)  # type: ignore[misc]
        elif output_dir is not None and self.args.should_save:  # type: ignore[attr-defined]
            os.makedirs(output_dir, exist_ok=True)
            if (model := self._adapters) is not None:
                _save_adapter_config(model, output_dir)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self._written_to is None:
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
        elif self.args.should_save:  # type: ignore[attr-defined]
            os.makedirs(output_dir, exist_ok=True)
            schedule = self.lr_scheduler.state_dict()  # type: ignore[attr-defined]
            torch.save(schedule, os.path.join(output_dir, SCHEDULER_NAME))

    def _delete_old(self, run: Path) -> None:
        """Keep as many committed checkpoints as ``save_total_limit`` says, and the best one among them."""
        limit = self.args.save_total_limit  # type: ignore[attr-defined]
        if limit is None or limit <= 0:
            return
        best = self.state.best_model_checkpoint  # type: ignore[attr-defined]

        def counts(path: Location) -> bool:
            # The best one when it was asked for, and the best one now: the deletion comes later.
            now = self.state.best_model_checkpoint  # type: ignore[attr-defined]
            spared = {os.path.basename(each) for each in (best, now) if each is not None}
            return path.name not in spared and number_of(path, _PREFIX) >= 0

        keep = max(1, limit if best is None else limit - 1)
        self._saves.when_committed(partial(retain_here, run, keep=keep, among=counts))

    # ---- resuming ------------------------------------------------------------------------------

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *arguments: Any, **keywords: Any
    ) -> Any:
        """Train. ``resume_from_checkpoint=True`` resumes from the newest committed checkpoint in ``args.output_dir``.

        Checkpoints that the Trainer itself has saved are loaded by it.

        Raises ValueError, as the Trainer does, if True finds none; :class:`CheckpointNotFoundError` for a path to a
        checkpoint that was not committed; and the errors of :func:`~dcp_datastates.load`.
        """
        path: Any = resume_from_checkpoint or None
        if path is True:
            path = self._newest()
        if path is None or not is_ours(path):
            return super().train(path, *arguments, **keywords)  # type: ignore[misc]
        logger.info("resuming from %s", path)
        with tempfile.TemporaryDirectory(prefix="dcp_datastates-") as folder:
            write_files(Path(folder), files_from(path))
            self._resumed_from = os.fspath(path)
            try:
                return super().train(folder, *arguments, **keywords)  # type: ignore[misc]
            finally:
                self._resumed_from = None

    def _newest(self) -> str:
        folder = Path(self.args.output_dir)  # type: ignore[attr-defined]
        newest = newest_numbered(folder, _PREFIX, _is_stock)
        if newest is None:
            raise ValueError(f"no committed checkpoint in the output directory ({folder})")
        return str(newest)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if self._resumed_from is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]
        else:
            models = self._saved_models if model in (None, self.model) else {_MODEL: model}  # type: ignore[attr-defined]
            load_models(self._resumed_from, models)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if self._resumed_from is None:
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        elif holds(self._resumed_from, _OPTIMIZER):
            load_optimizers(self._resumed_from, self._saved_models, self._saved_optimizers)
            schedule = torch.load(os.path.join(checkpoint or "", SCHEDULER_NAME), weights_only=True)
            self.lr_scheduler.load_state_dict(schedule)  # type: ignore[attr-defined]

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint  # type: ignore[attr-defined]
        if is_ours(best):
            load_models(best, self._saved_models)
        else:
            super()._load_best_model()  # type: ignore[misc]

    # ---- ending --------------------------------------------------------------------------------

    def _finalize_training(self, *arguments: Any, **keywords: Any) -> Any:
        self._saves.wait()
        best = self.state.best_model_checkpoint  # type: ignore[attr-defined]
        if best is not None and from_first_rank(
            partial(_is_lost, best), "is_lost", "the best checkpoint"
        ):
            logger.warning("the save of the best checkpoint, %s, was not committed", best)
            self.state.best_model_checkpoint = None  # type: ignore[attr-defined]
        return super()._finalize_training(*arguments, **keywords)  # type: ignore[misc]

    @property
    def _adapters(self) -> Any:
        """The model without wrappers, if it is one of PEFT; else None."""
        if not is_peft_available():
            return None
        from peft import PeftModel

        inner = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)  # type: ignore[attr-defined]
        return inner if isinstance(inner, PeftModel) else None

    @property
    def _saved_models(self) -> dict[str, torch.nn.Module | Trainable]:
        """The model; of one with adapters of PEFT, what is trained."""
        model = self.model  # type: ignore[attr-defined]
        if self._adapters is None:
            return {_MODEL: model}
        if self._trainable is None or self._trainable.model is not model:
            self._trainable = Trainable(model)
        return {_MODEL: self._trainable}

    @property
    def _saved_optimizers(self) -> dict[str, torch.optim.Optimizer]:
        optimizer = self.optimizer  # type: ignore[attr-defined]
        return {_OPTIMIZER: getattr(optimizer, "optimizer", optimizer)}


class DataStatesTrainer(DataStatesTrainerMixin, Trainer):  # type: ignore[misc]
    """The ``Trainer`` of transformers, with saves that do not stop training."""


def _save_adapter_config(model: Any, folder: str) -> None:
    """What ``save_pretrained`` of PEFT writes beside the weights of an adapter."""
    config = copy.copy(model.peft_config[model.active_adapters[0]])
    config.inference_mode = True
    mapping = None
    if config.task_type is None:
        kind = type(model.get_base_model())
        mapping = {"base_model_class": kind.__name__, "parent_library": kind.__module__}
    config.save_pretrained(folder, auto_mapping_dict=mapping)


def _is_stock(path: Location) -> bool:
    return isinstance(path, Path) and path.joinpath(TRAINER_STATE_NAME).exists()


def _is_lost(path: str | Path) -> bool:
    """Whether a save of this package to ``path`` was not committed."""
    try:
        is_ours_here(path)
    except CheckpointNotFoundError:
        return True
    return False
