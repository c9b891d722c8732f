"""The identity of a run, in each of its tiers: so that a reused local directory never loads another run, and two runs
never share an archive.

A file in each tier has a random name of the run. The archive's also says which fast tier made it, as a digest of its
path: a job that starts with an empty fast tier of that path goes on with the run. A fast tier elsewhere (a new scratch
directory for each job) does so once this process has loaded a checkpoint from the archive.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from dcp_datastates.checkpoints.listing import checkpoints
from dcp_datastates.errors import ConfigurationError
from dcp_datastates.storage import local
from dcp_datastates.storage.object_path import Location, ObjectPath, stored
from dcp_datastates.storage.object_store import ObjectMissingError

IDENTITY_NAME: Final = ".datastates-run"
_LONGEST: Final = 256


class _Identity(NamedTuple):
    run: str
    origin: str
    """The digest of the fast tier's path, in the archive; empty in a fast tier."""


_loaded_from: Final[set[Location]] = set()
"""The directories whose checkpoints this process has loaded."""


def loaded_from(places: Iterable[Location]) -> None:
    """Note that this process loads the checkpoint at ``places``."""
    _loaded_from.update(place.parent for place in places)


def check_one_run(fast: Location, slow: Location) -> bool:
    """Check that two directories of checkpoints belong to one run; a new one becomes the run's. One process calls this,
    before the job's first save.

    Args:
        fast: The tier of the saves.
        slow: The archive.

    Returns:
        Whether they do. False if ``fast`` is new, the archive was made by a run with another fast tier, and this
        process has loaded no checkpoint of it.

    Raises:
        ConfigurationError: they are of two runs; or one of them has checkpoints and no identity while the other has
            one.
        StorageError: storage fails.
    """
    if fast == slow:
        raise ConfigurationError(
            f"archive={str(slow)!r} is the directory of the saves; name another"
        )
    mine, theirs = _read(fast), _read(slow)
    if mine is not None and theirs is None:
        _check_new(slow, fast)
    if mine is None and theirs is not None:
        _check_new(fast, slow)
        if theirs.origin not in ("", _digest(fast)) and slow not in _loaded_from:
            return False
    # The fast tier's first: where this is cut off, it is not taken for another run's.
    mine = mine or _create(fast, _Identity(theirs.run if theirs else secrets.token_hex(8), ""))
    theirs = theirs or _create(slow, _Identity(mine.run, _digest(fast)))
    if mine.run != theirs.run:
        raise ConfigurationError(
            f"{str(fast)!r} belongs to run {mine.run} and {str(slow)!r} to run {theirs.run}: they are not tiers of "
            f"one run; use another directory, or empty it"
        )
    return True


def of_another_run(fast: Location, slow: Sequence[Location]) -> int | None:
    """Which of the archives ``slow`` is of another run, as :func:`check_one_run` finds; None if none is. Those that say
    of which run they are come first: new tiers become that run's.
    """
    order = sorted(range(len(slow)), key=lambda at: _read(slow[at]) is None)
    return next((at for at in order if not check_one_run(fast, slow[at])), None)


def another_run(fast: Location, slow: Location) -> ConfigurationError:
    """The error for a save to ``fast`` where :func:`check_one_run` has returned False."""
    return ConfigurationError(
        f"archive={str(slow)!r} belongs to a run that saves elsewhere than in {str(fast)!r}; to continue that run, "
        f"call restore_latest() or load() first, or copy its file {IDENTITY_NAME} there; another run needs another "
        f"archive"
    )


def _check_new(root: Location, other: Location) -> None:
    if found := checkpoints(root):
        raise ConfigurationError(
            f"{str(root)!r} has checkpoints, such as {found[-1].name!r}, and does not say of which run; "
            f"{str(other)!r} does, in {IDENTITY_NAME}; use an empty directory, or, if it is the same run, copy that "
            f"file there"
        )


def _read(root: Location) -> _Identity | None:
    path = stored(root) / IDENTITY_NAME
    try:
        if (nbytes := path.store.size(path.key)) > _LONGEST:
            raise ConfigurationError(
                f"{str(path)!r} has {nbytes} bytes, so it does not say which run this is; remove it if it is not yours"
            )
        data = path.store.get(path.key)
    except ObjectMissingError:
        return None
    run, _, origin = data.decode(errors="replace").strip().partition(" ")
    return _Identity(run, origin)


def _digest(root: Location) -> str:
    path = str(root) if isinstance(root, ObjectPath) else str(root.absolute())
    return hashlib.sha256(path.encode()).hexdigest()[:16]


def _create(root: Location, identity: _Identity) -> _Identity:
    """Make the identity, unless another process has; returns the one that is there."""
    path = stored(root) / IDENTITY_NAME
    if path.is_local:
        local.make_directories(Path(str(path.parent)))
    path.store.put_if_absent(path.key, " ".join(identity).strip().encode() + b"\n")
    return _read(root) or identity
