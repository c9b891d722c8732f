"""What the integrations of training frameworks have in common: which releases were tested; what a checkpoint has,
models and optimizers by name and the files of each rank; and saves that the framework starts and does not wait for.
"""

from __future__ import annotations

import contextlib
import difflib
import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, ClassVar, Final, TypeVar, cast

import torch.distributed as dist
from typing_extensions import Unpack

from dcp_datastates.checkpoints.first_rank import from_first_rank
from dcp_datastates.checkpoints.inventory import Format, format_of
from dcp_datastates.config import BackgroundOptions, WriterConfig
from dcp_datastates.dcp.async_save import SaveHandle, async_save
from dcp_datastates.dcp.tested import minor
from dcp_datastates.errors import ConfigurationError, IncompatibleStateError
from dcp_datastates.io.committed import open_committed
from dcp_datastates.loading.fit import Fit, FitOptions
from dcp_datastates.loading.load import DEFAULT_TIMEOUT, load
from dcp_datastates.loading.session import Step, load_session
from dcp_datastates.manager.save_tracker import MaxFailures, SaveTracker
from dcp_datastates.process.job_log import once_per_job
from dcp_datastates.ranks.rank_set import rank_set_of
from dcp_datastates.storage.object_path import Location, ObjectPath, locate
from dcp_datastates.training.models import names_below
from dcp_datastates.training.training_state import TrainingState

logger = logging.getLogger(__name__)

T = TypeVar("T")

TESTED_FRAMEWORKS: Final = {
    "accelerate": "1.15.0",
    "deepspeed": "0.19.8",
    "lightning": "2.6.6",
    "megatron-core": "0.16.1",
    "torchtitan": "0.3.0",
    "transformers": "5.23.0",
}


@contextlib.contextmanager
def needed(package: str, library: str, install: str) -> Iterator[None]:
    """Say in an ImportError that ``package`` needs ``library``, and what ``pip install`` takes for it."""
    try:
        yield
    except ImportError as error:
        raise ImportError(f"{package} needs {library} ({error}): pip install {install}") from error


def tell_if_untested(name: str, version: str) -> None:
    """Log a warning if the release of a framework differs from the tested one, by major and minor number."""
    tested = TESTED_FRAMEWORKS[name]
    if minor(version) != minor(tested):
        text = "%s %s is another release than the one that dcp_datastates was tested with (%s)"
        logger.log(once_per_job(logging.WARNING), text, name, version, tested)


_FILES: Final = "files"


def state_of(parts: Mapping[str, Any], names: Iterable[str] | None = None) -> dict[str, Any]:
    """The states of models and optimizers, under their names: of all ``parts``, or of those of these ``names``.

    Parameters have the names that they have in the models among ``parts``. Shards stay shards, and no tensor is copied
    (FSDP1 makes new ones).
    """
    found = TrainingState(parts, rank_set_of(None)).parts
    return {name: found[name].state_dict() for name in (parts if names is None else names)}


def load_parts(
    path: str | os.PathLike[str] | ObjectPath,
    parts: Mapping[str, Any],
    names: Collection[str],
    **options: Unpack[FitOptions],
) -> None:
    """Load those of the models and optimizers ``parts`` that have these ``names``, in place, at any number of ranks.
    All ranks call this.

    ``options`` are those of :func:`~dcp_datastates.load`; a ``rename`` of a model renames what optimizers have of it.
    Raises as that.
    """
    fit, rank_set = Fit.of(options), rank_set_of(None)
    state = TrainingState(parts, rank_set)
    with load_session(rank_set, [locate(path)], "load()", DEFAULT_TIMEOUT) as session:
        state.load(session, fit, names)


def holds(path: str | os.PathLike[str] | ObjectPath, name: str) -> bool:
    """Whether the checkpoint has values below ``name``."""
    return bool(names_below(_stored_names(path), name))


def with_files(state: Mapping[str, Any], files: Mapping[str, bytes]) -> dict[str, Any]:
    """``state`` with this rank's ``files``, by their names. Each rank writes its own."""
    return {**state, _FILES: {f"rank-{_rank()}": dict(files)}}


def files_from(path: str | os.PathLike[str] | ObjectPath) -> dict[str, bytes]:
    """The files of the first rank, and, instead of those of the same names, those of this rank.

    Not collective. Raises as :func:`~dcp_datastates.load`.
    """
    stored = _stored_names(path)
    ranks = [each for each in dict.fromkeys((0, _rank())) if names_below(stored, _files_of(each))]
    if not ranks:
        return {}
    found = load(path, only=[_files_of(rank) for rank in ranks])[_FILES]
    return {name: file for rank in ranks for name, file in found[f"rank-{rank}"].items()}


_ALONE_SECONDS: Final = 1800.0
"""How long a rank may take for what each reads alone, such as a whole model."""


def alike(path: str | os.PathLike[str] | ObjectPath, read: Callable[[], T]) -> T:
    """``read()``, which reads the checkpoint at ``path`` in this process alone. If it fails on a rank, it fails on all
    with one error. All ranks call this; no collective of theirs runs.
    """
    found: list[T] = []

    with load_session(rank_set_of(None), [locate(path)], "load()", _ALONE_SECONDS) as session:
        session.end(Step.OPEN, lambda: found.append(read()))
    return found[0]


def is_ours(path: str | os.PathLike[str] | ObjectPath) -> bool:
    """:func:`is_ours_here`, the same on every rank; all ranks call this."""
    return from_first_rank(lambda: is_ours_here(path), "is_ours", f"who saved {path}")


def is_ours_here(path: str | os.PathLike[str] | ObjectPath) -> bool:
    """Whether a checkpoint of this package is committed at ``path``.

    False for what another program saved, and for a path without any checkpoint. Raises as
    :func:`~dcp_datastates.checkpoints.inventory.format_of`: :class:`CheckpointNotFoundError` for a save of this package
    that was not committed.
    """
    return format_of(path) is Format.DATASTATES


def _stored_names(path: str | os.PathLike[str] | ObjectPath) -> Collection[str]:
    return open_committed(locate(path)).table.catalog.names


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _files_of(rank: int) -> str:
    return f"{_FILES}.rank-{rank}"


_MISSPELLED: Final = 0.75
"""Names that are at least so similar are taken for the same. No option of a framework is so similar to one of ours."""


def pop_options(keywords: dict[str, Any]) -> tuple[BackgroundOptions, FitOptions]:
    """Move this package's options of saves (``host_cache_size``, …) and of loads (``rename``, …) out of a framework's
    ``keywords``, and check them.

    Raises :class:`ConfigurationError` for a value that cannot work, and for a misspelled name.
    """
    kinds = BackgroundOptions.__annotations__, FitOptions.__annotations__
    of_saves, of_loads = (
        {name: keywords.pop(name) for name in kind if name in keywords} for kind in kinds
    )
    for name in keywords:
        if near := difflib.get_close_matches(name, [*kinds[0], *kinds[1]], 1, _MISSPELLED):
            raise ConfigurationError(f"there is no option {name!r}; did you mean {near[0]!r}?")
    WriterConfig.checked(**of_saves)
    Fit.of(cast(FitOptions, of_loads))
    return cast(BackgroundOptions, of_saves), cast(FitOptions, of_loads)


@contextlib.contextmanager
def saying(where: str) -> Iterator[None]:
    """Say in the error of a state that does not fit where the options of a load are given."""
    try:
        yield
    except IncompatibleStateError as error:
        error.args = (f"{error} {where}", *error.args[1:])
        raise


class SavesInBackground:
    """For a class of a framework, which saves through this package: the base before the framework's own class.

    Args:
        max_failures: as for :class:`~dcp_datastates.CheckpointManager`: so many failed saves in a row end the training:
            the next save, or :meth:`wait_for_saves`, then raises the last error. With 1, each save waits for the one
            before it. A failure by which no save can succeed ends it in any case.
        keywords: the options of :class:`~dcp_datastates.DataStatesWriter` (``host_cache_size``, ``reads``,
            ``commit_timeout``, ``exit_timeout``, ``max_in_flight``, ``when_behind``); those of each load
            (:class:`~dcp_datastates.loading.fit.FitOptions`: ``rename``, ``missing``, ``unexpected``, ``exclude``,
            ``cast``, ``allow_objects``); and those of the framework's class. A type checker cannot know them all; the
            call refuses a misspelled one.

    Raises :class:`ConfigurationError` for an option that cannot work.

    Threads: one thread calls the methods. The first rank deletes checkpoints in a thread.
    """

    defaults: ClassVar[Mapping[str, Any]] = {}
    """Options of each object that a program makes, unless it passes others."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        keywords = {**self.defaults, **keywords}
        most = keywords.pop("max_failures", "auto")
        options, self._load_options = pop_options(keywords)
        self._saves = BackgroundSaves(options, most)
        super().__init__(*arguments, **keywords)

    @contextlib.contextmanager
    def _loading(self) -> Iterator[None]:
        with saying(f"Give such options to {type(self).__name__}(…)."):
            yield

    def wait_for_saves(self) -> None:
        """Return when the outcome of every save is known. Raises as ``max_failures`` says."""
        self._saves.wait()


class BackgroundSaves(SaveTracker):
    """The saves of one training job, one after the other, to paths that the framework chooses.

    Every rank makes the same calls, in the same order. A save that fails is logged by the package, and training goes
    on, until there are ``max_failures`` in a row. Then the next save, or :meth:`wait`, raises the last error, on all
    ranks.

    Args:
        options: options of :class:`~dcp_datastates.DataStatesWriter`, from :func:`pop_options`.
        max_failures: as for :class:`~dcp_datastates.CheckpointManager`.

    Threads: one thread calls the methods. Deletions run in a thread of their own, on the first rank only.
    """

    def __init__(self, options: BackgroundOptions, max_failures: MaxFailures = "auto") -> None:
        super().__init__(max_failures, max_in_flight=WriterConfig.checked(**options).max_in_flight)
        self._options = options
        self._said: tuple[int, str] | None = None

    def start(
        self,
        state: Mapping[str, Any],
        path: str | os.PathLike[str] | ObjectPath,
        **options: Unpack[BackgroundOptions],
    ) -> SaveHandle | None:
        """Start the save of ``state`` to ``path``. Returns None if it could not begin, which is logged.

        ``options`` come before those of the construction. Raises :class:`ConfigurationError`, and the error of a save
        before it, or of this one if it cannot begin, as ``max_failures`` says.
        """
        self.check()
        directory = locate(path)
        chosen: BackgroundOptions = {**self._options, **options}
        try:
            return self.begin(directory, lambda: async_save(state, path, **chosen))
        except ConfigurationError:
            raise
        except Exception as error:
            if self.most == 1:
                raise
            self.failed(directory, error)
            logger.error("the save to %s could not begin, and training goes on: %s", path, error)
            return None

    def wait(self) -> None:
        """As :meth:`SaveTracker.wait`, and a line of the log says what came of the saves."""
        try:
            super().wait()
        finally:
            newest = self._newest
            said = None if newest is None else self.summary(newest.path.parent)
            if said is not None and said != self._said and _rank() == 0:
                self._said = said
                logger.log(*said)

    def when_committed(self, work: Callable[[], object], deletes: Location | None = None) -> None:
        """As :meth:`SaveTracker.when_committed`, on the first rank; nothing on the others."""
        if _rank() == 0:
            super().when_committed(work, deletes)
