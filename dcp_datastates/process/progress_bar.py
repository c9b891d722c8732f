"""The progress bar of ``verify``, ``convert``, ``copy`` and ``diff``."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

from dcp_datastates.storage.object_path import Location
from dcp_datastates.text import printable

__all__ = ["progress_bar"]


@contextlib.contextmanager
def progress_bar(
    doing: str, path: Location, quiet: bool
) -> Iterator[Callable[[int, int], None] | None]:
    """On the standard error, while the context lasts: how far it is, told the bytes that are done and all.

    None if the user wants none, or there is no terminal.
    """
    if quiet or not sys.stderr.isatty():
        yield None
        return
    # Here: without a terminal, nothing needs rich.
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(f"{doing} {printable(path.name)}", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
