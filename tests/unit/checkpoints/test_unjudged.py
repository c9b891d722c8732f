"""A place that storage does not show is no empty place: every look-up says so by name, and nothing is deleted.

Each call × each error × each place; the errors are those of the system's calls, made here for one path and all below.
"""

import errno
import itertools
import os
import shutil
from pathlib import Path

import pytest
import torch
from support.state.checkpoints import causes, load_everything, raises, save
from support.state.files import data_files
from support.state.metadata import decision_of
from support.tiers import sampled

import dcp_datastates as ds
from dcp_datastates.storage import presence

ERRORS = (
    *(errno.EACCES, errno.EIO, errno.ESTALE, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG),
    *(errno.ETIMEDOUT, errno.EPERM, errno.ENOTCONN),
)
NOTHING = errno.ENOENT
CALLS = ("stat", "lstat", "open", "scandir", "listdir")
NEWEST = 3


def _state(step):
    return {"w": torch.full((3000,), float(step)), "step": step}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    root = tmp_path_factory.mktemp("saved") / "run"
    for step in range(1, NEWEST + 1):
        save(_state(step), root / f"step-{step}")
    return root


@pytest.fixture
def root(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "run")
    return tmp_path / "run"


class Faults:
    """The system's calls fail for one path and all below it, so many times (None: for good)."""

    def __init__(self, monkeypatch):
        self.place = None
        self.number = 0
        self.times = None
        self.slept = []
        for name in CALLS:
            monkeypatch.setattr(os, name, self._failing(getattr(os, name)))
        monkeypatch.setattr(presence.time, "sleep", self.slept.append)
        monkeypatch.setattr(presence, "_failed_at", -presence._REST_SECONDS)

    def at(self, place, number, times=None):
        self.place, self.number, self.times = place, number, times

    def _failing(self, real):
        def call(path, *more, **named):
            if self._hits(path):
                raise OSError(self.number, os.strerror(self.number), str(path))
            return real(path, *more, **named)

        return call

    def _hits(self, path):
        if self.place is None or not isinstance(path, (str, os.PathLike)) or self.times == 0:
            return False
        hit = Path(path) == self.place or self.place in Path(path).parents
        if hit and self.times is not None:
            self.times -= 1
        return hit


@pytest.fixture
def faults(monkeypatch):
    return Faults(monkeypatch)


def _metadata(root):
    return decision_of(root / f"step-{NEWEST}")


def _attempt(root):
    return data_files(root / f"step-{NEWEST}")[0].parent


PLACES = {
    "root": lambda root: root,
    "step": lambda root: root / f"step-{NEWEST}",
    "metadata": _metadata,
    "attempt": _attempt,
}


def _restore(root):
    return ds.CheckpointManager(root, every=1, no_dist=True).restore_latest(_state(0))


ON_ROOT = {
    "latest": ds.latest,
    "latest of tiers": lambda root: ds.latest([root]),
    "latest in full": lambda root: ds.latest(root, verify="full"),
    "steps": lambda root: ds.CheckpointManager(root, every=1, no_dist=True).steps(),
    "latest_step": lambda root: ds.CheckpointManager(root, every=1, no_dist=True).latest_step,
    "restore_latest": _restore,
    "retain": lambda root: ds.retain(root, keep=1),
}
ON_STEP = {
    "load": load_everything,
    "verify": ds.verify,
    "inspect": ds.inspect,
    "delete": ds.delete,
    "convert": lambda path: ds.convert(path, path.parent.parent / "out", to="torch"),
    "copy": lambda path: ds.copy(path, path.parent.parent / "copy"),
}
BY_NAMES = ("steps", "latest_step")
"""They open no data file: the attempt's directory does not matter to them."""


def _raised(call, root):
    try:
        call(root)
    except BaseException as error:  # DCP's is one
        return causes(error)[0]
    return None


def _all_files(root):
    return sorted(path for path in root.rglob("*") if path.is_file())


CASES = [
    (call, place, number)
    for call, place, number in itertools.product(ON_ROOT, PLACES, ERRORS)
    if not (call in BY_NAMES and place == "attempt")
]
KEPT = [
    ("restore_latest", "metadata", errno.ESTALE),
    ("latest", "metadata", errno.EACCES),
    ("retain", "step", errno.EIO),
    ("latest", "attempt", errno.EACCES),
]


@pytest.mark.parametrize(("call", "place", "number"), sampled(CASES, keep=KEPT))
def test_no_look_up_passes_by_what_it_cannot_judge(call, place, number, root, faults):
    where, before = PLACES[place](root), _all_files(root)
    faults.at(where, number)
    error = _raised(ON_ROOT[call], root)
    faults.place = None
    assert isinstance(error, ds.errors.StorageError), repr(error)
    assert error.errno == number
    assert str(error.filename).startswith(str(where))
    assert os.strerror(number) in str(error)
    assert _all_files(root) == before, "nothing was deleted"


KEPT_OF_STEPS = [(call, "metadata", errno.EACCES) for call in ON_STEP]


@pytest.mark.parametrize(
    ("call", "place", "number"),
    sampled(list(itertools.product(ON_STEP, PLACES, ERRORS)), keep=KEPT_OF_STEPS),
)
def test_no_call_on_a_checkpoint_takes_it_for_missing_or_damaged(call, place, number, root, faults):
    where, before = PLACES[place](root), _all_files(root)
    faults.at(where, number)
    error = _raised(ON_STEP[call], root / f"step-{NEWEST}")
    faults.place = None
    wrong = (ds.errors.CheckpointNotFoundError, ds.errors.CheckpointCorruptError)
    assert not isinstance(error, wrong), repr(error)
    assert error is None or isinstance(error, ds.errors.StorageError), repr(error)
    if place in ("step", "metadata"):
        assert error is not None
        assert os.strerror(number) in str(error)
    if error is not None:
        assert _all_files(root) == before


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("call", ["latest", "latest of tiers", "restore_latest"])
def test_only_what_is_missing_is_missing(call, place, root, faults):
    faults.at(PLACES[place](root), NOTHING)
    found = ON_ROOT[call](root)
    faults.place = None
    if place == "root":
        assert found is None
    else:
        assert str(NEWEST - 1) in str(found)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.ETIMEDOUT, errno.EAGAIN])
@pytest.mark.parametrize("call", ["latest", "restore_latest"])
def test_an_error_that_passes_is_tried_again(call, number, place, root, faults):
    faults.at(PLACES[place](root), number, times=1)
    assert str(NEWEST) in str(ON_ROOT[call](root))
    assert faults.slept, "it has waited"


def test_an_error_that_stays_is_tried_for_less_than_a_second(root, faults):
    faults.at(root, errno.ESTALE)
    for _ in range(100):
        with pytest.raises(ds.errors.StorageError):
            ds.latest(root)
    assert sum(faults.slept) < 1.0, "and not again for each place"


def test_what_is_older_than_the_newest_stops_no_look_up(root, faults):
    """The names of attempts tell that nothing there can be newer."""
    faults.at(decision_of(root / "step-1"), errno.EACCES)
    assert ds.latest(root) == root / f"step-{NEWEST}"
    assert _restore(root) == NEWEST
    assert ds.retain(root, keep=1) == [root / "step-2"]
    faults.place = None
    assert ds.latest(root) == root / f"step-{NEWEST}"
    assert decision_of(root / "step-1").exists(), "what cannot be judged stays"


def test_a_job_that_cannot_see_its_checkpoint_ends_and_deletes_nothing(root, faults):
    """With ``keep=1`` it started from scratch, and deleted the run's checkpoints at its first commit."""
    manager = ds.CheckpointManager(root, every=1, keep=1, no_dist=True)
    hidden = _metadata(root)
    faults.at(hidden, errno.ESTALE)
    with raises(ds.errors.StorageError, str(hidden), "Stale file handle"):
        manager.restore_latest(_state(0))
    manager.save(NEWEST + 1, _state(NEWEST + 1))
    manager.wait()
    faults.place = None
    assert decision_of(root / f"step-{NEWEST}").exists()


def test_a_file_in_the_way_is_nothing(root):
    (root / "file").touch()
    assert ds.latest(root / "file" / "run") is None
    with raises(ds.errors.CheckpointNotFoundError, "does not exist"):
        load_everything(root / "file" / "run")


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO])
def test_the_directory_lost_and_found_stops_nothing(number, root, faults):
    """A file system makes it at its root, and only the superuser may read it."""
    (root / "lost+found").mkdir()
    faults.at(root / "lost+found", number)
    assert ds.latest(root) == root / f"step-{NEWEST}"
    assert ds.inspect(root).latest == f"step-{NEWEST}"
    assert ds.retain(root, keep=2) == [root / "step-1"]


@pytest.mark.parametrize("place", ["step", "metadata", "attempt"])
def test_a_root_is_described_with_what_cannot_be_judged(place, root, faults):
    faults.at(PLACES[place](root), errno.EACCES)
    described = ds.inspect(root)
    assert described.latest is None, "as latest() raises"
    each = {entry.name: entry for entry in described.checkpoints}
    assert each[f"step-{NEWEST}"].unjudged
    assert "Permission denied" in str(described)
    if place != "attempt":
        assert "unknown" in str(described), "whether it is committed"
    assert [each[f"step-{step}"].unjudged for step in (1, 2)] == [False, False]


def test_a_save_is_newer_than_a_neighbour_that_cannot_be_judged(root, faults):
    """Its names can be listed, and its metadata cannot be read; its job had a clock in the future."""
    future = "1fffffffffffffff-00000001"
    (root / "step-2" / future).mkdir()
    faults.at(decision_of(root / "step-2"), errno.EACCES)
    ds.save(_state(4), root / "step-4")
    (attempt,) = (each.name for each in (root / "step-4").iterdir() if each.is_dir())
    assert attempt > future
