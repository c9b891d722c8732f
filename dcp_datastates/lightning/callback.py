"""Lightning's ``ModelCheckpoint``, for ``ckpt_path="last"`` after a kill before the first commit."""

from __future__ import annotations

import logging
import os
from typing import Any

from lightning.fabric.utilities.load import _METADATA_FILENAME
from lightning.pytorch.callbacks import ModelCheckpoint

from dcp_datastates.checkpoints.first_rank import from_first_rank
from dcp_datastates.errors import ConfigurationError, DataStatesError, StorageError
from dcp_datastates.manager.frameworks import is_ours_here
from dcp_datastates.storage import presence
from dcp_datastates.storage.object_path import is_url

logger = logging.getLogger(__name__)


class DataStatesModelCheckpoint(ModelCheckpoint):  # type: ignore[misc]
    """Lightning's callback, whose ``ckpt_path="last"`` skips uncommitted and unreadable checkpoints.

    If a kill interrupts the very first save, Lightning's own callback finds its directory for ``"last"``, and resuming
    from it raises :class:`~dcp_datastates.errors.CheckpointNotFoundError`. With this one, the training starts from the
    beginning.

    Raises :class:`ConfigurationError` for ``"last"`` in a store, which Lightning's own takes for an empty directory.
    """

    def _find_last_checkpoints(self, trainer: Any) -> set[str]:
        folder = self.dirpath or trainer.default_root_dir
        if is_url(folder):
            raise ConfigurationError(
                f'ckpt_path="last": Lightning finds no checkpoint by its time at {folder!r}; pass '
                f"ckpt_path=str(dcp_datastates.latest({folder!r}))"
            )
        found: set[str] = super()._find_last_checkpoints(trainer)
        return set(
            from_first_rank(
                lambda: list(filter(_may_be_loaded, found)), "last", "the last checkpoints"
            )
        )


def _may_be_loaded(path: str) -> bool:
    try:
        ours = is_ours_here(path)
    except StorageError:  # it may be the newest
        raise
    except DataStatesError as error:
        logger.warning("leaving out checkpoint %s: %s", path, error)
        return False
    return (
        ours or presence.is_file(path) or presence.is_file(os.path.join(path, _METADATA_FILENAME))
    )
