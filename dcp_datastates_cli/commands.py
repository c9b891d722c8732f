"""Running a command: which function it is, what is logged meanwhile, and what an error means."""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from dcp_datastates.errors import CheckpointCorruptError, DataStatesError
from dcp_datastates.text import printable
from dcp_datastates_cli import (
    convert,
    delete,
    describe,
    doctor,
    find,
    trace,
    verify,
    watch,
)
from dcp_datastates_cli.output import DAMAGED, TROUBLE, complain

_COMMANDS: Final[Mapping[str, Callable[[argparse.Namespace], int]]] = {
    "verify": verify.run,
    "inspect": describe.run,
    "doctor": doctor.run,
    "watch": watch.run,
    "trace": trace.run,
    "convert": convert.run_convert,
    "copy": convert.run_copy,
    "diff": convert.run_diff,
    "latest": find.run,
    "retain": delete.run_retain,
    "rm": delete.run_rm,
    "pin": delete.run_pin,
    "unpin": delete.run_pin,
}


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    for stream in (sys.stdout, sys.stderr):  # a path may hold bytes that are no text
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        with _log_shown():
            return _COMMANDS[options.command](options)
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
