"""Placeholders: small files under the names that DeepSpeed looks for in a tag's directory.

DeepSpeed finds a tag's files with ``glob``, and then asks its checkpoint engine to load them. The bytes of all files
are in the data files of the checkpoint. A tool that reads the files itself finds a pickle that raises an error with the
way out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NoReturn

from dcp_datastates.errors import ForeignCheckpointError
from dcp_datastates.storage import operations

_CONTENT: Final = b"cdcp_datastates.deepspeed.placeholders\nrefuse\n(tR."
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
