"""Running a command: what is logged meanwhile, and what an error means."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import logging
import sys
import traceback
from collections.abc import Iterator

from dcp_datastates.errors import CheckpointCorruptError, DataStatesError
from dcp_datastates.text import printable
from dcp_datastates_cli.output import DAMAGED, TROUBLE, complain


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
