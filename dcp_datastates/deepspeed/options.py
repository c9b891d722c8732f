"""``datastates_ckpt`` in DeepSpeed's configuration, and who has called DeepSpeed."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any, Final

from dcp_datastates.config import WriterConfig, check_names, parse_size
from dcp_datastates.errors import ConfigurationError

__all__ = ["OPTIONS", "called_by_framework", "wait_option", "writer_options"]

KEY: Final = "datastates_ckpt"

OPTIONS: Final = ("commit_timeout", "exit_timeout", "max_in_flight", "when_behind")
"""Further options of :class:`~dcp_datastates.DataStatesWriter` that the configuration may have."""

WAIT: Final = "wait"
"""Whether ``save_checkpoint`` waits for the commit."""

_ROTATING: Final = frozenset({"accelerate", "lightning", "pytorch_lightning", "transformers"})
"""Frameworks that delete older checkpoints as soon as ``save_checkpoint`` has returned."""


def writer_options(given: object) -> dict[str, Any]:
    """The options for ``async_save`` that ``given`` stands for, the value of ``datastates_ckpt``.

    ``host_cache_size`` is in GiB, as DeepSpeed's users write it: an int or a float; or a string with a unit, such as
    ``"512MiB"``; or ``"auto"``, the default. Raises :class:`ConfigurationError`, naming the bad value.
    """
    if given is None or given is True:
        given = {}
    if not isinstance(given, Mapping):
        raise ConfigurationError(
            f'{KEY}={given!r} must be a table of options, such as {{"host_cache_size": 16}}'
        )
    check_names(KEY, given, ("host_cache_size", WAIT, *OPTIONS))
    options = {name: value for name, value in given.items() if name != WAIT}
    size = options.get("host_cache_size", "auto")
    if isinstance(size, (int, float)) and not isinstance(size, bool):
        size = parse_size(f"{size}GiB", name=f"{KEY}.host_cache_size")
    options["host_cache_size"] = size
    try:
        WriterConfig.checked(**options)
    except ConfigurationError as error:
        raise ConfigurationError(f"{KEY}={dict(given)!r}: {error}") from error
    return options


def wait_option(given: object) -> bool | None:
    """The option ``wait``; None for "auto", the default: whether :func:`called_by_framework`.

    Raises :class:`ConfigurationError`.
    """
    wait = given.get(WAIT, "auto") if isinstance(given, Mapping) else "auto"
    if wait == "auto":
        return None
    if not isinstance(wait, bool):
        raise ConfigurationError(f'{KEY}.{WAIT}={wait!r} must be true, false or "auto"')
    return wait


def called_by_framework() -> bool:
    """Whether a framework that deletes older checkpoints is among the callers of this function."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if str(frame.f_globals.get("__name__")).partition(".")[0] in _ROTATING:
            return True
        frame = frame.f_back
    return False
