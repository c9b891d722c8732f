"""Finds the checkpoint to resume from: the newest intact one, the same on every rank.

Its copies may lie in several tiers, and each of its files may be whole in another one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Final, Literal, get_args, overload

import torch.distributed as dist

from dcp_datastates.checkpoints.first_rank import DEFAULT_TIMEOUT, from_first_rank
from dcp_datastates.checkpoints.listing import Found, candidates, newest_first, open_found
from dcp_datastates.checkpoints.verify import examine
from dcp_datastates.errors import CheckpointCorruptError, ConfigurationError, StorageError
from dcp_datastates.io.committed import Committed, sizes, wrong_size
from dcp_datastates.process.forks import public
from dcp_datastates.process.work import thread_count
from dcp_datastates.storage.object_path import AnyPath, Location, leave_copy, locate_all

logger = logging.getLogger(__name__)

Verification = Literal["metadata", "structure", "full", "replicas"]

_REPLACEMENTS: Final = 3

Problem = str | StorageError


@overload
def latest(  # type: ignore[overload-overlap]  # a str is no list of tiers
    root: AnyPath,
    *,
    process_group: dist.ProcessGroup | None = None,
    verify: Verification = "structure",
    timeout: float = DEFAULT_TIMEOUT,
    storage_options: Mapping[str, Any] | None = None,
) -> Location | None: ...


@overload
def latest(
    root: Sequence[AnyPath],
    *,
    process_group: dist.ProcessGroup | None = None,
    verify: Verification = "structure",
    timeout: float = DEFAULT_TIMEOUT,
    storage_options: Mapping[str, Any] | None = None,
) -> list[Location] | None: ...


@public("latest()")
def latest(
    root: AnyPath | Sequence[AnyPath],
    *,
    process_group: dist.ProcessGroup | None = None,
    verify: Verification = "structure",
    timeout: float = DEFAULT_TIMEOUT,
    storage_options: Mapping[str, Any] | None = None,
) -> Location | list[Location] | None:
    """The newest committed checkpoint in the directory ``root``; None if there is no checkpoint.

    With a list of tiers, the nearest first (``["/nvme/run", "s3://bucket/run"]``), this is the newest checkpoint of
    which each file is whole in at least one of them: the list of its places, for :func:`load` and
    :class:`DataStatesReader`.

    The newest checkpoint is the one saved last, according to the attempt in its metadata, regardless of its name. If a
    checkpoint does not pass, a warning in the log says why, and the next older one is tried. Checkpoints of stock DCP
    are ignored. A place that storage does not show, for want of a permission or because a server is away, may hold the
    newest: an error names it, after tries for less than a second.

    Every rank of ``process_group`` (default: all ranks) calls this; the first rank searches, and all return its result
    or raise its error. No collective runs on the group.

    Args:
        root: The directory that contains the checkpoints' directories, or its URL; or a list of them. It need not exist
            yet.
        process_group: The ranks that take part.
        verify: The check that a checkpoint must pass. ``"metadata"``: its metadata can be read. ``"structure"``: also,
            every data file is there, with its exact size. ``"full"``: also, every stored byte matches its checksum;
            this reads all files, so allow for it in ``timeout``. ``"replicas"``: as ``"structure"``, and all replicas
            are known to have been equal: it and the checkpoints that the job has saved since have compared them
            (``compare_replicas``).
        timeout: Seconds for which the other ranks wait for the first.
        storage_options: fsspec's options for a URL.

    Raises:
        ConfigurationError: ``root`` is a file, or is itself a checkpoint; an option cannot work.
        CheckpointCorruptError: there are checkpoints, and none passes.
        StorageError: ``root``, or a checkpoint that may be the newest, cannot be read.
        NoAnswerError: the first rank did not answer in time.
    """
    roots = locate_all(root, storage_options)
    check_verification(verify)
    is_one = not isinstance(root, list | tuple)

    def look() -> list[tuple[int, str]]:
        return [(roots.index(path.parent), path.name) for path in newest_whole(roots, verify)]

    # Each rank has its own name for a tier, and its own storage_options.
    found = from_first_rank(look, "latest", "the latest checkpoint", process_group, timeout)
    places = [roots[index] / name for index, name in found]
    if is_one:
        return places[0] if places else None
    return places or None


def check_verification(verify: str) -> None:
    """Raise :class:`ConfigurationError` unless ``verify`` is a :data:`Verification`."""
    if verify not in get_args(Verification):
        raise ConfigurationError(
            f"verify={verify!r} must be one of {', '.join(map(repr, get_args(Verification)))}"
        )


def newest_whole(
    roots: Sequence[Location],
    verify: Verification,
    among: Callable[[Location], bool] = lambda path: True,
    leave_out: Collection[str] = (),
) -> list[Location]:
    """The places, the nearest first, of the newest checkpoint below ``roots``, the tiers, that passes ``verify``, of
    those that ``among`` takes. Empty if there is none. ``leave_out``: the names of those that could not be loaded. This
    process alone looks.

    Raises :class:`CheckpointCorruptError` if there are some, and none passes: a job must not start over unnoticed.
    """
    problems = []
    compared = Replicas(verify)
    for copies in copies_newest_first(roots, among):
        path, unknown = copies[0].path, compared.unknown(copies)
        if path.name in leave_out:
            problems.append(f"{path.name} cannot be loaded")
            continue
        problem = unknown or flaw(copies, verify)
        if problem is None:
            return [found.path for found in copies]
        logger.warning("leaving out checkpoint %s: %s", path, problem)
        problems.append(f"{path.name}: {problem}")
    if not problems:
        return []
    where = " and ".join(repr(str(root)) for root in roots)
    raise CheckpointCorruptError(
        f"none of the {len(problems)} checkpoints in {where} can be restored ({'; '.join(problems[:3])}); repair or "
        f"move them, or begin in another directory"
    )


class Replicas:
    """Which replicas were compared. It is asked about all checkpoints, newest first."""

    def __init__(self, verify: Verification) -> None:
        self._is_asked = verify == "replicas"
        self._parts: dict[tuple[int, int, str], set[int]] = {}

    def unknown(self, copies: Sequence[Found]) -> str | None:
        """Why the replicas of this checkpoint are not known to be equal. None if they are, if ``verify`` does not ask,
        or if its metadata cannot be read.
        """
        committed = next((each.committed for each in copies if each.committed is not None), None)
        if committed is None or not self._is_asked:
            return None
        compared = committed.note.compared
        if compared is None:
            return "its replicas were not compared (compare_replicas=)"
        key = committed.note.attempt.incarnation, compared.of, compared.plan
        parts = self._parts.setdefault(key, set())
        parts.add(compared.number)
        if len(parts) == compared.of:
            return None
        return f"{len(parts)} of {compared.of} parts of its replicas have been compared"


def copies_newest_first(
    roots: Sequence[Location], among: Callable[[Location], bool] = lambda path: True
) -> Iterator[list[Found]]:
    """This package's checkpoints below ``roots``, newest first; of each all tiers' copies, the nearest first."""
    paths = [path for root in dict.fromkeys(roots) for path in filter(among, candidates(root))]
    if len(roots) == 1:
        yield from ([found] for found in newest_first(paths))
        return
    for _, copies in groupby(newest_first(paths), key=lambda found: found.attempt):
        yield sorted(copies, key=lambda found: roots.index(found.path.parent))


def flaw(copies: Sequence[Found], verify: Verification) -> str | None:
    """Why a checkpoint, of which there are ``copies``, does not pass: the problem of a file that is whole in none of
    them. None if it passes.

    If a save replaces the checkpoint during the check, it is checked again. Raises :class:`StorageError` if none is
    known to be whole, and one cannot be judged: an older one must not take its place.
    """
    for _ in range(_REPLACEMENTS):
        problem = _flaw(copies, verify)
        if problem is None:
            return None
        now = [found for each in copies if (found := open_found(each.path)) is not None]
        if not now:
            return "it was deleted meanwhile"
        newest = max(found.attempt for found in now)
        if newest == copies[0].attempt:
            return problem
        copies = [found for found in now if found.attempt == newest]
    return "it is being replaced all the time"


def _flaw(copies: Sequence[Found], verify: Verification) -> str | None:
    committed = next((found.committed for found in copies if found.committed is not None), None)
    if committed is None:
        for found in copies:
            if found.error is not None:
                raise found.error
        return copies[0].problem
    left: dict[str, Problem] | None = None
    for found in copies:
        here = _problems_by_file(found.path, committed, verify)
        if left is not None:  # why it cannot be judged here counts more than what is wrong there
            here = {
                file: here[file] if isinstance(here[file], StorageError) else problem
                for file, problem in left.items()
                if file in here
            }
        left = here
        if not left:
            return None
    assert left
    for problem in left.values():
        if isinstance(problem, StorageError):
            raise problem
    file, problem = next(iter(left.items()))
    more = f" (and {len(left) - 1} more)" if len(left) > 1 else ""
    return f"{file}: {problem}{more}"


def _problems_by_file(
    directory: Location, committed: Committed, verify: Verification
) -> dict[str, Problem]:
    problems: dict[str, Problem] = {}
    if verify == "full":
        for damage in examine(directory, committed, thread_count(None), None):
            problems.setdefault(damage.file, damage.problem)
    if verify not in ("structure", "replicas"):
        return problems
    for file, found in sizes(directory, committed.note.files.keys()).items():
        if isinstance(found, int):
            problem: Problem | None = wrong_size(committed.note.files[file], found)
        else:
            problem = found if isinstance(found, StorageError) else "missing"
        if problem is not None:
            problems[file] = problem
    others = [leave_copy(directory / file, problem) for file, problem in problems.items()]
    return _problems_by_file(directory, committed, verify) if any(others) else problems
