"""A torchtitan checkpoint manager that saves and loads through this package.

It derives from torchtitan's ``BaseCheckpointManager``, the contract of all managers, and follows the policies of its
``Config`` as the manager for DCP does, but for these points:

* all saves, also the last one, go to a :class:`~dcp_datastates.DataStatesWriter`, and use private connections of this
  package: no collective of a save runs on the job's groups, whatever their backend and timeout. Only a last save in the
  Hugging Face format, and a load of one, are those of its manager for DCP;
* checkpoints are recognised by their metadata; stock DCP's load, too;
* the job resumes from, and deletes by counting, only checkpoints that are committed and intact;
* ``close()`` waits for the saves in flight.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Collection
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Literal

import torch
import torch.distributed.checkpoint as dcp
from torchtitan.components.checkpointer.base import (
    DATALOADER,
    LR_SCHEDULER,
    MODEL,
    OPTIMIZER,
    BaseCheckpointManager,
    ModelWrapper,
)
from torchtitan.components.checkpointer.dcp import AsyncMode, CheckpointManager
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.observability import structured_logger as sl
from torchtitan.tools.utils import GarbageCollection

from dcp_datastates.checkpoints.find import Verification, check_verification
from dcp_datastates.checkpoints.inventory import (
    HUGGING_FACE_INDEX,
    Format,
    format_of,
    is_directory,
    remove_all,
)
from dcp_datastates.checkpoints.listing import directories
from dcp_datastates.checkpoints.retention import retain_here
from dcp_datastates.config import BackgroundOptions, Reads, WriterConfig
from dcp_datastates.errors import ConfigurationError, DataStatesError
from dcp_datastates.loading.fit import Answer, Fit, FitOptions
from dcp_datastates.loading.load import load
from dcp_datastates.manager.frameworks import BackgroundSaves, is_ours, saying
from dcp_datastates.manager.step_directories import newest_numbered, number_of
from dcp_datastates.process.forks import in_child
from dcp_datastates.storage import local, presence
from dcp_datastates.storage.object_path import Location, is_url, locate

logger = logging.getLogger(__name__)


class DataStatesCheckpointManager(BaseCheckpointManager):  # type: ignore[misc]
    """A checkpoint manager whose saves do not stop training.

    Its :class:`Config` builds it, and the trainer uses it, as with torchtitan's managers. In the modes ``async``, the
    default, and ``async_with_pinned_mem``, only the step gate waits: on a GPU it makes the stream wait, and not the
    host. If a save has failed, the next save or :meth:`close` raises its error, on all ranks.

    Threads: only the trainer's thread may use it, as with torchtitan's manager. The first rank deletes old checkpoints
    in a separate thread.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):  # type: ignore[misc]
        """The policies of torchtitan's managers, and those of :class:`~dcp_datastates.DataStatesWriter`.

        Raises :class:`ConfigurationError` for a value that cannot work.
        """

        async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "async"
        """``disabled``: every save returns when it is committed. In the other modes, which are one here, saves return
        immediately.
        """

        host_cache_size: str = "auto"
        """Host memory of each rank for saves in flight."""

        reads: Reads = "backward"
        """When the tensors are read, as for :class:`~dcp_datastates.DataStatesWriter`."""

        commit_timeout: float = 300.0
        """Seconds without progress after which a live rank fails the save."""

        exit_timeout: float = 600.0
        """Seconds for which the end of the process waits for saves in flight."""

        verify: Verification = "structure"
        """The check that a checkpoint must pass for a resume, and to count when old ones are deleted: its metadata can
        be read (``metadata``), every file is there (``structure``), every byte matches its checksum (``full``).
        """

        rename: dict[str, str] = field(default_factory=dict)
        """The program's name for a stored one, by prefixes or globs, if the program has changed: docs/resume.md."""

        missing: Answer = "error"
        """What to do if the state has values that the checkpoint lacks."""

        unexpected: Answer = "warn"
        """What to do if the checkpoint has values that the state lacks."""

        allow_objects: bool = False
        """Whether Python objects may be unpickled that may run code; only for checkpoints that you trust."""

        def __post_init__(self) -> None:
            BaseCheckpointManager.Config.__post_init__(self)
            if self.async_mode not in (modes := ("disabled", "async", "async_with_pinned_mem")):
                raise ConfigurationError(
                    f"checkpoint.async_mode={self.async_mode!r} must be one of {', '.join(modes)}"
                )
            WriterConfig.checked(**self.writer_options())
            Fit.of(self.load_options())
            check_verification(self.verify)

        def writer_options(self) -> BackgroundOptions:
            return {
                "host_cache_size": self.host_cache_size,
                "reads": self.reads,
                "commit_timeout": self.commit_timeout,
                "exit_timeout": self.exit_timeout,
            }

        def load_options(self) -> FitOptions:
            return {
                "rename": self.rename or None,
                "missing": self.missing,
                "unexpected": self.unexpected,
                "allow_objects": self.allow_objects,
                "cast": True,
            }

    _saves: BackgroundSaves
    _closed = True
    """Also until the constructor has returned."""

    def __init__(
        self,
        config: Config,
        *,
        states: dict[str, Any],
        sd_adapter: Any,
        base_folder: str = "",
        **parts: Any,
    ) -> None:
        self.enable = config.enable
        if not self.enable:
            return
        if config.last_save_in_hf and sd_adapter is None:
            raise ConfigurationError(
                "checkpoint.last_save_in_hf=True needs an sd_adapter, and the model has none: leave it False"
            )
        self.config = config
        folder = config.folder
        self._folder = locate(folder if is_url(folder) else os.path.join(base_folder, folder))
        self.folder = str(self._folder)
        self.states = states
        self.states |= {
            MODEL: ModelWrapper(parts["model_parts"]),
            OPTIMIZER: parts["optimizers"],
            DATALOADER: parts["dataloader"],
            LR_SCHEDULER: parts["lr_schedulers"],
        }
        self.sd_adapter = sd_adapter
        self._saves = BackgroundSaves(config.writer_options(), max_failures=1)
        self._closed = False

    def __del__(self) -> None:
        if not in_child():
            self.close()

    # ---- saving --------------------------------------------------------------------------------

    @sl.log_trace_span("checkpoint_save")  # type: ignore[untyped-decorator]
    @torch.no_grad()
    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        """Save if a save is due; returns whether one is. The last one waits for its commit.

        Raises this package's errors, on all ranks: that of the save before, or of a save that waits.
        """
        config, path = self.config, self._path(curr_step)
        first = curr_step == 1 and config.enable_first_step_checkpoint
        due = first or last_step or curr_step % config.interval == 0
        if config.load_only or not due:
            return False
        sl.add_step_tag("checkpoint_save")
        self.maybe_wait_for_saving()
        model_only = last_step and config.last_save_model_only
        if model_only and config.last_save_in_hf:
            CheckpointManager.dcp_save(self, self._exported(), path, AsyncMode.DISABLED, to_hf=True)
        elif last_step or config.async_mode == "disabled":
            state = self._exported() if model_only else self._all_states()
            # The trainer waits here, so no tensor changes before it is read, and none needs a copy.
            self._saves.start(state, path, reads="all")
            self._saves.finish()
        else:
            GarbageCollection.collect("before a checkpoint is staged")
            self._saves.start(self._all_states(), path)
        GarbageCollection.collect("after a checkpoint was staged")
        if config.keep_latest_k > 0:
            delete = partial(delete_old, self._folder, config.keep_latest_k, config.verify)
            self._saves.when_committed(delete)
        return True

    def _exported(self) -> dict[str, Any]:
        """The model alone, in ``export_dtype``."""
        dtype = TORCH_DTYPE_MAP[self.config.export_dtype]
        return {
            name: value.to(dtype)
            if isinstance(value, torch.Tensor) and value.is_floating_point()
            else value
            for name, value in self.states[MODEL].state_dict().items()
        }

    def _all_states(self, leave: Collection[str] = ()) -> dict[str, Any]:
        """All parts but those to ``leave``; torchtitan stores the model's values without a prefix."""
        states = {name: part for name, part in self.states.items() if name not in (MODEL, *leave)}
        return {**states, **self.states[MODEL].state_dict()}

    def _path(self, step: int) -> str:
        return os.path.join(self.folder, f"step-{step}")

    def _maybe_wait_for_staging(self) -> None:
        """Nothing: the step gate waits until a save has read what the optimizer is about to change."""

    @property
    def save_future(self) -> Future[None] | None:
        """Of the save whose outcome the trainer does not know; None without one."""
        in_flight = self._saves.in_flight()
        return in_flight[-1].committed if in_flight else None

    def _wait_for_saving(self) -> None:
        self._saves.finish()

    # ---- loading -------------------------------------------------------------------------------

    @sl.log_trace_span("checkpoint_load")  # type: ignore[untyped-decorator]
    @torch.no_grad()
    def _load(self, step: int = -1) -> bool:
        """Load the checkpoint of ``step``, or, if it is -1, the newest intact one; if there is none, the initial one.

        Returns whether there was one. Raises FileNotFoundError if there is none of ``step``.
        """
        config = self.config
        found = newest_step(self._folder, config.verify) if step == -1 else step
        if found != -1:
            path = self._path(found)
            if not is_directory(locate(path)):
                raise FileNotFoundError(f"checkpoint.load_step={found}: there is no {path}")
            self._load_from(path, model_only=found == 0)
        elif (initial := config.initial_load_path) and not is_directory(locate(initial)):
            raise ConfigurationError(f"checkpoint.initial_load_path={initial!r} is no directory")
        elif config.initial_load_in_hf:
            if self.sd_adapter is None:
                raise ConfigurationError(
                    "checkpoint.initial_load_in_hf=True needs an sd_adapter, and the model has none"
                )
            path = initial or hugging_face_assets(self.sd_adapter)
            state = self.states[MODEL].state_dict()
            quantized = config.initial_load_in_hf_quantized
            CheckpointManager.dcp_load(self, state, path, True, quantized)
        elif initial:
            self._load_from(initial, model_only=config.initial_load_model_only)
        else:
            logger.info("there is no checkpoint in %s: training begins anew", self.folder)
            return False
        GarbageCollection.collect("after a checkpoint was loaded")
        return True

    def _load_from(self, path: str, *, model_only: bool) -> None:
        """Load the checkpoint at ``path``, of this package or stock DCP's.

        Casts tensors of this package's to the dtypes of the state. Parts that torchtitan excludes
        (``exclude_from_loading``, all but the model in an initial load) are left unread on purpose.
        """
        leave = self.config.exclude_from_loading
        if unknown := [name for name in leave if name not in self.states]:
            raise ConfigurationError(
                f"checkpoint.exclude_from_loading={leave!r}: there is no {unknown[0]!r} among {', '.join(self.states)}"
            )
        if model_only:
            leave = [name for name in self.states if name != MODEL]
        state = self._all_states(leave)
        logger.info("loading the checkpoint from %s", path)
        if is_ours(path):
            options: FitOptions = {**self.config.load_options(), "exclude": leave}
            with saying(
                "These are checkpoint.rename, checkpoint.missing and checkpoint.unexpected here, and exclude is "
                "checkpoint.exclude_from_loading."
            ):
                load(path, state, **options)
        else:
            dcp.load(state, checkpoint_id=path)  # type: ignore[attr-defined]
        self.states[MODEL].load_state_dict(state)

    # ---- ending --------------------------------------------------------------------------------

    def _close(self) -> None:
        """Wait until the outcome of every save is known, then release all resources. Idempotent.

        Raises the error of a failed save that was not raised before; logs it if another error is being handled.
        """
        if self._closed:  # torchtitan's __del__ closes again, in any thread that collects garbage
            return
        self._closed = True
        is_handling = sys.exc_info()[0] is not None
        try:
            self._saves.wait()
        except Exception as error:
            if not is_handling:
                raise
            logger.error("the last save was not committed: %s", error)


# ---- the newest step -----------------------------------------------------------------------------


_PREFIX: Final = "step-"


def newest_step(folder: Location, verify: Verification) -> int:
    """The step to resume from, the same on every rank; -1 if there is none.

    The step of the newest checkpoint of this package that passes ``verify``; or that of a checkpoint of another format,
    if it is higher. Other formats count as in torchtitan.
    """
    found = newest_numbered(folder, _PREFIX, _is_stock, verify)
    return -1 if found is None else number_of(found, _PREFIX)


def delete_old(folder: Location, keep: int, verify: Verification) -> list[Location]:
    """Delete checkpoints older than the ``keep`` newest good ones of this package; returns the deleted ones.

    Treats this package's checkpoints as :func:`~dcp_datastates.retain` does. Stock and Hugging Face checkpoints are
    deleted by their step, and only once there are ``keep`` good ones: a failed save evicts no checkpoint. Only
    directories named ``step-N`` count.

    Raises :class:`StorageError`, or OSError.
    """
    retained = retain_here(
        folder, keep=keep, verify=verify, among=lambda path: number_of(path, _PREFIX) >= 0
    )
    deleted = list(retained.deleted)
    if retained.newest == keep:
        oldest = min(number_of(path, _PREFIX) for path in retained.kept[:keep])
        for path in directories(folder):
            if 0 <= number_of(path, _PREFIX) < oldest and _format(path) in (
                Format.STOCK,
                Format.HUGGING_FACE,
            ):
                remove_all(path, first=(local.METADATA_NAME, HUGGING_FACE_INDEX))
                deleted.append(path)
    return deleted


def _is_stock(path: Location) -> bool:
    return _format(path) not in (Format.DATASTATES, Format.NONE)


def _format(path: Location) -> Format:
    if path.is_symlink():
        return Format.NONE
    try:
        return format_of(path)
    except DataStatesError:  # a save of this package: uncommitted or damaged
        return Format.DATASTATES


def hugging_face_assets(adapter: Any) -> str:
    """The folder that the job names for the weights; raises :class:`ConfigurationError` if it is no directory."""
    path = getattr(adapter, "hf_assets_path", None)
    if not path or not presence.is_directory(path):
        raise ConfigurationError(
            f"model.hf_assets_path={path!r} is no directory to load weights from; correct it, or give "
            f"checkpoint.initial_load_path"
        )
    return str(path)
