"""Saves that a training framework starts and does not wait for: their options, their outcomes, and the deletions that
have to wait for them.
"""

from __future__ import annotations

import contextlib
import difflib
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Final, cast

import torch.distributed as dist
from typing_extensions import Unpack

from dcp_datastates.config import BackgroundOptions, WriterConfig, parse_flag
from dcp_datastates.dcp.async_save import async_save
from dcp_datastates.dcp.handle import SaveHandle
from dcp_datastates.errors import ConfigurationError, IncompatibleStateError
from dcp_datastates.loading.fit import Fit, FitOptions
from dcp_datastates.manager.save_tracker import SaveTracker, most_failures
from dcp_datastates.storage.object_path import Location, ObjectPath, locate

logger = logging.getLogger(__name__)

_MISSPELLED: Final = 0.75
"""Names that are at least so similar are taken for the same. No option of a framework is so similar to one of ours."""


def pop_writer_options(keywords: dict[str, Any]) -> BackgroundOptions:
    """Move this package's options (``host_cache_size``, …) out of a framework's ``keywords``, and check them.

    Raises :class:`ConfigurationError` for a value that cannot work, and for a misspelled name.
    """
    chosen = {
        name: keywords.pop(name) for name in BackgroundOptions.__annotations__ if name in keywords
    }
    known = [*BackgroundOptions.__annotations__, *FitOptions.__annotations__]
    for name in keywords:
        if near := difflib.get_close_matches(name, known, 1, _MISSPELLED):
            raise ConfigurationError(f"there is no option {name!r}; did you mean {near[0]!r}?")
    WriterConfig.checked(**chosen)
    return cast(BackgroundOptions, chosen)


def pop_load_options(keywords: dict[str, Any]) -> FitOptions:
    """Move the options of a load (``rename``, ``missing``, …) out of a framework's ``keywords``, and check them.

    Raises :class:`ConfigurationError` for a value that cannot work.
    """
    chosen = {name: keywords.pop(name) for name in FitOptions.__annotations__ if name in keywords}
    options = cast(FitOptions, chosen)
    Fit.of(options)
    return options


class SavesInBackground:
    """For a class of a framework, which saves through this package: the base before the framework's own class.

    Args:
        strict: whether a failed save ends the training: the next save, or :meth:`wait_for_saves`, then raises its
            error. Each save then waits for the one before it. By default, a failed save is logged, and as many in a
            row as end a loop of :class:`~dcp_datastates.CheckpointManager` end the training. A failure by which no
            save can succeed ends it in any case.
        keywords: the options of :class:`~dcp_datastates.DataStatesWriter` (``host_cache_size``, ``read_window``,
            ``read_deadline``, ``defer``, ``commit_timeout``, ``exit_timeout``, ``max_in_flight``, ``when_behind``);
            those of each load (:class:`~dcp_datastates.loading.fit.FitOptions`: ``rename``, ``missing``,
            ``unexpected``, ``exclude``, ``cast``), with which a changed program goes on; and those of the framework's
            class. A type checker cannot know them all; the call refuses a misspelled one.

    Raises :class:`ConfigurationError` for an option that cannot work.

    Threads: one thread calls the methods. The first rank deletes checkpoints in a thread.
    """

    defaults: ClassVar[Mapping[str, Any]] = {}
    """Options of each object that a program makes, unless it passes others."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        keywords = {**self.defaults, **keywords}
        strict = keywords.pop("strict", False)
        self._load_options = pop_load_options(keywords)
        self._saves = BackgroundSaves(pop_writer_options(keywords), strict=strict)
        super().__init__(*arguments, **keywords)

    @contextlib.contextmanager
    def _loading(self) -> Iterator[None]:
        """Say in the error of a state that does not fit where the options of a load are given here."""
        try:
            yield
        except IncompatibleStateError as error:
            where = f"Give such options to {type(self).__name__}(…)."
            error.args = (f"{error} {where}", *error.args[1:])
            raise

    def wait_for_saves(self) -> None:
        """Return when the outcome of every save is known. With ``strict``, raises the error of a failed one."""
        self._saves.wait()


class BackgroundSaves(SaveTracker):
    """The saves of one training job, one after the other, to paths that the framework chooses.

    Every rank makes the same calls, in the same order. A save that fails is logged by the package, and training goes
    on, until there are as many in a row as :func:`most_failures` says; with ``strict``, until there is one. Then the
    next save, or :meth:`wait`, raises the last error, on all ranks. For that, with ``strict`` each save waits for the
    one before it.

    Args:
        options: options of :class:`~dcp_datastates.DataStatesWriter`, from :func:`pop_writer_options`.
        strict: whether a failed save ends the training.

    Threads: one thread calls the methods. Deletions run in a thread of their own, on the first rank only.
    """

    def __init__(self, options: BackgroundOptions, *, strict: bool = False) -> None:
        self._strict = parse_flag("strict", strict)
        most = most_failures(strict, "auto", WriterConfig.checked(**options).max_in_flight)
        super().__init__(most)
        self._options = options
        self._said: tuple[int, str] | None = None

    def start(
        self,
        state: Mapping[str, Any],
        path: str | os.PathLike[str] | ObjectPath,
        **options: Unpack[BackgroundOptions],
    ) -> SaveHandle | None:
        """Start the save of ``state`` to ``path``. Returns None if it could not begin, which is logged.

        ``options`` come before those of the construction. Raises :class:`ConfigurationError`; with ``strict``, also the
        error of this save if it cannot begin, and that of the save before it.
        """
        self.check()
        directory = locate(path)
        chosen: BackgroundOptions = {**self._options, **options}
        try:
            return self.begin(directory, lambda: async_save(state, path, **chosen))
        except ConfigurationError:
            raise
        except Exception as error:
            if self._strict:
                raise
            logger.error("the save to %s could not begin, and training goes on: %s", path, error)
            self.failed(directory, error)
            return None

    def wait(self) -> None:
        """As :meth:`SaveTracker.wait`, and a line of the log says what came of the saves."""
        try:
            super().wait()
        finally:
            newest = self._newest
            said = None if newest is None else self.summary(newest.path.parent)
            if said is not None and said != self._said and _is_first_rank():
                self._said = said
                logger.log(*said)

    def when_committed(self, work: Callable[[], object], deletes: Location | None = None) -> None:
        """As :meth:`SaveTracker.when_committed`, on the first rank; nothing on the others."""
        if _is_first_rank():
            super().when_committed(work, deletes)


def _is_first_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0
