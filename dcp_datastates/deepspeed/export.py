"""What tools find that read DeepSpeed's own files: placeholders, and once they are exported, the files themselves.

DeepSpeed finds a tag's files with ``glob``, and then asks its checkpoint engine to load them. So there are placeholders
under the names that it looks for. The bytes of all files are in the data files of the checkpoint. A tool that reads the
files itself finds a pickle that raises an error with the way out.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NoReturn

import torch

from dcp_datastates.dcp.reader import DataStatesReader
from dcp_datastates.deepspeed.files import MapLocation, unpack
from dcp_datastates.errors import CheckpointCorruptError, ConfigurationError, ForeignCheckpointError
from dcp_datastates.loading.load import load
from dcp_datastates.storage import local, operations, presence

LATEST: Final = "latest"

_CONTENT: Final = b"cdcp_datastates.deepspeed.export\nrefuse\n(tR."
"""A pickle that calls :func:`refuse`."""


def refuse() -> NoReturn:
    """Called where ``torch.load`` opens a placeholder; raises an error that says what to do."""
    raise ForeignCheckpointError(
        "this file is a placeholder: its values are in the checkpoint of its directory. To use a tool that reads "
        "DeepSpeed's own files, such as zero_to_fp32 or ds_to_universal, first write them: "
        "python -m dcp_datastates.deepspeed SAVE_DIR OUTPUT_DIR"
    )


def is_placeholder(path: Path) -> bool:
    """Whether the file at ``path`` is a placeholder. False if there is no file."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        return file.read(len(_CONTENT) + 1) == _CONTENT
    return False


def write_placeholders(directory: Path, names: Iterable[str]) -> None:
    """Make durable placeholders under ``names`` in ``directory``. Raises OSError."""
    missing = [directory / name for name in names if not is_placeholder(directory / name)]
    for path in missing:
        replace_durably(path, _CONTENT, "placeholder")


def replace_durably(path: Path, content: bytes, phase: str) -> None:
    """Replace the file at ``path``, or create it, atomically and durably. Raises OSError.

    No other process or thread may do the same at the same time.
    """
    new = path.with_name(f".{path.name}.new")
    new.unlink(missing_ok=True)  # of a process that was killed
    operations.write_new_file(new, [content], phase)
    operations.rename(new, path, phase)
    operations.sync_directory(path.parent, phase)


# ---- exporting -----------------------------------------------------------------------------------


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
