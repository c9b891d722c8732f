"""Options of the writer and the reader: parsed, checked and named in one place."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, Literal, get_args

from dcp_datastates._native import MIN_HOST_CACHE_BYTES, SEGMENT_BYTES
from dcp_datastates.errors import ConfigurationError
from dcp_datastates.process.memory_limit import default_host_cache_bytes

__all__ = [
    "Commit",
    "Defer",
    "ReadWindow",
    "WhenBehind",
    "WriterConfig",
    "parse_host_cache_size",
    "parse_size",
]

Commit = Literal["wait", "background"]
Defer = Literal["owned", "all", "none"]
ReadWindow = Literal["backward", "immediate"]
WhenBehind = Literal["wait", "skip", "newest"]

EAGER_BELOW_BYTES = 64 * 1024
"""Tensors smaller than this are copied at the call: below it, a copy costs less than a deferral."""

MAX_READ_DEADLINE = 3600.0
"""Longest ``read_deadline``, in seconds. Every save must end, also one whose backward pass never comes."""

MIN_COMMIT_TIMEOUT = 1.0
"""Shortest ``commit_timeout``, in seconds: ranks hear of each other once a second."""

MAX_COMMIT_TIMEOUT = 86400.0
"""Longest ``commit_timeout``, in seconds."""

DEFAULT_COMMIT_TIMEOUT = 300.0
"""``commit_timeout`` where none is given, in seconds."""

MAX_IN_FLIGHT = 32
"""Most saves that may be in flight at once."""

_UNITS = {
    "": 1,
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", start=1)},
    **{f"{prefix}IB": 1024**power for power, prefix in enumerate("KMGT", start=1)},
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_size(size: int | str, *, name: str = "size") -> int:
    """Bytes of ``size``: an int (bytes) or a string such as ``"512MiB"``, ``"4GiB"`` or ``"4GB"``.

    ``KB`` … ``TB`` are powers of 1000, ``KiB`` … ``TiB`` powers of 1024; case does not matter.
    Raises :class:`ConfigurationError`, naming the option ``name``, for anything else.
    """
    if isinstance(size, int) and not isinstance(size, bool) and size >= 0:
        return size
    if isinstance(size, str) and (match := _SIZE.fullmatch(size)):
        unit = _UNITS.get(match[2].upper())
        if unit is not None:
            return int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit
    raise ConfigurationError(
        f"{name}={size!r} is not a size; give bytes as a non-negative int, or a string such as "
        f'"512MiB", "4GiB" or "4GB"'
    )


def parse_host_cache_size(size: int | str) -> int:
    """:func:`parse_size` in whole segments, and at least what the engine can work with; ``"auto"`` fits the machine."""
    if size == "auto":
        return default_host_cache_bytes()
    nbytes = parse_size(size, name="host_cache_size")
    if nbytes < MIN_HOST_CACHE_BYTES:
        segments = MIN_HOST_CACHE_BYTES // SEGMENT_BYTES
        raise ConfigurationError(
            f"host_cache_size={size!r} is below the minimum of "
            f"{MIN_HOST_CACHE_BYTES >> 20}MiB ({segments} segments); give at least that"
        )
    return nbytes - nbytes % SEGMENT_BYTES


def _one_of(name: str, value: Any, kind: Any) -> Any:
    choices = get_args(kind)
    if value not in choices:
        raise ConfigurationError(
            f"{name}={value!r} is not an option; choose one of {', '.join(map(repr, choices))}"
        )
    return value


def _seconds(name: str, value: Any, least: float, most: float, why: str) -> float:
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not math.isfinite(value)
        or not least <= value <= most
    ):
        raise ConfigurationError(
            f"{name}={value!r} must be seconds between {least:g} and {most:g}: {why}"
        )
    return float(value)


@dataclass(frozen=True)
class WriterConfig:
    """Checked options of a :class:`~dcp_datastates.DataStatesWriter`, which documents them."""

    host_cache_bytes: int
    read_window: ReadWindow
    read_deadline: float
    defer: Defer
    overwrite: bool
    commit: Commit
    commit_timeout: float
    exit_timeout: float
    max_in_flight: int
    when_behind: WhenBehind

    @staticmethod
    def checked(
        *,
        host_cache_size: int | str,
        read_window: str,
        read_deadline: float,
        defer: str,
        overwrite: bool,
        commit: str,
        commit_timeout: float,
        exit_timeout: float,
        max_in_flight: int,
        when_behind: str,
    ) -> WriterConfig:
        """Check every option; raises :class:`ConfigurationError` naming the first bad one."""
        if not isinstance(overwrite, bool):
            raise ConfigurationError(f"overwrite={overwrite!r} must be True or False")
        if (
            isinstance(max_in_flight, bool)
            or not isinstance(max_in_flight, int)
            or not 1 <= max_in_flight <= MAX_IN_FLIGHT
        ):
            raise ConfigurationError(
                f"max_in_flight={max_in_flight!r} must be an int between 1 and {MAX_IN_FLIGHT}"
            )
        return WriterConfig(
            host_cache_bytes=parse_host_cache_size(host_cache_size),
            read_window=_one_of("read_window", read_window, ReadWindow),
            read_deadline=_seconds(
                "read_deadline",
                read_deadline,
                0,
                MAX_READ_DEADLINE,
                "reads that wait for longer hold up the commit",
            ),
            defer=_one_of("defer", defer, Defer),
            overwrite=overwrite,
            commit=_one_of("commit", commit, Commit),
            commit_timeout=_seconds(
                "commit_timeout",
                commit_timeout,
                MIN_COMMIT_TIMEOUT,
                MAX_COMMIT_TIMEOUT,
                "a rank without any progress for so long is given up",
            ),
            exit_timeout=_seconds(
                "exit_timeout",
                exit_timeout,
                0,
                MAX_COMMIT_TIMEOUT,
                "the end of the process waits for saves in flight for so long",
            ),
            max_in_flight=max_in_flight,
            when_behind=_one_of("when_behind", when_behind, WhenBehind),
        )
