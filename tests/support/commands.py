"""The command line, and other programs of Python, run as users run them."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import Any
from unittest import mock

from dcp_datastates_cli.main import main

__all__ = ["Ended", "Terminal", "run_cli", "run_python"]


@dataclass(frozen=True)
class Ended:
    """What became of a command."""

    returncode: int
    stdout: str
    stderr: str


class Terminal(io.StringIO):
    """A stream that is one, as far as programs ask."""

    def isatty(self) -> bool:
        return True


def run_cli(*arguments: Any, answer: str | None = None) -> Ended:
    """``dcp-datastates`` with these arguments, in this process: importing torch takes seconds.

    On no terminal, unless there is an ``answer`` to what it asks there.
    """
    stdin, stdout = io.StringIO(), io.StringIO()
    stderr = io.StringIO() if answer is None else Terminal()
    if answer is not None:
        stdin = Terminal(answer)
    with mock.patch("sys.stdin", stdin), redirect_stdout(stdout), redirect_stderr(stderr):
        try:
            status = main([str(argument) for argument in arguments])
        except SystemExit as exit_:
            status = exit_.code
    return Ended(status, stdout.getvalue(), stderr.getvalue())


def run_python(*arguments: str, stdout: int = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    """Python in a process of its own, which finds what this one finds."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run(
        [sys.executable, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        timeout=120,
        check=False,
    )
