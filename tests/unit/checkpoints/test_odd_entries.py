"""Odd and hostile entries beside checkpoints, and in them: no operation hangs, takes memory, or stops the others."""

import itertools
import os
import shutil
import signal
import socket
import time
from pathlib import Path

import pytest
import torch
from support.state.checkpoints import async_save, causes, load_everything, raises, save
from support.state.files import data_files
from support.state.roots import make_root
from support.tiers import sampled

import dcp_datastates as ds
from dcp_datastates.checkpoints import listing
from dcp_datastates.storage import attempt
from dcp_datastates.storage.attempt import Attempt

SECONDS = 20
ATTEMPT = "18ea000000000000-00000001"
FAR = "ffffffffffffffff-00000001"


def _socket(path):
    here = os.open(".", os.O_RDONLY)
    os.chdir(path.parent)  # a socket's path must be short
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.fchdir(here)
        os.close(here)


def _terabyte(path):
    path.touch()
    os.truncate(path, 1 << 40)


THINGS = {
    "pipe": os.mkfifo,
    "socket": _socket,
    "endless": lambda path: path.symlink_to("/dev/zero"),
    "terabyte": _terabyte,
    "directory": Path.mkdir,
    "cycle": lambda path: path.symlink_to(path.name),
    "dangling": lambda path: path.symlink_to("nowhere"),
    "empty": Path.touch,
}


def _as_metadata(make, odd):
    odd.mkdir()
    make(odd / ".metadata")


def _as_metadata_of_ours(make, odd):
    (odd / ATTEMPT).mkdir(parents=True)
    make(odd / ".metadata")


def _as_data(make, odd):
    shutil.copytree(odd.with_name("step-9"), odd)
    file = data_files(odd)[0]
    file.unlink()
    make(file)


def _as_attempt(make, odd):
    shutil.copytree(odd.with_name("step-9"), odd)
    make(odd / ATTEMPT)


def _as_checkpoint(make, odd):
    make(odd)


def _far(odd):
    (odd / FAR).mkdir(parents=True)
    (odd / ".metadata").touch()


def _far_in_ours(odd):
    shutil.copytree(odd.with_name("step-9"), odd)
    (odd / FAR).mkdir()


def _linked_attempt(odd):
    """A newer attempt, by its name, whose files are another checkpoint's."""
    shutil.copytree(odd.with_name("step-9"), odd)
    files = data_files(odd.with_name("step-11"))[0].parent
    (odd / "18ff000000000000-00000001").symlink_to(files)


PLACES = (_as_metadata, _as_metadata_of_ours, _as_data, _as_attempt, _as_checkpoint)
ENTRIES = {
    f"{name}{place.__name__}": lambda odd, make=make, place=place: place(make, odd)
    for (name, make), place in itertools.product(THINGS.items(), PLACES)
}
ENTRIES |= {each.__name__[1:]: each for each in (_far, _far_in_ours, _linked_attempt)}

STATE = {"w": torch.ones(3), "step": 99}


def _save(path):
    async_save(STATE, path).result(SECONDS)


ON_ROOT = {
    "latest": lambda root: ds.latest(root),
    "latest in full": lambda root: ds.latest(root, verify="full"),
    "retain": lambda root: ds.retain(root, keep=1),
    "inspect": lambda root: ds.inspect(root),
    "save": lambda root: _save(root / "new"),
}
"""These must succeed."""
ON_ENTRY = {
    "inspect": lambda odd: ds.inspect(odd),
    "verify": lambda odd: ds.verify(odd),
    "load": lambda odd: load_everything(odd),
    "convert": lambda odd: ds.convert(odd, odd.with_name("converted.pt"), to="torch"),
    "delete": lambda odd: ds.delete(odd),
    "save": _save,
}
"""These succeed, or raise an error of this package."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return make_root(tmp_path_factory.mktemp("shared") / "root")


@pytest.fixture
def root(checkpoints, tmp_path):
    shutil.copytree(checkpoints, tmp_path / "root")
    listing._say_left_out.cache_clear()
    return tmp_path / "root"


@pytest.fixture(autouse=True)
def limit():
    """A call that hangs in this thread is an error."""

    def stop(*_):
        raise TimeoutError("it hangs")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def _assert_others_are_whole(root, names):
    for name in names:
        assert ds.verify(root / name).whole, name


ROOT_CASES = list(itertools.product(ENTRIES, ON_ROOT))
KEPT = ("pipe_as_metadata", "terabyte_as_metadata", "far", "cycle_as_checkpoint")


@pytest.mark.parametrize(
    ("entry", "operation"),
    sampled(ROOT_CASES, keep=[case for case in ROOT_CASES if case[0] in KEPT]),
)
def test_what_is_done_with_a_root_succeeds_beside(entry, operation, root):
    ENTRIES[entry](root / "odd")
    ON_ROOT[operation](root)
    _assert_others_are_whole(
        root, ("step-11",) if operation == "retain" else ("step-10", "step-11")
    )


ENTRY_CASES = list(itertools.product(ENTRIES, ON_ENTRY))


@pytest.mark.parametrize(
    ("entry", "operation"),
    sampled(
        ENTRY_CASES,
        keep=[
            case
            for case in ENTRY_CASES
            if case[0] in ("endless_as_metadata", "pipe_as_data", "far_in_ours")
        ],
    ),
)
def test_what_is_done_with_the_entry_ends(entry, operation, root):
    ENTRIES[entry](root / "odd")
    raised = None
    try:
        ON_ENTRY[operation](root / "odd")
    except BaseException as error:  # DCP's is one
        raised = causes(error)[0]
    assert raised is None or isinstance(raised, ds.errors.DataStatesError), repr(raised)
    _assert_others_are_whole(root, ("step-9", "step-10", "step-11"))


@pytest.mark.parametrize("thing", THINGS)
def test_a_load_of_tensors_alone_ends_too(thing, root):
    """The engine opens their files without a look at them before."""
    save({"w": torch.ones(1000)}, root / "odd")
    (file,) = data_files(root / "odd")
    file.unlink()
    THINGS[thing](file)
    with raises(ds.errors.DataStatesError, file.name):
        load_everything(root / "odd")


@pytest.mark.parametrize("thing", ["pipe", "socket", "endless", "terabyte"])
def test_what_is_left_out_is_said_once(thing, root, caplog):
    _as_metadata(THINGS[thing], root / "odd")
    for _ in range(3):
        assert ds.latest(root) == root / "step-11"
    lines = [line.getMessage() for line in caplog.records if "odd" in line.getMessage()]
    assert len(lines) == 1, lines


YEAR = 365 * 86_400 * 10**9


@pytest.mark.parametrize("years", [49, 51, 0xD << 60, 0xE << 60, 0xFFFFFFFFFFFFFFFF])
@pytest.mark.parametrize("where", ["downloaded", "step-11"])
def test_no_name_turns_the_order_of_checkpoints_around(years, where, root, monkeypatch, caplog):
    """Each save is one of a new process, which draws its number anew. What is 49 years ahead may be a clock's doing."""
    number = years if years > 100 else time.time_ns() + years * YEAR
    name = f"{number:016x}-00000001"
    (root / where / name).mkdir(parents=True)
    (root / where / ".metadata").touch()
    for step in (12, 13, 13, 11, 11):
        monkeypatch.setattr(attempt, "_incarnation", 0)
        _save(root / f"step-{step}")
        assert ds.latest(root) == root / f"step-{step}"
    deleted = {path.name for path in ds.retain(root, keep=1)}
    assert deleted == {f"step-{step}" for step in (9, 10, 12, 13)}
    assert load_everything(root / "step-11")["step"] == 99
    said = [line for line in caplog.messages if name in line and "50 years ahead" in line]
    assert len(said) == (years != 49)


@pytest.mark.parametrize("name", [b"two\nlines", b"\xff\xfe", b"\x1b[2J", "٣".encode()])
def test_any_name_will_do(name, root):
    odd = root / os.fsdecode(name)
    _save(odd)
    assert ds.latest(root) == odd
    assert ds.retain(root, keep=1) == [root / f"step-{number}" for number in (11, 10, 9)]
    assert load_everything(odd)["step"] == 99


def test_names_of_attempts_are_plain_digits():
    assert Attempt.parse("18ea000000000000-٠٠٠٠٠٠٠١") is None
    assert Attempt.parse(FAR) is None


def test_a_directory_that_cannot_be_read_keeps_none_from_saving_and_may_hold_the_newest(
    root, monkeypatch
):
    """As directories of other users; root may read all, so the refusal is made."""
    save(STATE, root / "odd")
    real_scandir, real_listdir = os.scandir, os.listdir

    def refusing(real):
        def call(path, *more, **named):
            if isinstance(path, (str, os.PathLike)) and Path(path).name == "odd":
                raise PermissionError(13, "Permission denied", str(path))
            return real(path, *more, **named)

        return call

    monkeypatch.setattr(os, "scandir", refusing(real_scandir))
    monkeypatch.setattr(os, "listdir", refusing(real_listdir))
    _save(root / "step-13")
    assert load_everything(root / "step-13")["step"] == 99
    for ask in (ds.latest, lambda where: ds.retain(where, keep=1)):
        with raises(ds.errors.StorageError, "odd"):
            ask(root)
