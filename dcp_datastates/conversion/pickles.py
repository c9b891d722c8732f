"""What ``torch.save`` has written, unpickled with torch's safe types alone, unless the user trusts it."""

from __future__ import annotations

import io
import pickle
import re
from contextlib import nullcontext
from typing import IO, Any

import torch

from dcp_datastates.conversion.source import Source
from dcp_datastates.conversion.unpickler import check_nesting
from dcp_datastates.errors import CheckpointCorruptError, StorageError, UnsafeObjectError


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
    """The value in ``file``, which is ``said`` to people; with ``mapped``, its tensors are.

    Raises :class:`UnsafeObjectError` for one that needs more than torch's safe types, unless ``allow_objects``;
    :class:`CheckpointCorruptError` or :class:`StorageError`.
    """
    try:
        if not allow_objects:
            with open(file, "rb") if isinstance(file, str) else nullcontext(file) as stream:
                check_nesting(stream)
        return torch.load(file, "cpu", weights_only=not allow_objects, mmap=mapped)
    except pickle.UnpicklingError as error:
        if allow_objects:
            raise CheckpointCorruptError(f"{said}: not a readable pickle: {error}") from error
        raise unsafe(said, error, way_out) from error
    except OSError as error:
        raise StorageError(error.errno, f"reading {said} failed: {error.strerror}", said) from error
    except Exception as error:
        raise CheckpointCorruptError(
            f"{said}: torch cannot read it: {type(error).__name__}: {str(error)[:200]}"
        ) from error


def unsafe(said: str, error: BaseException, way_out: str = "exclude it") -> UnsafeObjectError:
    """The error for a pickle that needs more than torch's safe types; ``error`` is torch's."""
    found = re.search(r"Unsupported \w+: (.*?)(?: was not| whose|$)", str(error), re.MULTILINE)
    why = f" ({found[1][:200]})" if found else ""
    return UnsafeObjectError(
        f"{said} is pickled Python that may run code{why}; {way_out}, or trust the checkpoint with "
        f"allow_objects=True (--allow-objects)"
    )
