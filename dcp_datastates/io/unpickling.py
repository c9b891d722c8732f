"""Objects as ``torch.save`` writes them: unpickled with torch's safe types alone, unless the user trusts them."""

from __future__ import annotations

import pickle
from contextlib import suppress
from typing import IO, Any

import torch

from dcp_datastates.errors import UnsafeObjectError


def unpickled(
    file: str | IO[bytes],
    said: str,
    allow_objects: bool,
    *,
    device: str | None = None,
    way_out: str = "exclude it",
    mapped: bool = False,
) -> Any:
    """The value in ``file``, which is ``said`` to people.

    Args:
        allow_objects: whether it may need more than torch's safe types, which are those of ``weights_only=True`` and of
            ``torch.serialization.add_safe_globals``.
        device: where its tensors go; None: where they were.
        mapped: whether its tensors are mapped from the file.

    Raises :class:`UnsafeObjectError` for one that needs more, unless ``allow_objects``; and what ``torch.load`` raises.
    """
    try:
        return torch.load(file, device, weights_only=not allow_objects, mmap=mapped)
    except pickle.UnpicklingError as error:
        if allow_objects:
            raise
        ways = f"{way_out}, allow what it needs with torch.serialization.add_safe_globals([…])"
        raise unsafe(said, _needs(file, error), ways) from error


def unsafe(said: str, needs: str, way_out: str) -> UnsafeObjectError:
    """The error for a pickle that needs more than safe types."""
    return UnsafeObjectError(
        f"{said} is pickled Python that may run code (it needs {needs[:200]}); {way_out}, or trust the checkpoint with "
        f"allow_objects=True (--allow-objects)"
    )


def _needs(file: str | IO[bytes], error: pickle.UnpicklingError) -> str:
    """The classes and functions that a refused pickle needs; torch's own reason, if torch names none."""
    if not isinstance(file, str):
        file.seek(0)
    with suppress(Exception):  # a file of an old torch, or what no torch has written
        if names := torch.serialization.get_unsafe_globals_in_checkpoint(file):
            return ", ".join(sorted(names))
    lines = str(error).partition("WeightsUnpickler error:")[2].splitlines()
    return next(filter(None, map(str.strip, lines)), "more than torch's safe types")
