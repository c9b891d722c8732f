"""Finds the checkpoint to resume from: the newest intact one, the same on every rank."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, get_args, overload

import torch.distributed as dist

from dcp_datastates.checkpoints.first_rank import DEFAULT_TIMEOUT, from_first_rank
from dcp_datastates.checkpoints.listing import Found, candidates, newest_first, open_found
from dcp_datastates.checkpoints.tiers import (
    first_problem,
    newest_whole,
    none_is_whole,
    problems_by_file,
)
from dcp_datastates.checkpoints.verify import verify as verify_bytes
from dcp_datastates.errors import ConfigurationError, DataStatesError, StorageError
from dcp_datastates.process.forks import enter
from dcp_datastates.storage.object_path import Location, locate_all

__all__ = ["Verification", "check_verification", "flaw", "latest", "latest_here"]

logger = logging.getLogger(__name__)

Verification = Literal["metadata", "structure", "full"]

_REPLACEMENTS: Final = 3


@overload
def latest(  # type: ignore[overload-overlap]  # a str is no list of tiers
    root: str | os.PathLike[str],
    *,
    process_group: dist.ProcessGroup | None = None,
    verify: Verification = "structure",
    timeout: float = DEFAULT_TIMEOUT,
    storage_options: Mapping[str, Any] | None = None,
) -> Location | None: ...


@overload
def latest(
    root: Sequence[str | os.PathLike[str]],
    *,
    process_group: dist.ProcessGroup | None = None,
    verify: Verification = "structure",
    timeout: float = DEFAULT_TIMEOUT,
    storage_options: Mapping[str, Any] | None = None,
) -> list[Location] | None: ...


def latest(
    root: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
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
            this reads all files, so allow for it in ``timeout``.
        timeout: Seconds for which the other ranks wait for the first.
        storage_options: fsspec's options for a URL.

    Raises:
        ConfigurationError: ``root`` is a file, or is itself a checkpoint; an option cannot work.
        CheckpointCorruptError: there are checkpoints, and none passes.
        StorageError: ``root``, or a checkpoint that may be the newest, cannot be read.
        NoAnswerError: the first rank did not answer in time.
    """
    enter("latest()")
    roots = locate_all(root, storage_options)
    check_verification(verify)
    is_one = isinstance(root, str | os.PathLike)

    def look() -> list[tuple[int, str]]:
        if not is_one:
            return newest_whole(roots, verify)
        found = latest_here(roots[0], verify)
        return [] if found is None else [(0, found.name)]

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


def latest_here(
    root: Location, verify: Verification, among: Callable[[Location], bool] = lambda path: True
) -> Location | None:
    """:func:`latest` in this process alone, of the directories that ``among`` takes."""
    problems = []
    for found in newest_first(filter(among, candidates(root))):
        problem = flaw(found, verify)
        if problem is None:
            return found.path
        logger.warning("leaving out checkpoint %s: %s", found.path, problem)
        problems.append(f"{found.path.name}: {problem}")
    if problems:
        raise none_is_whole([root], problems)
    return None


def flaw(found: Found, verify: Verification) -> str | None:
    """Why a checkpoint does not pass; None if it does.

    If a save replaces the checkpoint during the check, it is checked again. Raises :class:`StorageError` if it cannot
    be judged: an older one must not take its place.
    """
    for _ in range(_REPLACEMENTS):
        problem = _flaw(found, verify)
        if problem is None:
            return None
        now = open_found(found.path)
        if now is None:
            return "it was deleted meanwhile"
        if now.attempt == found.attempt:
            return problem
        found = now
    return "it is being replaced all the time"


def _flaw(found: Found, verify: Verification) -> str | None:
    if found.error is not None:
        raise found.error
    if found.committed is None:
        return found.problem
    if verify != "full":
        return first_problem(problems_by_file(found.path, found.committed, verify))
    try:
        damages = verify_bytes(found.path).damages
    except StorageError:
        raise
    except DataStatesError as error:
        return str(error)
    if not damages:
        return None
    more = f" (and {len(damages) - 1} more)" if len(damages) > 1 else ""
    return f"{damages[0].file}: {damages[0].problem}{more}"
