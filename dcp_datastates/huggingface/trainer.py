"""A ``Trainer`` whose checkpoints are saved and loaded through this package.

It differs from that of transformers only in these points:

* a checkpoint is one save of this package: the shards of model and optimizer, and the small files that the Trainer
  writes (configuration, tokenizer, its state, the scheduler, the random numbers of each rank), and those that callbacks
  write into its directory in ``on_save``. The Trainer goes on immediately;
* ``train(resume_from_checkpoint=True)`` resumes from the newest committed checkpoint that can be loaded; so does the
  path of the newest one, if that was not committed or is damaged;
* ``save_total_limit`` counts committed checkpoints, and old ones are deleted when a newer one is committed;
* of a model with adapters of PEFT, a checkpoint has all adapters and what else is trained, not the frozen base;
* at its end, the training waits for the saves in flight.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from transformers import Trainer, TrainingArguments
from transformers.trainer import SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import SaveStrategy
from transformers.utils import is_peft_available

from dcp_datastates.checkpoints.first_rank import from_first_rank
from dcp_datastates.checkpoints.listing import directories
from dcp_datastates.checkpoints.retention import retain_here
from dcp_datastates.conversion.hugging_face import MODEL, OPTIMIZER
from dcp_datastates.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    ConfigurationError,
)
from dcp_datastates.huggingface.files import read_files, read_others, write_files
from dcp_datastates.huggingface.resuming import (
    PREFIX,
    Resume,
    Resumption,
    former_run,
    is_lost,
    is_stock,
)
from dcp_datastates.manager.continuing import Fresh, parse_fresh, set_aside
from dcp_datastates.manager.frameworks import (
    SavesInBackground,
    alike,
    files_from,
    holds,
    is_ours,
    load_parts,
    state_of,
    tell_if_untested,
    with_files,
)
from dcp_datastates.manager.step_directories import number_of
from dcp_datastates.storage import local
from dcp_datastates.storage.object_path import Location
from dcp_datastates.training.models import Trainable

logger = logging.getLogger(__name__)

tell_if_untested("transformers", transformers.__version__)

_UNLOADABLE: Final = (CheckpointCorruptError, CheckpointNotFoundError)

_WEIGHTS: Final = (
    *("model*.safetensors", "adapter_model*.safetensors", "pytorch_model*.bin"),
    "*.safetensors.index.json",
)
"""The files of an export that have weights: a checkpoint has those as tensors."""


class DataStatesTrainerMixin(SavesInBackground):
    """For a ``Trainer`` or a class derived from it: ``class T(DataStatesTrainerMixin, SFTTrainer)``.

    Takes ``max_failures``, the options of :class:`~dcp_datastates.DataStatesWriter` and those of loads, as
    :class:`SavesInBackground`, beside those of the trainer. The end of ``train`` raises the error of a failed save,
    too, as ``max_failures`` says.

    ``fresh`` says whether a training that resumes nothing may begin in an ``output_dir`` with checkpoints of a former
    run: ``"refuse"``, or ``"replace"``: those are set aside, in a directory of ``output_dir``.

    Raises :class:`ConfigurationError` for an option that cannot work, for DeepSpeed and pushing every save, and for an
    ``output_dir`` that is a URL.
    """

    fresh: Fresh = "refuse"

    _resumed_from: str | None = None
    """The checkpoint that ``train`` resumes from, if it is one of this package."""

    _prepared: tuple[Path, dict[str, Any], dict[str, bytes]] | None = None
    """The path, state and files of a save that waits for the callbacks of ``on_save``."""

    _waits_for_callbacks = False
    """Whether the Trainer calls ``on_save`` of the callbacks after ``_save_checkpoint``."""

    _continued = -1
    """The number of the checkpoint from which this run went on: those up to it belong to this run."""

    _written_to: str | None = None
    """During a save: the temporary directory to which the Trainer writes its small files."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        self.fresh = parse_fresh(keywords.pop("fresh", self.fresh))
        self._saved: set[str] = set()  # the names of this run's checkpoints
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

    def _maybe_log_save_evaluate(self, *arguments: Any, **keywords: Any) -> None:
        self._waits_for_callbacks = True
        try:
            super()._maybe_log_save_evaluate(*arguments, **keywords)  # type: ignore[misc]
        finally:
            self._waits_for_callbacks = False
            self._start_prepared()

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self._start_prepared()
        run = super()._get_output_dir(trial)  # type: ignore[misc]
        state = self.state  # type: ignore[attr-defined]
        if state.best_global_step and state.best_global_step == state.global_step:
            state.best_model_checkpoint = os.path.join(run, f"{PREFIX}{state.best_global_step}")
        best = state.best_model_checkpoint
        name = f"{PREFIX}{state.global_step}"
        os.makedirs(os.path.join(run, name), exist_ok=True)  # callbacks write there
        with tempfile.TemporaryDirectory(prefix="dcp_datastates-") as folder:
            self._written_to = folder
            try:
                super()._save_checkpoint(model, trial)  # type: ignore[misc]
            finally:
                self._written_to = None
            if state.best_model_checkpoint != best:  # the Trainer has found the temporary directory
                state.best_model_checkpoint = best
                if self.args.should_save:  # type: ignore[attr-defined]
                    state.save_to_json(os.path.join(folder, name, TRAINER_STATE_NAME))
            files = read_files(Path(folder, name))
        optimizers = {} if self.args.save_only_model else self._saved_optimizers  # type: ignore[attr-defined]
        saved = state_of({**self._saved_models, **optimizers})
        self._prepared = Path(run, name), saved, files
        if not self._waits_for_callbacks:
            self._start_prepared()

    def _start_prepared(self) -> None:
        """Start the save that was prepared: after ``on_save`` of the callbacks, whose files belong to it."""
        if self._prepared is None:
            return
        (path, saved, files), self._prepared = self._prepared, None
        if self.args.should_save:  # type: ignore[attr-defined]
            files = {**read_others(path), **files}
        self._saved.add(path.name)
        self._saves.start(with_files(saved, files), path)
        self._delete_old(path.parent)

    def _get_output_dir(self, trial: Any) -> str:
        if self._written_to is not None:
            return self._written_to
        return super()._get_output_dir(trial)  # type: ignore[misc, no-any-return]

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Export the model, as the Trainer does. (For a checkpoint, all that the export has but the weights.)"""
        if self._written_to is None:
            super().save_model(output_dir, _internal_call)  # type: ignore[misc]
        elif output_dir is not None and self.args.should_save:  # type: ignore[attr-defined]
            adapters = self._adapters
            state = {} if adapters is None else placeholders(adapters)
            self._save(output_dir, state_dict=state)  # type: ignore[attr-defined]
            for pattern in _WEIGHTS:
                for path in Path(output_dir).rglob(pattern):
                    path.unlink()

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
            return path.name not in spared and number_of(path, PREFIX) >= 0

        keep = max(1, limit if best is None else limit - 1)
        self._saves.when_committed(partial(_delete_old, run, keep, counts, self._continued))

    # ---- resuming ------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: Resume = None, *arguments: Any, **keywords: Any) -> Any:
        """Train. With ``resume_from_checkpoint=True``, go on from the newest committed checkpoint in
        ``args.output_dir``; if that is damaged, from the next older one, with a line in the log.

        A path with the highest number in its folder means the same, as programs choose it so: if no whole checkpoint is
        there, the newest one beside it is taken, with a warning. Checkpoints that the Trainer itself has saved are
        loaded by it.

        Raises ValueError, as the Trainer does, if True finds none; :class:`CheckpointNotFoundError` for another path to
        a checkpoint that was not committed, :class:`CheckpointCorruptError` for a damaged one, or if all are damaged;
        and the other errors of :func:`~dcp_datastates.load`.
        """
        trial = arguments[0] if arguments else keywords.get("trial")
        if not resume_from_checkpoint:
            self._begin_in(Path(super()._get_output_dir(trial)))  # type: ignore[misc]
            return super().train(None, *arguments, **keywords)  # type: ignore[misc]
        resumption = Resumption(resume_from_checkpoint, self.args.output_dir)  # type: ignore[attr-defined]
        while True:
            path, ours = resumption.next()
            self._go_on_from(path, Path(super()._get_output_dir(trial)))  # type: ignore[misc]
            if not ours:
                return super().train(path, *arguments, **keywords)  # type: ignore[misc]
            try:
                with self._loading():
                    files = alike(path, partial(files_from, path))
                logger.info("resuming from %s", path)
                return self._train_from(path, files, *arguments, **keywords)
            except _Unloadable as found:
                resumption.leave_out(path, found.error)

    def _go_on_from(self, path: str, run: Path) -> None:
        """What lies beside the checkpoint belongs to this run."""
        if Path(path).resolve().parent != run.resolve():
            self._begin_in(run)
            return
        self._continued = max(self._continued, number_of(Path(path), PREFIX))

    def _begin_in(self, run: Path) -> None:
        """Begin another run than that of the checkpoints in a directory.

        Raises :class:`ConfigurationError` if there are some: its saves would replace them, one after another, and a
        later resume would mix both.
        """
        if self.args.save_strategy == SaveStrategy.NO:  # type: ignore[attr-defined]
            return

        def look() -> None:
            there = former_run(run, self._saved)
            if there and self.fresh == "replace":
                set_aside(run, there)
            elif there:
                raise ConfigurationError(
                    f"{str(run)!r} has {there[-1].name} of a former run, and this training starts from scratch: its "
                    f"checkpoints would replace those. train(resume_from_checkpoint=True) continues that run; another "
                    f'run needs another output_dir; or fresh="replace" sets those aside (DataStatesTrainer(…, '
                    f'fresh="replace"), or python -m dcp_datastates.huggingface --set fresh=replace)'
                )

        from_first_rank(look, "former", "what the output directory holds")

    def _train_from(
        self, path: str, files: Mapping[str, bytes], *arguments: Any, **keywords: Any
    ) -> Any:
        with tempfile.TemporaryDirectory(prefix="dcp_datastates-") as folder:
            write_files(Path(folder), files)
            self._resumed_from = path
            try:
                return super().train(folder, *arguments, **keywords)  # type: ignore[misc]
            finally:
                self._resumed_from = None

    @contextlib.contextmanager
    def _loading(self) -> Iterator[None]:
        try:
            with super()._loading():
                yield
        except _UNLOADABLE as error:
            raise _Unloadable(error) from error

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if self._resumed_from is None:  # else the model is loaded with its optimizer
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load the model, too, which changes nothing before this: if one does not fit, both stay as they are."""
        if (path := self._resumed_from) is None:
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
            return
        models, parts = self._saved_models, {**self._saved_models, **self._saved_optimizers}
        with self._loading():
            has_optimizer = alike(path, partial(holds, path, OPTIMIZER))
            load_parts(path, parts, parts if has_optimizer else models, **self._load_options)
        if has_optimizer:
            schedule = torch.load(os.path.join(checkpoint or "", SCHEDULER_NAME), weights_only=True)
            self.lr_scheduler.load_state_dict(schedule)  # type: ignore[attr-defined]

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint  # type: ignore[attr-defined]
        if is_ours(best):
            models = self._saved_models
            load_parts(best, models, models, **self._load_options)
        else:
            super()._load_best_model()  # type: ignore[misc]

    # ---- ending --------------------------------------------------------------------------------

    def _finalize_training(self, *arguments: Any, **keywords: Any) -> Any:
        self._start_prepared()
        self._saves.wait()
        best = self.state.best_model_checkpoint  # type: ignore[attr-defined]
        if best is not None and from_first_rank(
            partial(is_lost, best), "is_lost", "the best checkpoint"
        ):
            logger.warning("the save of the best checkpoint, %s, was not committed", best)
            self.state.best_model_checkpoint = None  # type: ignore[attr-defined]
        return super()._finalize_training(*arguments, **keywords)  # type: ignore[misc]

    @property
    def _adapters(self) -> Any:
        """The model without wrappers, if it is one of PEFT; else None."""
        model = self.model  # type: ignore[attr-defined]
        return adapters_of(self.accelerator.unwrap_model(model, keep_torch_compile=False))  # type: ignore[attr-defined]

    @property
    def _saved_models(self) -> dict[str, torch.nn.Module | Trainable]:
        """The model; of one with adapters of PEFT, what is trained, and all that PEFT saves."""
        model = self.model  # type: ignore[attr-defined]
        adapters = self._adapters
        return {MODEL: model if adapters is None else Trainable(model, also=saved_names(adapters))}

    @property
    def _saved_optimizers(self) -> dict[str, torch.optim.Optimizer]:
        optimizer = self.optimizer  # type: ignore[attr-defined]
        return {OPTIMIZER: getattr(optimizer, "optimizer", optimizer)}


class DataStatesTrainer(DataStatesTrainerMixin, Trainer):  # type: ignore[misc]
    """The ``Trainer`` of transformers, with saves that do not stop training."""


class _Unloadable(Exception):
    """A checkpoint was committed, and cannot be loaded."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


def _delete_old(run: Path, keep: int, counts: Callable[[Location], bool], continued: int) -> None:
    """Keep the ``keep`` newest of those that count. Those that the Trainer itself has saved, up to the number
    ``continued`` from which this run goes on, are the oldest.
    """
    kept = retain_here(run, keep=keep, among=counts, whole=True).kept
    stock = [path for path in directories(run) if counts(path) and is_stock(path)]
    stock = [path for path in stock if number_of(path, PREFIX) <= continued]
    for path in stock[: max(0, len(kept) + len(stock) - keep)]:
        assert isinstance(path, Path)
        shutil.rmtree(path)
        logger.info("deleted checkpoint %s", path)


# ---- adapters ------------------------------------------------------------------------------------


_SHARDED: Final = "_fsdp_wrapped_module."
"""What FSDP1 puts into the names of parameters."""

_PROMPTS: Final = "prompt_encoder."
"""Where prompts lie, of which PEFT saves what it makes of them."""


def adapters_of(model: torch.nn.Module) -> Any:
    """``model``, without a wrapper around it, if it is one of PEFT; else None."""
    if not is_peft_available():
        return None
    from peft import PeftModel

    return model if isinstance(model, PeftModel) else None


def placeholders(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A state of ``model`` with a single number for each tensor: for code that looks at names."""
    named = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    return {
        name.replace(_SHARDED, ""): torch.empty(1, device="cpu", dtype=torch.float32)
        for name, _ in named
    }


def saved_names(model: Any) -> set[str]:
    """The names of the parameters that PEFT saves of ``model``: of all its adapters, also of those that are frozen."""
    from peft import get_peft_model_state_dict

    state = placeholders(model)
    name_of = {id(value): name for name, value in state.items()}
    names = {name for name in state if name.startswith(_PROMPTS)}
    for adapter in model.peft_config:
        saved = get_peft_model_state_dict(model, state_dict=dict(state), adapter_name=adapter)
        names.update(name_of[id(value)] for value in saved.values() if id(value) in name_of)
    return names
