"""torchtitan's checkpoint manager, saving and loading through this package.

What differs from torchtitan's own, and nothing else:

* saves go to a :class:`~dcp_datastates.DataStatesWriter`, on a process group of this package's own, the last
  one too: no collective of a save runs on the job's groups, whatever their backend and timeout;
* loads recognise by its metadata who wrote a checkpoint, and leave the others' to torchtitan;
* the checkpoint to resume from, and those that may be deleted, are told by what is committed and whole;
* ``close()`` waits for the saves in flight.

Saves and loads in Hugging Face format are torchtitan's.
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
from dcp_datastates.config import WriterConfig
from dcp_datastates.dcp.async_save import async_save
from dcp_datastates.dcp.reader import DataStatesReader
from dcp_datastates.dcp.writer import DataStatesWriter
from dcp_datastates.errors import ConfigurationError
from dcp_datastates.staging.step_gate import open_windows
from dcp_datastates.storage import local
from dcp_datastates.torchtitan.purge import Purge
from dcp_datastates.torchtitan.steps import Format, format_of, newest_step

__all__ = ["DataStatesCheckpointManager"]

logger = logging.getLogger(__name__)


class DataStatesCheckpointManager(CheckpointManager):  # type: ignore[misc]
    """A ``CheckpointManager`` whose saves do not stop the training.

    Built by its :class:`Config`, as torchtitan's own, and used by the trainer in the same way. In the mode
    ``async_with_pinned_mem`` the trainer waits before ``optimizers.step()`` until the newest save is captured; in
    ``async`` it never waits, and the step gate does. A save that failed raises on all ranks when its outcome is asked
    for: by the next save, or by :meth:`close`.

    Threads: the trainer's, as for torchtitan's own. Old checkpoints are deleted in a thread of the first rank.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):  # type: ignore[misc]
        """The options of torchtitan's manager, and those of :class:`~dcp_datastates.DataStatesWriter`.

        Raises :class:`ConfigurationError` for a value that cannot work.
        """

        async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "async_with_pinned_mem"
        """``disabled``: every save returns when it is committed. The other two return at once."""

        host_cache_size: str = "auto"
        """Host memory of each rank for saves on their way to storage."""

        read_window: Literal["backward", "immediate"] = "backward"
        """When reads start that the save has put off: with the next backward pass, or at once."""

        read_deadline: float = 1.0
        """Seconds after which they start in any case."""

        commit_timeout: float = 300.0
        """Seconds without any progress after which a rank that is alive fails the save."""

        exit_timeout: float = 600.0
        """Seconds for which the end of the process waits for saves in flight."""

        verify: Verification = "structure"
        """What a checkpoint must pass to be resumed from, and to count when old ones are deleted:
        ``metadata`` can be read, every file is there (``structure``), every byte is right (``full``)."""

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
            """The options for a :class:`DataStatesWriter`."""
            names = (
                "host_cache_size",
                "read_window",
                "read_deadline",
                "commit_timeout",
                "exit_timeout",
            )
            return {name: getattr(self, name) for name in names}

        def writer_config(self) -> WriterConfig:
            """The same, checked, with the writer's defaults for the rest."""
            return WriterConfig.checked(
                **self.writer_options(),
                defer="owned",
                overwrite=True,
                commit="background",
                max_in_flight=4,
                when_behind="wait",
            )

    # What close() looks at, also on an object whose constructor was never called or raised.
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
        without_purge.keep_latest_k = 0  # torchtitan's thread that deletes by names is not started
        super().__init__(without_purge, **components)
        if not self.enable:
            return
        self.keep_latest_k = config.keep_latest_k
        self.folder = str(local.local_path(self.folder))  # refuses URLs
        self._options = config.writer_options()
        self._verify = config.verify
        if self.async_mode != AsyncMode.DISABLED:
            # torchtitan makes a stager of its own where there is none, and closes the one that there is.
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
        """Save ``state_dict`` at ``checkpoint_id``: returns None when committed, or a future, or two, at once.

        Raises this package's errors; with several ranks, on all of them.
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
        # Without ranks there is no other to agree with, and DCP's own call does.
        response = dcp.async_save(  # type: ignore[attr-defined]
            state_dict, checkpoint_id=checkpoint_id, storage_writer=writer, async_stager=writer
        )
        if isinstance(response, AsyncSaveResponse):
            return response
        return AsyncSaveResponse(writer.captured, response)

    def _save_at_once(self, state_dict: dict[str, Any], checkpoint_id: str) -> None:
        if self._at_once is None:
            # The trainer waits here, so nothing changes before it is read, and nothing need be copied first.
            options = {**self._options, "defer": "all", "read_window": "immediate"}
            self._at_once = DataStatesWriter(**options)
        if dist.is_initialized():
            async_save(state_dict, checkpoint_id, writer=self._at_once).upload_completion.result()
        else:
            dcp.save(state_dict, checkpoint_id=checkpoint_id, storage_writer=self._at_once)  # type: ignore[attr-defined]

    def _maybe_wait_for_staging(self) -> None:
        """Return when the newest save is captured, or has failed.

        What it failed with, maybe on this rank alone, is for :meth:`_wait_for_saving` to raise, on all of them.
        """
        staging, self.staging_future = self.staging_future, None
        if staging is None:
            return
        open_windows()  # no backward pass comes while the trainer waits here
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
        """Load ``state_dict`` from a checkpoint of this package, or have torchtitan load another's.

        Tensors are cast to the dtypes of ``state_dict``, as torchtitan does it. What torchtitan leaves out of it
        (``exclude_from_loading``, all but the model in an initial load) is left unread on purpose.
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
        """The newest checkpoint that is whole, the same on every rank; -1 if there is none."""
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
        """Have old checkpoints deleted, in the background: those older than ``keep_latest_k`` good ones.

        The one that is being saved is not committed, and comes on top.
        """
        if self._should_purge():
            if self._purge is None:
                self._purge = Purge(local.local_path(self.folder), self.keep_latest_k, self._verify)
            self._purge.request()

    # ---- ending --------------------------------------------------------------------------------

    def _close(self) -> None:
        """Wait until the outcome of every save is known, then let everything go. Idempotent.

        Raises what a save failed with that was not asked about; while another error is on its way, logs it.
        """
        if self._closed:  # torchtitan's __del__ closes again, in whichever thread collects garbage
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
