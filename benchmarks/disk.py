"""What the disk gives a program that does nothing but write: the denominator of every GB/s."""

from __future__ import annotations

import mmap
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_BLOCK = 8 << 20
_THREADS = 4


def raw_write_rate(directory: Path, nbytes: int) -> float:
    """Bytes per second of O_DIRECT writes of 8 MiB from 4 threads into one preallocated file, and
    one fdatasync at the end.

    Raises :class:`OSError` where the file system refuses O_DIRECT.
    """
    path = directory / "raw"
    blocks = nbytes // _BLOCK
    with mmap.mmap(-1, _BLOCK) as page_aligned:
        page_aligned.write(os.urandom(_BLOCK))
        view = memoryview(page_aligned)
        begun = time.perf_counter()
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT)
        try:
            os.posix_fallocate(file, 0, blocks * _BLOCK)

            def write(block: int) -> None:
                written = os.pwrite(file, view, block * _BLOCK)
                assert written == _BLOCK

            with ThreadPoolExecutor(_THREADS) as pool:
                list(pool.map(write, range(blocks)))
            os.fdatasync(file)
            seconds = time.perf_counter() - begun
        finally:
            os.close(file)
            path.unlink()
            view.release()
    return blocks * _BLOCK / seconds
