"""Steps in processes of their own, one after another: killed at their limits, recorded one by one."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gpu_first.steps import Step

__all__ = ["Record", "run"]

_HERE = Path(__file__).parents[1]
_LAST_LINES = 400
"""Tests that failed say why."""
_STACKS_SECONDS = 1.0
"""For a step that is about to be killed to say where it is."""
_DYING_SECONDS = 10.0
"""For a step that is killed to end: one in a call of a driver that hangs never does."""


@dataclass
class Record:
    """What became of a step."""

    name: str
    exit_code: int | None = None
    """Negative: the signal that ended it."""
    seconds: float = 0.0
    limit: float = 0.0
    killed: bool = False
    """It took too long."""
    last_lines: list[str] = field(default_factory=list)
    found: dict[str, Any] = field(default_factory=dict)
    """By the time of its end, whatever that was."""

    @property
    def passed(self) -> bool:
        return self.exit_code == 0 and not self.killed


def run(
    step: Step,
    arguments: Sequence[str] = (),
    *,
    directory: Path | None = None,
    keep: Path | None = None,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Record:
    """Run ``step`` with ``arguments`` more, until its limit; its files are in a folder of its own in ``directory``.

    Nothing that it has started or written is left, but for a trace, beside ``keep``.
    """
    with tempfile.TemporaryDirectory(
        prefix="gpu-first-", dir=directory, ignore_cleanup_errors=True
    ) as folder:
        into, log = Path(folder) / "found.json", Path(folder) / "log"
        command = [sys.executable, "-m", f"gpu_first.{step.module}", *step.arguments, *arguments]
        command += ["--dir", folder, "--into", str(into)]
        record = Record(step.name, limit=step.limit)
        began = time.monotonic()
        with (
            log.open("wb") as output,
            _group(
                command,
                cwd=_HERE,
                env={**os.environ, **step.environment, **environment},
                stdout=output,
                stderr=subprocess.STDOUT,
            ) as process,
        ):
            try:
                record.exit_code = process.wait(step.limit)
            except subprocess.TimeoutExpired:
                record.killed = True
                process.send_signal(signal.SIGUSR1)
                time.sleep(_STACKS_SECONDS)
        record.exit_code = process.returncode
        record.seconds = round(time.monotonic() - began, 1)
        record.last_lines = log.read_text(errors="replace").splitlines()[-_LAST_LINES:]
        if into.exists():
            record.found = json.loads(into.read_text())
        for trace in Path(folder).glob("*.trace.json.gz") if keep is not None else ():
            shutil.copy(trace, keep.with_suffix(".trace.json.gz"))
        return record


@contextlib.contextmanager
def _group(command: list[str], **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A process that leads a group, all of which is killed in the end, however that comes.

    It may be running still, if the kernel cannot end it.
    """
    process = subprocess.Popen(command, start_new_session=True, **options)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_DYING_SECONDS)
