"""``CheckpointEngine``: the class that DeepSpeed's ``DataStatesCheckpointEngine`` makes and calls."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from traceback import walk_stack
from typing import Any, Final

import torch
import torch.distributed as dist

from dcp_datastates.commit.group import commit_group
from dcp_datastates.config import Reads, WriterConfig, check_names, parse_size
from dcp_datastates.dcp.async_save import SaveHandle, async_save
from dcp_datastates.deepspeed.export import (
    LATEST,
    is_placeholder,
    load_file,
    names_in,
    replace_durably,
    write_placeholders,
)
from dcp_datastates.deepspeed.files import MapLocation, pack
from dcp_datastates.errors import ConfigurationError, UnsupportedStateError
from dcp_datastates.manager.save_tracker import SaveTracker
from dcp_datastates.ranks.rank_set import rank_set_of
from dcp_datastates.results import SaveStats
from dcp_datastates.saving.rank_context import context_of
from dcp_datastates.storage import local, presence
from dcp_datastates.storage.object_path import Location

logger = logging.getLogger(__name__)


class CheckpointEngine:
    """Saves and loads DeepSpeed's files. DeepSpeed makes one for each engine, and calls it in the training thread.

    Args:
        deepspeed_config: DeepSpeed's configuration object; ``datastates_ckpt`` in it has the options
            (:func:`options_of`).
        rank: this process's global rank. Rank 0 writes ``latest``.

    Raises :class:`ConfigurationError` for an option that cannot work. (DeepSpeed turns it into a RuntimeError with the
    same text.)
    """

    def __init__(self, deepspeed_config: Any, rank: int) -> None:
        self._options, self._wait = options_of(deepspeed_config.datastates_config.config)
        self._rank = rank
        self._thread = threading.get_ident()
        self._collecting = False
        self._files: dict[Path, dict[str, Any]] = {}
        self._failure: BaseException | None = None
        self.last_save: SaveStats | None = None
        """This rank's statistics of the newest save; complete once that is committed."""

    @property
    def failed_saves(self) -> int:
        """How many saves of this process have failed, of all engines. Each was logged as an error."""
        _saves.take()
        return _saves.failures

    # ---- DeepSpeed calls these ---------------------------------------------------------------------

    def save(self, state_dict: Any, path: str | os.PathLike[str]) -> None:
        """Within ``save_checkpoint``: take ``state_dict`` as the file ``path``. Python values are copied now; tensors
        are staged when ``save_checkpoint`` is about to return.

        Outside of it (``save_16bit_model``): write ``path`` with ``torch.save``, as DeepSpeed's own engine does.
        """
        if not self._collecting:
            torch.save(state_dict, path)
            return
        try:
            self._files[local.local_path(path)] = pack(state_dict)
        except Exception as error:
            # The other ranks wait in DeepSpeed's barriers. So this rank goes on to them, and the save fails on all.
            failure = UnsupportedStateError(f"{str(path)!r} cannot be stored: {error}")
            failure.__cause__ = error
            self._failure = self._failure or failure

    def load(self, path: str | os.PathLike[str], map_location: MapLocation = None) -> Any:
        """What was passed to :meth:`save` for ``path``. A file of DeepSpeed's own is loaded with ``torch.load``.

        Verifies every byte of a file of this package. Raises :class:`CheckpointNotFoundError` for a tag that was not
        committed, :class:`CheckpointCorruptError`, or another error of :func:`dcp_datastates.load`.
        """
        place = local.local_path(path)
        if presence.is_there(place) and not is_placeholder(place):
            return torch.load(place, map_location=map_location, weights_only=False)
        return load_file(place.parent, place.name, map_location)

    def wait(self, persist: bool = False) -> None:
        """Wait until all tensors of the saves in flight have been read; with ``persist``, until every save is
        committed, or has failed, and ``latest`` is written. Returns immediately if no save is in flight.

        Returns immediately in any thread but the training thread, too: a garbage collection may destroy an engine in a
        thread that the saves need.
        """
        if threading.get_ident() != self._thread:
            return
        if persist:
            _saves.wait()
        else:
            for handle in _saves.in_flight():
                handle.captured.exception()

    # ---- hooks.py calls these ----------------------------------------------------------------------

    @contextlib.contextmanager
    def collecting(self) -> Iterator[None]:
        """In this context, :meth:`save` collects files for :meth:`commit`. Forgets those of a call that failed."""
        self._collecting, self._files, self._failure = True, {}, None
        try:
            yield
        finally:
            self._collecting = False

    def commit(
        self, save_dir: str | os.PathLike[str], tag: str, save_latest: bool, reads: Reads
    ) -> None:
        """Start the save of all files that this rank has collected, possibly none. Every rank calls it.

        Never waits for storage or another rank, unless too many saves are in flight (``max_in_flight``). A save that
        cannot be started on this rank fails on all ranks, and is logged and counted; this does not raise.

        With the option ``wait``, and where a framework will now delete older checkpoints, this waits for the commit,
        and raises the error of a save that failed.
        """
        wait = called_by_framework() if self._wait is None else self._wait
        self._thread = threading.get_ident()
        files, self._files = self._files, {}
        root = local.local_path(save_dir)
        directory = root / tag

        def call() -> SaveHandle:
            if self._failure is not None:
                context_of(commit_group(rank_set_of(None))).refuse(directory, self._failure)
                raise self._failure
            state = {str(path.relative_to(directory)): values for path, values in files.items()}
            return async_save(state, directory, reads=reads, **self._options)

        _saves.take()
        try:
            handle = _saves.begin(directory, call)
        except Exception as error:
            _saves.failed(directory, error)
            if wait:
                raise
            return
        self.last_save = handle.stats
        if self._rank == 0:
            _saves.when_committed(partial(_write_committed, root, tag, save_latest))
        if wait:
            _saves.wait()
            handle.result()

    @staticmethod
    def settle() -> None:
        """Wait for this process's saves, and then for the other ranks to do the same: so that all find the same
        ``latest``. Collective.
        """
        _saves.wait()
        if dist.is_initialized():
            dist.barrier()


# ---- once a tag is committed ---------------------------------------------------------------------


class _Saves(SaveTracker):
    """A failure, also of what follows a commit, is a line of the log."""

    def failed(self, path: Location, error: BaseException) -> None:
        super().failed(path, error)
        logger.error(
            "the save of tag %r to %r failed, and training goes on; %r still names the tag before it: %s: %s",
            *(path.name, str(path.parent), LATEST, type(error).__name__, error),
        )


_saves: Final = _Saves()
"""The saves of this process, of all engines."""


def _write_committed(save_dir: Path, tag: str, save_latest: bool) -> None:
    """Write the placeholders, and ``latest``, of a tag that is committed."""
    try:
        write_placeholders(save_dir / tag, names_in(save_dir / tag))
        if save_latest:
            replace_durably(save_dir / LATEST, tag.encode(), "latest")
    except Exception as error:
        _saves.failed(save_dir / tag, error)


# ---- options -------------------------------------------------------------------------------------


KEY: Final = "datastates_ckpt"

OPTIONS: Final = ("commit_timeout", "exit_timeout", "max_in_flight", "when_behind")
"""Further options of :class:`~dcp_datastates.DataStatesWriter` that the configuration may have."""

WAIT: Final = "wait"
"""Whether ``save_checkpoint`` waits for the commit."""

_ROTATING: Final = frozenset({"accelerate", "lightning", "pytorch_lightning", "transformers"})
"""Frameworks that delete older checkpoints as soon as ``save_checkpoint`` has returned."""


def options_of(given: object) -> tuple[dict[str, Any], bool | None]:
    """The options for ``async_save`` that ``given`` stands for, the value of ``datastates_ckpt``; and its option
    ``wait``, or None for "auto", the default: whether :func:`called_by_framework`.

    ``host_cache_size`` is in GiB, as DeepSpeed's users write it: an int or a float; or a string with a unit, such as
    ``"512MiB"``; or ``"auto"``, the default. Raises :class:`ConfigurationError`, naming the bad value.
    """
    if given is None or given is True:
        given = {}
    if not isinstance(given, Mapping):
        raise ConfigurationError(
            f'{KEY}={given!r} must be a table of options, such as {{"host_cache_size": 16}}'
        )
    check_names(KEY, given, ("host_cache_size", WAIT, *OPTIONS))
    options = {"host_cache_size": "auto", **given}
    wait = options.pop(WAIT, "auto")
    if wait != "auto" and not isinstance(wait, bool):
        raise ConfigurationError(f'{KEY}.{WAIT}={wait!r} must be true, false or "auto"')
    size = options["host_cache_size"]
    if isinstance(size, (int, float)) and not isinstance(size, bool):
        options["host_cache_size"] = parse_size(f"{size}GiB", name=f"{KEY}.host_cache_size")
    try:
        WriterConfig.checked(**options)
    except ConfigurationError as error:
        raise ConfigurationError(f"{KEY}={dict(given)!r}: {error}") from error
    return options, None if wait == "auto" else wait


def called_by_framework() -> bool:
    """Whether a framework that deletes older checkpoints is among the callers of this function."""
    callers = (str(each.f_globals.get("__name__")) for each, _ in walk_stack(sys._getframe()))
    return any(each.partition(".")[0] in _ROTATING for each in callers)
