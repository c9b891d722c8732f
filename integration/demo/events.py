"""What the workers tell the driver: one JSON line on rank 0's standard output per event."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from typing import Literal, TypeAlias

Phase: TypeAlias = Literal["stock", "datastates", "resumed"]

_MARK = "@demo "


@dataclass(frozen=True)
class Begun:
    """A phase has begun, from the checkpoint of ``resumed_from`` (0: from nothing)."""

    phase: Phase
    ranks: int
    layout: str
    parameters: int
    resumed_from: int


@dataclass(frozen=True)
class Stepped:
    """An iteration's optimizer step is done, and its save has been started."""

    phase: Phase
    iteration: int
    loss: float
    seconds: float
    """The iteration's length without the wait for the save before."""


@dataclass(frozen=True)
class Saved:
    """The save of an iteration is committed. Durations are the longest of any rank."""

    phase: Phase
    iteration: int
    call_seconds: float
    """Inside ``dcp.async_save``."""
    gate_seconds: float
    """Inside ``optimizer.step()``, waiting for the save's reads."""
    wait_seconds: float
    """Before the next save: waiting for this one to be committed."""
    commit_seconds: float
    """From the call to the commit."""
    write_seconds: float
    """From the first byte that could be read to the last that is durable."""
    nbytes: int
    """Of all ranks, on storage."""

    @property
    def stall_seconds(self) -> float:
        """What the save itself takes from training."""
        return self.call_seconds + self.gate_seconds


@dataclass(frozen=True)
class Killed:
    """All ranks are about to be killed (SIGKILL), the save of ``iteration`` being in flight."""

    phase: Phase
    iteration: int


Event: TypeAlias = Begun | Stepped | Saved | Killed
_KINDS: dict[str, type[Event]] = {kind.__name__: kind for kind in (Begun, Stepped, Saved, Killed)}


def emit(event: Event) -> None:
    """Tell the driver; call on one rank."""
    line = _MARK + json.dumps({"event": type(event).__name__, **asdict(event)}) + "\n"
    sys.stdout.write(line)
    sys.stdout.flush()


def parse(line: str) -> Event | None:
    """The event that ``line`` carries; None for any other output."""
    if not line.startswith(_MARK):
        return None
    fields = json.loads(line[len(_MARK) :])
    return _KINDS[fields.pop("event")](**fields)
