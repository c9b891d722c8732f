"""What Lightning has saved through this package, read whole in this process alone: wherever Lightning reads a file.

``LightningModule.load_from_checkpoint``, and trainers with strategies of Lightning's own, read files. Both call one
function of Lightning for that; :func:`install` makes it read checkpoints of this package, too.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import lightning.fabric.plugins.io.torch_io
import lightning.pytorch.core.saving
import torch
from lightning.fabric.utilities import cloud_io, move_data_to_device

from dcp_datastates.conversion.lightning_file import META, lightning_checkpoint
from dcp_datastates.errors import CheckpointNotFoundError
from dcp_datastates.loading.load import load
from dcp_datastates.manager.frameworks import files_from, is_ours_here


def meta_of(path: str, weights_only: bool | None) -> tuple[dict[str, Any], dict[str, bytes]]:
    """What Lightning has saved beside models and optimizers, and all files of this rank.

    Raises :class:`CheckpointNotFoundError` if Lightning did not save the checkpoint.
    """
    files = files_from(path)
    if META not in files:
        raise CheckpointNotFoundError(
            f"{path} is a checkpoint of this package, but Lightning did not save it: it has no {META}"
        )
    return torch.load(io.BytesIO(files[META]), weights_only=weights_only), files


def install() -> None:
    """Replace the function where Lightning has imported it; called once, at the import."""
    for module in (lightning.fabric.plugins.io.torch_io, lightning.pytorch.core.saving):
        module.pl_load = _load


def _load(path_or_url: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
    """As ``_load`` of ``lightning.fabric.utilities.cloud_io``. Tensors are on the CPU, unless ``map_location`` is a
    device.
    """
    path = str(path_or_url)
    is_path = isinstance(path_or_url, (str, Path)) and not path.startswith("http")
    if not (is_path and is_ours_here(path)):
        return cloud_io._load(path_or_url, map_location, weights_only)
    meta, _ = meta_of(path, weights_only)
    stored = load(path, exclude="files", allow_objects=weights_only is False)
    found = lightning_checkpoint(stored, meta)
    if isinstance(map_location, (str, torch.device)):
        return move_data_to_device(found, torch.device(map_location))
    return found
