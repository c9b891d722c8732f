"""File systems with limits of their own, where this process may mount them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
import torch.distributed as dist

_CAPABILITY_VERSION = 0x20080522
_CAP_DAC_OVERRIDE = 1 << 1


def _mount(*arguments: str | Path) -> str:
    """What went wrong; empty if nothing did."""
    try:
        ended = subprocess.run(
            ["mount", *map(str, arguments)], capture_output=True, text=True, check=False
        )
    except FileNotFoundError as error:
        return str(error)
    return ended.stderr.strip() if ended.returncode else ""


@contextlib.contextmanager
def tmpfs(path: Path, size: str) -> Iterator[Path]:
    """A small file system at ``path`` that all ranks see, or the test is skipped. Collective."""
    said = [""]
    if dist.get_rank() == 0:
        path.mkdir()
        said = [_mount("-t", "tmpfs", "-o", f"size={size}", "none", path)]
    dist.broadcast_object_list(said, 0)
    if said[0]:
        pytest.skip(f"a tmpfs cannot be mounted here: {said[0]}")
    try:
        yield path
    finally:
        with contextlib.suppress(Exception):  # another rank has failed
            dist.barrier()
        if dist.get_rank() == 0:
            subprocess.run(["umount", "--lazy", str(path)], check=False, capture_output=True)


_MADE_BY: Final = {
    "ext4": ("mkfs.ext4", "-q", "-F"),
    "xfs": ("mkfs.xfs", "-q", "-f"),
    "btrfs": ("mkfs.btrfs", "-q", "-f"),
}
_IMAGE_BYTES: Final = 400 << 20  # xfs wants 300 MiB; the file has holes


@contextlib.contextmanager
def mounted(kind: str, scratch: Path) -> Iterator[Path]:
    """An empty file system of this kind, or the test is skipped."""
    path, image = scratch / kind, scratch / f"{kind}.img"
    path.mkdir()
    if kind == "tmpfs":
        said = _mount("-t", "tmpfs", "-o", "size=16m", "none", path)
    else:
        with image.open("wb") as file:
            file.truncate(_IMAGE_BYTES)
        try:
            subprocess.run([*_MADE_BY[kind], str(image)], check=True, capture_output=True)
        except FileNotFoundError as error:
            pytest.skip(f"{kind} cannot be made here: {error}")
        said = _mount("-o", "loop", image, path)
    if said:
        pytest.skip(f"{kind} cannot be mounted here: {said}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=False, capture_output=True)
        image.unlink(missing_ok=True)


def remount(path: Path, how: str) -> None:
    """``ro`` or ``rw``; no file there may be open for writing."""
    said = _mount("-o", f"remount,{how}", path)
    assert not said, said


def fill(path: Path, leaving: int) -> Path:
    """A file in ``path`` that takes all but ``leaving`` bytes of its file system."""
    filler = path / "filler"
    status = os.statvfs(path)
    room = status.f_bavail * status.f_bsize - leaving
    assert room >= 0, f"there are {-room} bytes less than {leaving}"
    with filler.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, room) if room else None
    return filler


def bind_permissions() -> None:
    """From now on permission bits bind this thread, and what it starts, also if it is root's."""
    if os.geteuid() != 0:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    data = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; twice
    if libc.capget(header, data):
        raise OSError(ctypes.get_errno(), "capget")
    for place in (0, 1):
        data[place] &= ~_CAP_DAC_OVERRIDE
    if libc.capset(header, data):
        raise OSError(ctypes.get_errno(), "capset")


_NEW_NAMESPACE: Final = 0x20000  # CLONE_NEWNS


def mount(root: str, source: str, target: str) -> None:
    """In this process, and in threads that it starts from now on, ``target`` shows what ``source`` has; both lie below
    ``root``. Skips the test if this process may not mount.
    """
    if ctypes.CDLL(None).unshare(_NEW_NAMESPACE):
        pytest.skip("no namespace of mounts can be made here")
    said = _mount("--make-rprivate", "/") or _mount(
        "--bind", f"{root}/{source}", f"{root}/{target}"
    )
    if said:
        pytest.skip(f"a directory cannot be mounted here: {said}")
