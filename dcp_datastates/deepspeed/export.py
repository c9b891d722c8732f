"""Writes the files of a tag as DeepSpeed's own engine would have written them, for tools that read these files."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch

from dcp_datastates.dcp.reader import DataStatesReader
from dcp_datastates.deepspeed.files import MapLocation, unpack
from dcp_datastates.deepspeed.placeholders import replace_durably
from dcp_datastates.errors import CheckpointCorruptError, ConfigurationError, ForeignCheckpointError
from dcp_datastates.loading.load import load
from dcp_datastates.storage import local, presence

LATEST = "latest"


def names_in(directory: Path) -> list[str]:
    """The names of DeepSpeed's files in the committed checkpoint at ``directory``."""
    paths = DataStatesReader(directory).read_metadata().planner_data
    if not isinstance(paths, dict) or not all(isinstance(path, tuple) for path in paths.values()):
        raise CheckpointCorruptError(f"{str(directory)!r}: the metadata lack the names' paths")
    return sorted({str(path[0]) for path in paths.values()})


def load_file(directory: Path, name: str, map_location: MapLocation = None) -> object:
    """What DeepSpeed passed to ``save`` for the file ``name`` of the checkpoint at ``directory``.

    Not collective. Verifies every byte that it reads. Raises what :func:`dcp_datastates.load` raises;
    :class:`ForeignCheckpointError` if the value under ``name`` was not saved by DeepSpeed.
    """
    values = load(directory, only=name)[name]
    if not isinstance(values, dict) or "structure" not in values:
        raise ForeignCheckpointError(
            f"{name!r} in the checkpoint at {str(directory)!r} is not a file that DeepSpeed has saved"
        )
    return unpack(values, map_location)


def export(
    save_dir: str | os.PathLike[str],
    output: str | os.PathLike[str],
    tag: str | None = None,
) -> Path:
    """Write a tag of ``save_dir`` to ``output`` as DeepSpeed's own engine would have; returns its directory there.

    ``output`` gets the tag's directory with real files, the scripts such as ``zero_to_fp32.py``, and ``latest``, which
    is written last. ``zero_to_fp32``, ``ds_to_universal`` and DeepSpeed without this package read it.

    One process, which needs memory for the largest of the files. Tensors are on the CPU. Unpickles the files' Python
    values: for checkpoints that you trust.

    Args:
        save_dir: the directory that ``save_checkpoint`` was given.
        output: another directory, which is created.
        tag: the tag; None means the one that ``latest`` names.

    Raises :class:`ConfigurationError` if an argument cannot work, and what :func:`dcp_datastates.load` raises.
    """
    source, target = (
        local.local_path(save_dir, name="save_dir"),
        local.local_path(output, name="output"),
    )
    if presence.is_there(target) and source.resolve() == target.resolve():
        raise ConfigurationError(
            f"output={str(output)!r} is the directory of the checkpoint; choose another one"
        )
    if tag is None:
        try:
            tag = (source / LATEST).read_text().strip()
        except OSError as error:
            raise ConfigurationError(
                f"{str(source / LATEST)!r} cannot be read ({error.strerror}); pass a tag"
            ) from error
    names = names_in(source / tag)
    (target / tag).mkdir(parents=True, exist_ok=True)
    for name in names:
        path = target / tag / name
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(load_file(source / tag, name, "cpu"), path)
    for script in source.glob("*.py"):
        shutil.copy2(script, target)
    replace_durably(target / LATEST, tag.encode(), "latest")
    return target / tag
