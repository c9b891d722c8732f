"""The progress bar of loads, and of the commands."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, cast

from dcp_datastates.text import printable


class _Forgiving:
    """A stream; what it does not take is lost: a bar is no reason to fail, or, for rich, to end the program."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def progress_bar(doing: str, name: str, quiet: bool) -> Iterator[Callable[[int, int], None] | None]:
    """On the standard error, while the context lasts: how far it is, told the bytes that are done and all. It has no
    thread, and is drawn when it is told.

    None if the user wants none, or there is no terminal.
    """
    if quiet or not sys.stderr.isatty():
        yield None
        return
    # Here: without a terminal, nothing needs rich.
    from rich import progress
    from rich.console import Console

    columns = (
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(),
        progress.DownloadColumn(binary_units=True),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(
        *columns,
        console=Console(file=cast("Any", _Forgiving(sys.stderr))),
        transient=True,
        auto_refresh=False,
        redirect_stdout=False,  # the program's streams stay its own
        redirect_stderr=False,
    ) as bar:
        task = bar.add_task(f"{doing} {printable(name)}", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total, refresh=True)
