"""What ``torch.save`` has written in files of other programs: what torch cannot read of it is damage."""

from __future__ import annotations

import io
from typing import IO, Any

from dcp_datastates.conversion.source import Source
from dcp_datastates.errors import CheckpointCorruptError, StorageError, UnsafeObjectError
from dcp_datastates.io.unpickling import unpickled


def value_of(source: Source, name: str, allow_objects: bool) -> Any:
    """The object ``name`` as a Python value. Raises as :func:`loaded`."""
    data = io.BytesIO(source.object_bytes(name))
    return loaded(data, f"{source.path}: object {name!r}", allow_objects)


def loaded(
    file: str | IO[bytes],
    said: str,
    allow_objects: bool,
    way_out: str = "exclude it",
    mapped: bool = False,
) -> Any:
    """:func:`~dcp_datastates.io.unpickling.unpickled`, with tensors on the CPU.

    Raises :class:`UnsafeObjectError` as that; :class:`CheckpointCorruptError` or :class:`StorageError`.
    """
    try:
        return unpickled(file, said, allow_objects, device="cpu", way_out=way_out, mapped=mapped)
    except UnsafeObjectError:
        raise
    except OSError as error:
        raise StorageError(error.errno, f"reading {said} failed: {error.strerror}", said) from error
    except Exception as error:
        raise CheckpointCorruptError(
            f"{said}: torch cannot read it: {type(error).__name__}: {str(error)[:200]}"
        ) from error
