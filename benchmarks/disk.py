"""What the disk gives a program that does nothing but write: the denominator of every GB/s."""

from __future__ import annotations

import mmap
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_BLOCK = 8 << 20
_THREADS = 4


def raw_write_rate(directory: Path, nbytes: int, *, direct: bool = True) -> float:
    """Bytes per second of writes of 8 MiB from 4 threads into one preallocated file, and one
    fdatasync at the end; with O_DIRECT, or through the page cache.

    Raises :class:`OSError` where the file system refuses O_DIRECT.
    """
    path = directory / "raw"
    blocks = nbytes // _BLOCK
    with mmap.mmap(-1, _BLOCK) as page_aligned:
        page_aligned.write(os.urandom(_BLOCK))
        view = memoryview(page_aligned)
        begun = time.perf_counter()
        file = -1
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | (os.O_DIRECT if direct else 0)
            file = os.open(path, flags)
            os.posix_fallocate(file, 0, blocks * _BLOCK)

            def write(block: int) -> None:
                written = os.pwrite(file, view, block * _BLOCK)
                assert written == _BLOCK

            with ThreadPoolExecutor(_THREADS) as pool:
                list(pool.map(write, range(blocks)))
            os.fdatasync(file)
            seconds = time.perf_counter() - begun
        finally:
            if file >= 0:
                os.close(file)
            path.unlink(missing_ok=True)  # some refuse O_DIRECT, and make the file all the same
            view.release()
    return blocks * _BLOCK / seconds
