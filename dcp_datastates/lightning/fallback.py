"""If the newest checkpoint is damaged, a training goes on from the one before it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from dcp_datastates.checkpoints.find import latest_here
from dcp_datastates.checkpoints.first_rank import from_first_rank
from dcp_datastates.checkpoints.listing import candidates, newest_first
from dcp_datastates.errors import CheckpointCorruptError, DataStatesError
from dcp_datastates.storage.object_path import locate

__all__ = ["load_newest"]

logger = logging.getLogger(__name__)


def load_newest(
    path: str, load: Callable[[str], dict[str, Any]], all_of: Callable[[bool], bool]
) -> dict[str, Any]:
    """``load(path)``. If ``path`` is the newest checkpoint in its folder, and damaged, the next older one is loaded
    instead. All ranks call this.

    Args:
        path: The checkpoint.
        load: Loads the checkpoint at a path.
        all_of: Whether something is so on all ranks; a collective.

    Raises what ``load`` raises: :class:`CheckpointCorruptError` if no older one is whole, or if another one than the
    newest was named.
    """
    left_out: list[str] = []
    while True:
        found, failure = None, None
        try:
            found = load(path)
        except Exception as error:
            failure = error
        if all_of(failure is None):
            assert found is not None
            return found
        damaged = isinstance(failure, CheckpointCorruptError)
        if all_of(not damaged) or not (failure is None or damaged):
            raise failure or DataStatesError(f"loading {path} failed on another rank")
        left_out.append(locate(path).name)
        older = _older(path, left_out)
        if older is None:
            raise failure or CheckpointCorruptError(f"another rank finds {path} damaged")
        logger.error("leaving out checkpoint %s, and going on from %s: %s", path, older, failure)
        path = older


def _older(path: str, left_out: Sequence[str]) -> str | None:
    folder = locate(path).parent

    def look() -> str | None:
        newest = next(newest_first(candidates(folder)), None)
        if newest is None or newest.path.name != left_out[0]:
            return None
        found = latest_here(folder, "structure", lambda each: each.name not in left_out)
        return None if found is None else str(found)

    return from_first_rank(look, "older", f"the checkpoint before {path}")
