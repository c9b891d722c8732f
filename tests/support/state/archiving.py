"""Numbered checkpoints, each in a directory of its own, and carried to an archive. Bodies of jobs on ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

import dcp_datastates
from dcp_datastates.checkpoints.pins import pins
from dcp_datastates.storage.object_path import locate
from dcp_datastates.tiers import archive, carrying
from dcp_datastates.tiers.archive import archive_save
from support.state.checkpoints import CACHE, assert_same
from support.state.saving import SMALL, checkpoint, part
from support.stores.server import use


def archived_save(
    state: Any, path: str | Path, slow: str | Path, rate: int = 0, **options: Any
) -> Any:
    """The handle of a save to ``path``, which is archived below ``slow`` as the manager does it, after its check that
    both are of one run.
    """
    by = dcp_datastates.DataStatesWriter(path, **options)
    by.on_begin = lambda save: archive_save(save, locate(slow), rate)
    return dcp_datastates.async_save(state, writer=by)


def restart() -> None:
    """What a restart leaves of this process: nothing but the tiers."""
    for each in archive._archives.values():
        each.close()
    archive._archives.clear()


def begin(fast: str, slow: str, number: int) -> Any:
    """The handle of a save to a directory of its own below ``fast``, with ``slow`` as archive."""
    return archived_save(
        part(number, SMALL), f"{fast}/step-{number}", slow, reads="immediate", host_cache_size=CACHE
    )


def _begin_at(url: str, fast: str, slow: str, number: int) -> Any:
    if url:
        use(url)
    carrying._FIRST_PAUSE = 0.1  # type: ignore[misc]
    return begin(fast, slow, number)


def save_and_archive(fast: str, slow: str, number: int, url: str = "") -> None:
    """Save a checkpoint, and return when it is in the archive, and its pin is gone."""
    handle = _begin_at(url, fast, slow, number)
    handle.result(60)
    handle.archived.result(60)
    dist.barrier()  # the first rank removes the pin, after it has told the others of the commit
    assert not pins(Path(fast) / f"step-{number}")
    dist.barrier()


def try_to_archive(fast: str, slow: str, number: int, url: str = "") -> tuple[str, str]:
    """The types of the errors of the save and of its archive; empty for success."""
    handle = _begin_at(url, fast, slow, number)
    error = handle.committed.exception(60)
    archived = handle.archived.exception(60)
    return ("" if error is None else type(error).__name__), (
        "" if archived is None else f"{type(archived).__name__}: {archived}"
    )


def number_in(tiers: Sequence[str | Path], world: int, elements: int = SMALL) -> int | None:
    """The number of the newest checkpoint in ``tiers``, which is whole; None if there is none."""
    places = dcp_datastates.latest(list(tiers))
    if places is None:
        return None
    found = dcp_datastates.load(places)
    number = found["object"]["number"]
    assert_same(found, checkpoint(number, world, elements))
    return int(number)
