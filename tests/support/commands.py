"""The command line, other programs of Python, and those that documents print, run as users run them."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from dcp_datastates_cli.main import main
from support.jobs.scripts import environment_of_python

ROOT = Path(__file__).parents[2]

_SECONDS = 150
_FENCE = re.compile(r"^```(\w*)$")
_HEADING = re.compile(r"^#+ (.+)$")


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
    return subprocess.run(
        [sys.executable, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        env=environment_of_python(),
        timeout=200,
        check=False,
    )


def torchrun(ranks: int, *arguments: str | int) -> list[str]:
    """The command that starts a program on ``ranks`` processes of this machine."""
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(ranks), *map(str, arguments)),
    ]


def run(
    command: list[str], directory: Path, expect: int | None = 0, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run ``command`` in ``directory`` to its end; AssertionError unless it exits with ``expect`` (None: any)."""
    with started(command, directory, **environment) as process:
        out, err = process.communicate(timeout=_SECONDS)
    ended = subprocess.CompletedProcess(command, process.returncode, out, err)
    assert expect is None or ended.returncode == expect, (
        f"exit status {ended.returncode}, not {expect}\n{out}\n{err}"
    )
    return ended


@contextlib.contextmanager
def started(
    command: list[str], directory: Path, **environment: str
) -> Iterator[subprocess.Popen[str]]:
    """``command``, running in ``directory``; when the block ends, it is ended, its children too."""
    process = subprocess.Popen(
        command,
        cwd=directory,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=environment_of_python(**environment),
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()  # torchrun ends its ranks, which have sessions of their own
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


# --- documents --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """A fenced block of a document."""

    document: str
    """Relative to the repository."""
    heading: str
    language: str
    text: str


def documents() -> list[str]:
    """What is written for users, relative to the repository."""
    pages = (ROOT / "docs").rglob("*.md")
    return ["README.md", *sorted(page.relative_to(ROOT).as_posix() for page in pages)]


@functools.cache
def blocks(document: str) -> list[Block]:
    """The fenced blocks of ``document``, each with the heading that it stands under."""
    found: list[Block] = []
    heading, language, lines = "", None, list[str]()
    for line in (ROOT / document).read_text().splitlines():
        fence = _FENCE.match(line)
        if language is None:
            if fence:
                language, lines = fence[1], []
            elif title := _HEADING.match(line):
                heading = title[1]
        elif line == "```":
            found.append(Block(document, heading, language, "\n".join(lines) + "\n"))
            language = None
        else:
            lines.append(line)
    assert language is None, f"{document}: a fenced block does not end"
    return found


def program(heading: str, document: str = "README.md") -> str:
    """The Python code under ``heading``, as printed."""
    (found,) = (
        block.text
        for block in blocks(document)
        if block.language == "python" and block.heading == heading
    )
    return found


def table_cells(document: str, first_header: str) -> list[list[str]]:
    """The rows of the table whose first column has this header."""
    rows: list[list[str]] = []
    inside = False
    for line in (ROOT / document).read_text().splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if cells and cells[0] == first_header:
            inside = True
        elif inside and not cells:
            return rows
        elif inside and not set(cells[0]) <= set("-:"):
            rows.append(cells)
    assert inside, f"{document} has no table that begins with {first_header!r}"
    return rows
