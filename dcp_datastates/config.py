"""Options of the writer and the reader: parsed, checked and named in one place."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal, TypedDict, get_args

from dcp_datastates._native import MIN_HOST_CACHE_BYTES, SEGMENT_BYTES
from dcp_datastates.errors import ConfigurationError
from dcp_datastates.process.memory_limit import default_host_cache_bytes

IoPriority = Literal["normal", "low", "idle"]
Reads = Literal["backward", "immediate", "all", "blocking"] | float
"""When a save reads its tensors; :class:`~dcp_datastates.DataStatesWriter` documents it."""

WhenBehind = Literal["wait", "skip"]

EAGER_BELOW_BYTES = 64 * 1024
"""Tensors smaller than this are copied at the call: below it, a copy costs less than a deferral."""

MAX_READS_SECONDS = 3600.0
"""Longest wait for a backward pass. Every save must end, also one whose backward pass never comes."""

MIN_COMMIT_TIMEOUT = 1.0
"""Shortest ``commit_timeout``, in seconds: ranks hear of each other once a second."""

MAX_COMMIT_TIMEOUT = 86400.0
MAX_IN_FLIGHT = 32
MAX_TURNS = 100
MAX_THREADS = 256

MIN_COPY_RATE = 64 << 20
"""Smallest ``copy_rate``, in bytes per second: below it, the end of the process would wait for single copies."""

MIN_WRITE_RATE = 1 << 20
"""Smallest ``write_rate``, in bytes per second: below it, a segment would take a good part of ``commit_timeout``."""

_UNITS = {
    "": 1,
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", start=1)},
    **{f"{prefix}IB": 1024**power for power, prefix in enumerate("KMGT", start=1)},
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def check_options(call: str, given: Mapping[str, Any], known: type) -> None:
    """Raise :class:`ConfigurationError` for an option of ``call`` that ``known``, a ``TypedDict``, does not have."""
    check_names(f"{call}()", given, known.__annotations__)


def check_names(what: str, given: Iterable[str], known: Collection[str]) -> None:
    """Raise :class:`ConfigurationError` for a name that ``what`` does not know."""
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, 1)
            raise ConfigurationError(
                f"{what} has no option {name!r}; "
                + (f"did you mean {near[0]!r}?" if near else f"it has {', '.join(sorted(known))}")
            )


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


def parse_rate(rate: int | str | None, *, name: str = "rate", least: int = 1) -> int:
    """Bytes per second of ``rate``: as :func:`parse_size`, with or without ``"/s"``. None means no limit, 0.

    Raises :class:`ConfigurationError` for anything else, and for 0, or below ``least``.
    """
    if rate is None:
        return 0
    nbytes = parse_size(rate.removesuffix("/s") if isinstance(rate, str) else rate, name=name)
    if not nbytes:
        raise ConfigurationError(f"{name}={rate!r} would carry nothing; pass None for no limit")
    if nbytes < least:
        raise ConfigurationError(
            f"{name}={rate!r} is below the minimum of {least >> 20}MiB per second; give at least that, or None for no "
            f"limit"
        )
    return nbytes


_SECONDS = {"MS": 0.001, "S": 1, "MIN": 60, "M": 60, "H": 3600, "D": 86400, "W": 604800}


def parse_duration(duration: float | str, *, name: str = "duration") -> float:
    """Seconds of ``duration``: a number (seconds) or a string such as ``"90s"``, ``"10min"``, ``"6h"`` or ``"7d"``.

    Raises :class:`ConfigurationError`, naming the option ``name``, for anything else, and for 0.
    """
    seconds = math.nan
    if _is_number(duration):
        seconds = float(duration)
    elif isinstance(duration, str) and (match := _SIZE.fullmatch(duration)):
        seconds = float(match[1]) * _SECONDS.get(match[2].upper(), math.nan)
    if not 0 < seconds < math.inf:
        raise ConfigurationError(
            f"{name}={duration!r} is not a duration; give seconds above 0, or a string such as "
            f'"90s", "10min", "6h" or "7d"'
        )
    return seconds


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
    if not _is_number(value) or not least <= value <= most:
        text = f"{name}={value!r} must be seconds between {least:g} and {most:g}: {why}"
        raise ConfigurationError(text)
    return float(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _reads(name: str, value: Any) -> Any:
    words = get_args(get_args(Reads)[0])
    if value in words or (_is_number(value) and 0 <= value <= MAX_READS_SECONDS):
        return value
    raise ConfigurationError(
        f"{name}={value!r} is not an option; choose one of {', '.join(map(repr, words))}, or the seconds (0 to "
        f"{MAX_READS_SECONDS:g}) for which reads wait for a backward pass"
    )


def parse_flag(name: str, value: Any) -> bool:
    """``value``; raises :class:`ConfigurationError` unless it is True or False."""
    if not isinstance(value, bool):
        raise ConfigurationError(f"{name}={value!r} must be True or False")
    return value


def check_count(
    name: str, value: Any, most: float = math.inf, least: int = 1, more: str = ""
) -> int:
    """The count; raises :class:`ConfigurationError`, with ``more``, if the option ``name`` is none or out of bounds."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        bounds = f", {least} or more" if most == math.inf else f" between {least} and {most}"
        raise ConfigurationError(f"{name}={value!r} must be an int{bounds}{more}")
    return value


def _turns(name: str, value: Any) -> int | None:
    return None if value is None else check_count(name, value, MAX_TURNS)


@dataclass(frozen=True)
class EngineConfig:
    """Checked options of the process's engine; :func:`~dcp_datastates.configure_engine` documents them."""

    copy_threads: int = 2
    flush_threads: int = 4
    restore_threads: int = 4
    copy_rate: int = 0
    """0: no limit."""
    write_rate: int = 0
    """0: no limit."""
    io_priority: IoPriority = "normal"

    @staticmethod
    def checked(
        *,
        copy_rate: int | str | None,
        write_rate: int | str | None,
        io_priority: str,
        **threads: Any,
    ) -> EngineConfig:
        """Check every option; raises :class:`ConfigurationError` naming the first bad one."""
        counts = {name: check_count(name, value, MAX_THREADS) for name, value in threads.items()}
        return EngineConfig(
            **counts,
            copy_rate=parse_rate(copy_rate, name="copy_rate", least=MIN_COPY_RATE),
            write_rate=parse_rate(write_rate, name="write_rate", least=MIN_WRITE_RATE),
            io_priority=_one_of("io_priority", io_priority, IoPriority),
        )


class BackgroundOptions(TypedDict, total=False):
    """The :class:`WriterOptions` of saves that a framework starts; it determines the others."""

    host_cache_size: int | str
    reads: Reads
    commit_timeout: float
    exit_timeout: float
    max_in_flight: int
    when_behind: WhenBehind
    audit: bool
    compare_replicas: int | None


class WriterOptions(BackgroundOptions, total=False):
    """The options of a :class:`~dcp_datastates.DataStatesWriter`, which documents them, where a call passes them on."""

    overwrite: bool
    no_dist: bool
    storage_options: Mapping[str, Any] | None


@dataclass(frozen=True)
class WriterConfig:
    """Checked options of a :class:`~dcp_datastates.DataStatesWriter`, which documents them."""

    host_cache_bytes: int
    cache_grows: bool = False
    """Whether the cache grows to the size of a state on devices: with ``host_cache_size="auto"``."""
    reads: Reads = "backward"
    overwrite: bool = True
    commit_timeout: float = 300.0
    exit_timeout: float = 600.0
    max_in_flight: int = 4
    when_behind: WhenBehind = "wait"
    audit: bool = False
    compare_replicas: int | None = None

    @property
    def read_deadline(self) -> float:
        """The seconds after the call at which reads begin at the latest."""
        if isinstance(self.reads, str):
            return 1.0 if self.reads == "backward" else 0.0
        return self.reads

    @staticmethod
    def checked(host_cache_size: int | str = "auto", **options: Any) -> WriterConfig:
        """Check every option that is given; raises :class:`ConfigurationError` naming the first bad one."""
        checked = {name: _CHECKS[name](name, value) for name, value in options.items()}
        return WriterConfig(
            parse_host_cache_size(host_cache_size), host_cache_size == "auto", **checked
        )


_CHECKS: Final[dict[str, Callable[[str, Any], Any]]] = {
    "reads": _reads,
    "overwrite": parse_flag,
    "commit_timeout": partial(
        _seconds,
        least=MIN_COMMIT_TIMEOUT,
        most=MAX_COMMIT_TIMEOUT,
        why="a rank without any progress for so long is given up",
    ),
    "exit_timeout": partial(
        _seconds,
        least=0,
        most=MAX_COMMIT_TIMEOUT,
        why="the end of the process waits for saves in flight for so long",
    ),
    "max_in_flight": partial(check_count, most=MAX_IN_FLIGHT),
    "when_behind": partial(_one_of, kind=WhenBehind),
    "audit": parse_flag,
    "compare_replicas": _turns,
}
