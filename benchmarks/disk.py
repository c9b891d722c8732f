"""What the disk gives a program that does nothing but write or read: the denominator of every rate."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

_BLOCK = 8 << 20
_PAGE = 4 << 10
_THREADS = 4


def raw_write_rate(directory: Path, nbytes: int, *, direct: bool = True) -> float:
    """Bytes per second of writes of 8 MiB from 4 threads into a new file, and one fdatasync at
    the end; with O_DIRECT, or through the page cache.

    Raises :class:`OSError` where the file system refuses O_DIRECT.
    """
    path = directory / "raw"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | (os.O_DIRECT if direct else 0)
    try:
        return _rate(path, flags, nbytes, os.pwrite)
    finally:
        path.unlink(missing_ok=True)  # some refuse O_DIRECT, and make the file all the same


def raw_read_rate(path: Path) -> float:
    """Bytes per second of O_DIRECT reads of 8 MiB from 4 threads, of all but the last 4 KiB at most."""
    flags = os.O_RDONLY | os.O_DIRECT
    nbytes = path.stat().st_size // _PAGE * _PAGE
    return _rate(path, flags, nbytes, lambda file, part, at: os.preadv(file, [part], at))


def _rate(
    path: Path, flags: int, nbytes: int, move: Callable[[int, memoryview, int], int]
) -> float:
    """Each thread moves one part of the file, through a buffer of its own (of huge pages if there are any)."""
    nbytes = -(-nbytes // _PAGE) * _PAGE
    share = -(-nbytes // _THREADS // _PAGE) * _PAGE
    with ExitStack() as stack:
        pages = stack.enter_context(mmap.mmap(-1, (_THREADS + 1) * _BLOCK, flags=mmap.MAP_PRIVATE))
        pages.madvise(mmap.MADV_HUGEPAGE)
        pages.write(b"\7" * len(pages))
        buffers = stack.enter_context(memoryview(pages))
        pool = stack.enter_context(ThreadPoolExecutor(_THREADS))
        file = os.open(path, flags)
        stack.callback(os.close, file)

        def work(number: int) -> None:
            end = min(nbytes, (number + 1) * share)
            for at in range(number * share, end, _BLOCK):
                size = min(_BLOCK, end - at)
                with buffers[number * _BLOCK : number * _BLOCK + size] as part:
                    if move(file, part, at) != size:
                        raise OSError(f"{path}: moved less than {size} bytes at {at}")

        begun = time.perf_counter()
        list(pool.map(work, range(_THREADS)))
        os.fdatasync(file)
        return nbytes / (time.perf_counter() - begun)
