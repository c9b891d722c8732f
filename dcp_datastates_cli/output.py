"""What all commands have in common: exit statuses, messages, JSON documents, and what an error means."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import logging
import os
import sys
import traceback
from collections.abc import Iterator
from typing import Any, Final

from dcp_datastates.errors import CheckpointCorruptError, DataStatesError
from dcp_datastates.text import printable

OK: Final = 0
DAMAGED: Final = 1
NO: Final = 1
"""The question that the command asks has the answer no: there is no latest checkpoint."""
TROUBLE: Final = 2


@contextlib.contextmanager
def pipe_may_close() -> Iterator[None]:
    """Output inside of this is cut off where the reader of a pipe has gone; the exit status stays."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        # What is buffered must not be tried again when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def say(what: object) -> None:
    """A line, or several, on the standard output, without control characters of names; nothing if it is closed."""
    with pipe_may_close():
        print(printable(what))


def complain(message: str) -> None:
    """An error, on the standard error."""
    with contextlib.suppress(BrokenPipeError):
        print(f"dcp-datastates: {printable(message)}", file=sys.stderr, flush=True)


def print_json(document: dict[str, Any]) -> None:
    """The document, and nothing else, on the standard output."""
    with pipe_may_close():
        json.dump(document, sys.stdout, indent=2, default=str)
        sys.stdout.write("\n")


def answer(options: argparse.Namespace, document: dict[str, Any], text: object) -> None:
    """The document with ``--json``, nothing with ``--quiet``, else the text."""
    if options.json:
        print_json(document)
    elif not getattr(options, "quiet", False):
        say(text)


def run(command: str, options: argparse.Namespace) -> int:
    """Run the ``command``, a file and a function in this package; returns the exit status."""
    for stream in (sys.stdout, sys.stderr):  # a path may hold bytes that are no text
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    file, _, function = command.partition(".")
    try:
        with _log_shown():
            status: int = getattr(importlib.import_module(f"{__package__}.{file}"), function)(
                options
            )
            return status
    except DataStatesError as error:
        complain(str(error))
        return DAMAGED if isinstance(error, CheckpointCorruptError) else TROUBLE
    except Exception:  # a defect: not the answer "damaged" or "different"
        traceback.print_exc()
        return TROUBLE


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


@contextlib.contextmanager
def _log_shown() -> Iterator[None]:
    """Show the package's log: what a command leaves out, or alone, and why."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter("dcp-datastates: %(message)s"))
    logger = logging.getLogger("dcp_datastates")
    before = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before[0])
        logger.propagate = before[1]
