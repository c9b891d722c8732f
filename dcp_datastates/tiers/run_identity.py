"""The identity of a run, in each of its tiers: so that a reused local directory never loads another run."""

from __future__ import annotations

import secrets
from collections.abc import Collection
from typing import Final

from dcp_datastates.checkpoints.listing import checkpoints
from dcp_datastates.errors import ConfigurationError
from dcp_datastates.storage import local, operations
from dcp_datastates.storage.object_path import Location, ObjectPath
from dcp_datastates.storage.object_store import ObjectMissingError

__all__ = ["IDENTITY_NAME", "check_one_run"]

IDENTITY_NAME: Final = ".datastates-run"
_PHASE: Final = "run"
_LONGEST: Final = 256


def check_one_run(fast: Location, slow: Location, ours: Collection[Location] = ()) -> None:
    """Check that two directories of checkpoints belong to one run; a new one becomes the run's. One process calls this.
    Checkpoints at ``ours`` are of the run: this process has saved them.

    Raises :class:`ConfigurationError` if they are of two runs, or one of them has checkpoints and no identity while the
    other has one; and :class:`StorageError`.
    """
    if fast == slow:
        raise ConfigurationError(
            f"archive={str(slow)!r} is the directory of the saves; name another"
        )
    mine, theirs = _read(fast), _read(slow)
    if mine is not None and theirs is None:
        _check_new(slow, fast, ours)
    if mine is None and theirs is not None:
        _check_new(fast, slow, ours)
    # The fast tier's first: where this is cut off, it is not taken for another run's.
    mine = mine or _create(fast, theirs or secrets.token_hex(8))
    theirs = theirs or _create(slow, mine)
    if mine != theirs:
        raise ConfigurationError(
            f"{str(fast)!r} belongs to run {mine} and {str(slow)!r} to run {theirs}: they are not tiers of one run; "
            f"use another directory, or empty it"
        )


def _check_new(root: Location, other: Location, ours: Collection[Location]) -> None:
    found = [path for path in checkpoints(root) if path not in ours]
    if found:
        raise ConfigurationError(
            f"{str(root)!r} has checkpoints, such as {found[-1].name!r}, and does not say of which run; "
            f"{str(other)!r} does, in {IDENTITY_NAME}; use an empty directory, or, if it is the same run, copy that "
            f"file there"
        )


def _read(root: Location) -> str | None:
    path = root / IDENTITY_NAME
    if isinstance(path, ObjectPath):
        try:
            return _decoded(path.store.get(path.key)[0])
        except ObjectMissingError:
            return None
    with local.explained("reading", path):
        try:
            return _decoded(path.read_bytes()[: _LONGEST + 1])
        except (FileNotFoundError, NotADirectoryError):
            return None


def _decoded(data: bytes) -> str:
    return data[:_LONGEST].decode(errors="replace").strip()


def _create(root: Location, identity: str) -> str:
    """Make the identity, unless another process has; returns the one that is there."""
    data = identity.encode() + b"\n"
    if isinstance(root, ObjectPath):
        root.store.put_if_absent((root / IDENTITY_NAME).key, data)
    else:
        unfinished = root / f"{IDENTITY_NAME}.{secrets.token_hex(4)}"
        local.make_directories(root, _PHASE)
        with local.explained("writing", unfinished):
            operations.write_new_file(unfinished, data, _PHASE)
            operations.rename(unfinished, root / IDENTITY_NAME, _PHASE)
            operations.sync_directory(root, _PHASE)
    return _read(root) or identity
