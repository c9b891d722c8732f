"""The file ``README`` in a checkpoint's directory. It tells people and programs that do not know the format what to do.

Nothing relies on it, so it is not made durable, and no error of it ends a save or a deletion. A file that the program
has put there under this name stays as it is.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

from dcp_datastates.storage import operations, presence
from dcp_datastates.storage.bounded import step

NAME: Final = "README"

_FIRST_LINE: Final = (
    b"This is a checkpoint of dcp_datastates, a storage backend for torch.distributed.checkpoint.\n"
)
"""By it a later release knows the file: it must never change."""

_TEXT: Final = (
    _FIRST_LINE
    + b"""
Load it with dcp_datastates.load(PATH, state), or with
    torch.distributed.checkpoint.load(state, storage_reader=dcp_datastates.DataStatesReader(PATH))

Programs that do not know this format read a copy in a format of theirs:
    dcp-datastates convert PATH OUT --to dcp            (FileSystemReader of torch)
    dcp-datastates convert PATH OUT --to torch          (torch.load)
    dcp-datastates convert PATH OUT --to safetensors    (safetensors)
    dcp-datastates convert PATH OUT --to hf             (from_pretrained of transformers)

dcp-datastates inspect PATH shows what it contains. dcp-datastates delete PATH deletes it.
"""
)


def write(directory: Path) -> None:
    """Write the file, unless there is one. Never raises an error of storage."""
    step()
    path = directory / NAME
    with contextlib.suppress(OSError), open(path, "xb") as file:
        try:
            file.write(_TEXT)
            file.flush()
        except OSError:  # no empty file, which would not be known
            path.unlink()


def remove(directory: Path) -> None:
    """Remove the file, if this package wrote it, perhaps in part. Never raises an error of storage."""
    step()
    path = directory / NAME
    with contextlib.suppress(OSError):
        if not presence.is_file(path):
            return
        with open(path, "rb") as file:
            begin = file.read(len(_FIRST_LINE))
        if begin and _FIRST_LINE.startswith(begin):
            with operations.reached(path) as (name, folder):
                os.unlink(name, dir_fd=folder)
