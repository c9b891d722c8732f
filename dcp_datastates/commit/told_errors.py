"""Errors that one rank tells the others in plain values: by the name of a class of Python or of this package."""

from __future__ import annotations

import builtins
import contextlib
from typing import Any

from dcp_datastates import errors
from dcp_datastates.format import values

Told = tuple[str, tuple[Any, ...], dict[str, Any]]
"""An error: the name of its class, its arguments, and its attributes."""


def described(error: BaseException, where: str) -> Told:
    """What :func:`error_of` needs. An error of another class, or with arguments that are no plain values, becomes a
    ``DataStatesError`` that says ``where`` it was raised.
    """
    kind = type(error).__name__
    with contextlib.suppress(Exception):
        parts = error.__reduce__()
        state = parts[2] if len(parts) > 2 and isinstance(parts[2], dict) else {}
        told: Told = values.from_json(values.to_json((kind, tuple(parts[1]), state)))
        if type(error_of(told)) is type(error):
            return told
    return "DataStatesError", (f"{where}: {kind}: {error}",), {}


def error_of(told: Told) -> Exception:
    """The error that was described. ValueError: there is no such class."""
    kind, arguments, state = told
    found = getattr(errors, kind, None) or getattr(builtins, kind, None)
    if not (isinstance(found, type) and issubclass(found, Exception)):
        raise ValueError(f"{kind} is no error of Python or this package")
    error = found(*arguments)
    vars(error).update(state)
    return error
