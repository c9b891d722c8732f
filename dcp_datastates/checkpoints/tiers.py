"""Finds the newest checkpoint in several tiers, where each of its files is whole in at least one of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Literal

from dcp_datastates.checkpoints.examine import Examination
from dcp_datastates.checkpoints.inventory import sizes_of
from dcp_datastates.checkpoints.listing import Found, candidates, newest_first
from dcp_datastates.errors import CheckpointCorruptError, StorageError
from dcp_datastates.io.committed import Committed, wrong_size
from dcp_datastates.process.work import thread_count
from dcp_datastates.storage.object_path import Location

__all__ = [
    "copies_newest_first",
    "first_problem",
    "flaw_of_copies",
    "newest_whole",
    "none_is_whole",
    "problems_by_file",
]

Problem = str | StorageError
"""What is wrong with a file; or why that cannot be judged."""

logger = logging.getLogger(__name__)


def newest_whole(
    roots: Sequence[Location],
    verify: Literal["metadata", "structure", "full"],
    among: Callable[[Location], bool] = lambda path: True,
) -> list[tuple[int, str]]:
    """The newest checkpoint below ``roots``, the tiers, that passes ``verify``: for each tier that has a copy, nearest
    first, its index in ``roots`` and the copy's name. Empty if there is none. This process alone looks.
    """
    problems = []
    for copies in copies_newest_first(roots, among):
        problem = flaw_of_copies(copies, verify)
        if problem is None:
            return [(roots.index(found.path.parent), found.path.name) for found in copies]
        logger.warning("leaving out checkpoint %s: %s", copies[0].path, problem)
        problems.append(f"{copies[0].path.name}: {problem}")
    if problems:
        raise none_is_whole(roots, problems)
    return []


def none_is_whole(roots: Sequence[Location], problems: Sequence[str]) -> CheckpointCorruptError:
    """The error if all checkpoints below ``roots`` are damaged: a job must not start over unnoticed."""
    where = " and ".join(repr(str(root)) for root in roots)
    return CheckpointCorruptError(
        f"none of the {len(problems)} checkpoints in {where} can be restored ({'; '.join(problems[:3])}); repair or "
        f"move them, or begin in another directory"
    )


def copies_newest_first(
    roots: Sequence[Location], among: Callable[[Location], bool] = lambda path: True
) -> Iterator[list[Found]]:
    """This package's checkpoints below ``roots``, newest first; of each all copies, the nearest first.

    Copies have one attempt.
    """
    paths = [path for root in dict.fromkeys(roots) for path in filter(among, candidates(root))]
    for _, copies in groupby(newest_first(paths), key=lambda found: found.attempt):
        yield sorted(copies, key=lambda found: roots.index(found.path.parent))


def flaw_of_copies(
    copies: Sequence[Found], verify: Literal["metadata", "structure", "full"]
) -> str | None:
    """The problem of a file that is whole in none of the ``copies`` of a checkpoint; None if there is no such file.

    Raises :class:`StorageError` if none is known to be whole, and one cannot be judged.
    """
    committed = next((found.committed for found in copies if found.committed is not None), None)
    if committed is None:
        for found in copies:
            if found.error is not None:
                raise found.error
        return copies[0].problem
    left: dict[str, Problem] | None = None
    for found in copies:
        here = problems_by_file(found.path, committed, verify)
        left = (
            here
            if left is None
            else {file: _worse(left[file], here[file]) for file in left if file in here}
        )
        if not left:
            return None
    assert left
    return first_problem(left)


def _worse(one: Problem, other: Problem) -> Problem:
    return other if isinstance(other, StorageError) else one


def first_problem(problems: Mapping[str, Problem]) -> str | None:
    """The first of ``problems`` in words; None if there are none. Raises that of a file that cannot be judged."""
    for problem in problems.values():
        if isinstance(problem, StorageError):
            raise problem
    return next((f"{file}: {problem}" for file, problem in problems.items()), None)


def problems_by_file(
    directory: Location, committed: Committed, verify: Literal["metadata", "structure", "full"]
) -> dict[str, Problem]:
    """The data files of ``committed`` that are not whole in ``directory``, and why."""
    if verify == "metadata":
        return {}
    if verify == "full":
        damages = Examination(directory, committed).run(thread_count(None), None)
        return {damage.file: damage.problem for damage in damages}
    problems: dict[str, Problem] = {}
    for record, found in sizes_of(directory, committed.note.files.values()):
        problem: Problem | None
        if isinstance(found, int):
            problem = wrong_size(record, found)
        else:
            problem = found if isinstance(found, StorageError) else "missing"
        if problem is not None:
            problems[record.relative_path] = problem
    return problems
