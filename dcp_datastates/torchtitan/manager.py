"""A torchtitan checkpoint manager that saves and loads through this package.

It differs from torchtitan's manager only in these points:

* all saves, also the last one, go to a :class:`~dcp_datastates.DataStatesWriter`, and use private connections of this
  package: no collective of a save runs on the job's groups, whatever their backend and timeout;
* loads recognise this package's checkpoints by their metadata, and leave all others to torchtitan;
* the job resumes from, and deletes by counting, only checkpoints that are committed and intact;
* ``close()`` waits for the saves in flight.

torchtitan itself saves and loads the Hugging Face format.
"""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse
from torchtitan.components.checkpointer import MODEL, AsyncMode, CheckpointManager
from torchtitan.tools.utils import GarbageCollection

from dcp_datastates.checkpoints.answers import from_first_rank
from dcp_datastates.checkpoints.find import Verification, check_verification
from dcp_datastates.checkpoints.formats import Format, format_of
from dcp_datastates.config import WriterConfig
from dcp_datastates.dcp.async_save import async_save
from dcp_datastates.dcp.reader import DataStatesReader
from dcp_datastates.dcp.writer import DataStatesWriter
from dcp_datastates.errors import ConfigurationError
from dcp_datastates.staging.step_gate import open_windows
from dcp_datastates.storage import local
from dcp_datastates.torchtitan.purge import Purge
from dcp_datastates.torchtitan.steps import newest_step

__all__ = ["DataStatesCheckpointManager"]

logger = logging.getLogger(__name__)


class DataStatesCheckpointManager(CheckpointManager):  # type: ignore[misc]
    """A ``CheckpointManager`` whose saves do not stop training.

    Its :class:`Config` builds it, and the trainer uses it, as with torchtitan's manager. In the mode ``async``, the
    default, only the step gate waits: on a GPU it makes the stream wait, and not the host. In ``async_with_pinned_mem``
    the trainer waits on the host, before ``optimizers.step()``, until all is copied. If a save has failed, the next
    save or :meth:`close` raises its error, on all ranks.

    Threads: only the trainer's thread may use it, as with torchtitan's manager. The first rank deletes old checkpoints
    in a separate thread.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):  # type: ignore[misc]
        """The options of torchtitan's manager, and those of :class:`~dcp_datastates.DataStatesWriter`.

        Raises :class:`ConfigurationError` for a value that cannot work.
        """

        async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "async"
        """``disabled``: every save returns when it is committed. In the other modes, saves return at once."""

        host_cache_size: str = "auto"
        """Host memory of each rank for saves in flight."""

        read_window: Literal["backward", "immediate"] = "backward"
        """When deferred reads start: with the next backward pass, or at once."""

        read_deadline: float = 1.0
        """Seconds after which deferred reads start in any case."""

        commit_timeout: float = 300.0
        """Seconds without progress after which a live rank fails the save."""

        exit_timeout: float = 600.0
        """Seconds for which the end of the process waits for saves in flight."""

        verify: Verification = "structure"
        """The check that a checkpoint must pass for a resume, and to count when old ones are deleted: its metadata can
        be read (``metadata``), every file is there (``structure``), every byte matches its checksum (``full``).
        """

        def __post_init__(self) -> None:
            CheckpointManager.Config.__post_init__(self)
            self.writer_config()
            check_verification(self.verify)
            if "://" in self.folder:
                raise ConfigurationError(
                    f"checkpoint.folder={self.folder!r} is a URL; only local and mounted file systems are "
                    f"supported: leave the manager as it is for this job"
                )

        def writer_options(self) -> dict[str, Any]:
            names = (
                "host_cache_size",
                "read_window",
                "read_deadline",
                "commit_timeout",
                "exit_timeout",
            )
            return {name: getattr(self, name) for name in names}

        def writer_config(self) -> WriterConfig:
            """The checked writer configuration, with the writer's defaults for all other options."""
            return WriterConfig.checked(
                **self.writer_options(),
                defer="owned",
                overwrite=True,
                commit="background",
                max_in_flight=4,
                when_behind="wait",
            )

    # Attributes that close() reads, also if the constructor was not called or has raised.
    staging_future: Future[None] | None = None
    save_future: Future[None] | None = None
    stager: Any = None
    purge_thread: Any = None
    folder: str
    _options: Mapping[str, Any] = {}
    _verify: Verification = "structure"
    _purge: Purge | None = None
    _behind: DataStatesWriter | None = None
    _at_once: DataStatesWriter | None = None
    _closed = False

    def __init__(self, config: Config, **components: Any) -> None:
        without_purge = copy.copy(config)
        # Then torchtitan's thread that deletes by name does not start.
        without_purge.keep_latest_k = 0
        super().__init__(without_purge, **components)
        if not self.enable:
            return
        self.keep_latest_k = config.keep_latest_k
        self.folder = str(local.local_path(self.folder))  # refuses URLs
        self._options = config.writer_options()
        self._verify = config.verify
        if self.async_mode != AsyncMode.DISABLED:
            # If there is no stager, torchtitan makes one. It closes the stager at the end.
            self._behind = self.stager = DataStatesWriter(**self._options)

    # ---- saving --------------------------------------------------------------------------------

    @torch.no_grad()
    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: AsyncMode,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Future[None] | AsyncSaveResponse | None:
        """Save ``state_dict`` at ``checkpoint_id``. If ``disabled``, returns None once committed; else one or two
        futures, at once.

        Raises this package's errors, on all ranks.
        """
        if to_hf:
            result: Future[None] | AsyncSaveResponse | None = super().dcp_save(
                state_dict,
                checkpoint_id=checkpoint_id,
                async_mode=async_mode,
                enable_garbage_collection=enable_garbage_collection,
                to_hf=True,
            )
            return result
        if async_mode == AsyncMode.DISABLED:
            self._save_at_once(state_dict, checkpoint_id)
            result = None
        else:
            response = self._save_behind(state_dict, checkpoint_id)
            pinned = async_mode == AsyncMode.ASYNC_WITH_PINNED_MEM
            result = response if pinned else response.upload_completion
        if enable_garbage_collection:
            GarbageCollection.collect("GC collection invoked by checkpointer.")
        return result

    def _save_behind(self, state_dict: dict[str, Any], checkpoint_id: str) -> AsyncSaveResponse:
        writer = self._behind
        if writer is None:
            raise ConfigurationError(
                "an asynchronous save, and async_mode='disabled': choose another mode for the job"
            )
        if dist.is_initialized():
            return async_save(state_dict, checkpoint_id, writer=writer)
        # Without torch.distributed, DCP's own call suffices: there are no other ranks to agree with.
        response = dcp.async_save(  # type: ignore[attr-defined]
            state_dict, checkpoint_id=checkpoint_id, storage_writer=writer, async_stager=writer
        )
        if isinstance(response, AsyncSaveResponse):
            return response
        return AsyncSaveResponse(writer.captured, response)

    def _save_at_once(self, state_dict: dict[str, Any], checkpoint_id: str) -> None:
        if self._at_once is None:
            # The trainer waits here, so no tensor changes before it is read, and none needs a copy.
            options = {**self._options, "defer": "all", "read_window": "immediate"}
            self._at_once = DataStatesWriter(**options)
        if dist.is_initialized():
            async_save(state_dict, checkpoint_id, writer=self._at_once).upload_completion.result()
        else:
            dcp.save(state_dict, checkpoint_id=checkpoint_id, storage_writer=self._at_once)  # type: ignore[attr-defined]

    def _maybe_wait_for_staging(self) -> None:
        """Return when the newest save is captured, or has failed.

        Logs a failure, which may concern only this rank; :meth:`_wait_for_saving` raises it on all ranks.
        """
        staging, self.staging_future = self.staging_future, None
        if staging is None:
            return
        open_windows()  # no backward pass can begin while the trainer waits
        try:
            staging.result()
        except Exception as error:
            logger.error("a save has failed, and training goes on until the next one: %s", error)

    def _wait_for_saving(self) -> None:
        future, self.save_future = self.save_future, None
        if future is not None:
            open_windows()
            future.result()

    # ---- loading -------------------------------------------------------------------------------

    def dcp_load(
        self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool
    ) -> None:
        """Load ``state_dict`` from a checkpoint of this package; torchtitan loads all others.

        Casts tensors to the dtypes of ``state_dict``, as torchtitan does. Values that torchtitan excludes
        (``exclude_from_loading``, all but the model in an initial load) are left unread on purpose.
        """
        if from_hf or not self._is_mine(checkpoint_id):
            super().dcp_load(
                state_dict,
                checkpoint_id=checkpoint_id,
                from_hf=from_hf,
                from_quantized=from_quantized,
            )
            return
        reader = DataStatesReader(
            checkpoint_id,
            allow_cast=True,
            leave=[name for name in self.states if name not in (MODEL, *state_dict)],
            host_cache_size=self._options["host_cache_size"],
        )
        dcp.load(state_dict, storage_reader=reader, process_group=self.pg)  # type: ignore[attr-defined]
        if MODEL in self.states:
            self.states[MODEL].load_state_dict(state_dict)

    def _is_mine(self, checkpoint_id: str) -> bool:
        if "://" in checkpoint_id:
            return False
        found: Format = from_first_rank(
            lambda: format_of(checkpoint_id), f"who wrote {checkpoint_id}"
        )
        return found is Format.DATASTATES

    def _find_load_step(self, folder: str = "") -> int:
        """The step of the newest intact checkpoint, the same on every rank; -1 if there is none."""
        folder = folder or self.folder
        if "://" in folder:
            step: int = super()._find_load_step(folder)
            return step
        directory = local.local_path(folder)
        return from_first_rank(
            lambda: newest_step(directory, self._verify), "the step to resume from"
        )

    # ---- deleting ------------------------------------------------------------------------------

    def _purge_stale_checkpoints(self) -> None:
        """Delete, in the background, checkpoints older than the ``keep_latest_k`` newest good ones.

        The save in flight is not committed yet, so it does not count among them.
        """
        if self._should_purge():
            if self._purge is None:
                self._purge = Purge(local.local_path(self.folder), self.keep_latest_k, self._verify)
            self._purge.request()

    # ---- ending --------------------------------------------------------------------------------

    def _close(self) -> None:
        """Wait until the outcome of every save is known, then release all resources. Idempotent.

        Raises the error of a failed save that was not raised before; logs it if another error is being handled.
        """
        if self._closed:  # torchtitan's __del__ closes again, in any thread that collects garbage
            return
        self._closed = True
        failure: BaseException | None = None
        self._maybe_wait_for_staging()
        try:
            self._wait_for_saving()
        except Exception as error:
            failure = error
        for writer in (self._behind, self._at_once):
            if writer is not None:
                try:
                    writer.close()
                except Exception as error:
                    failure = failure or error
        if self._purge is not None:
            self._purge.close()
        super()._close()
        if failure is not None:
            if sys.exc_info()[0] is None:
                raise failure
            logger.error("the last save was not committed: %s", failure)
