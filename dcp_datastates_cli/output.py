"""What all commands say it with: exit statuses, messages, JSON documents."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator
from typing import Any, Final

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
