"""A job saves to the file system on which its checkpoints lie, or not at all."""

import errno
import os
import shutil

import pytest
import torch
from support.state.checkpoints import load_everything, raises, save

import dcp_datastates as ds
from dcp_datastates.process.futures import finish_callbacks
from dcp_datastates.storage import claims

STATE = {"w": torch.ones(10)}


@pytest.fixture
def mounted(monkeypatch):
    """``mounted(number)``: the numbers of file systems are this from now on."""
    number = [1]
    monkeypatch.setattr(claims, "_device_of", lambda path: number[0])

    def mount(device):
        number[0] = device

    return mount


@pytest.mark.parametrize("rest", ["the mount point", "nothing", "an older job's"])
def test_a_save_after_a_lost_mount_is_refused_by_name(rest, mounted, tmp_path):
    root = tmp_path / "mount" / "run"
    save(STATE, root / "step-1")
    (tmp_path / "mount").rename(tmp_path / "lost")
    mounted(2)
    if rest != "nothing":
        root.mkdir(parents=True)
    if rest == "an older job's":
        (root / "step-0").mkdir()
    with raises(ds.errors.StorageError, str(root), "mounted", "step-1", "mount it again"):
        save(STATE, root / "step-2")
    assert finish_callbacks(10)
    left = {path.name for path in root.iterdir()} if rest != "nothing" else set()
    assert left <= {"step-0"}, "nothing lands below the mount point, no note of the failure either"
    shutil.rmtree(tmp_path / "mount", ignore_errors=True)
    (tmp_path / "lost").rename(tmp_path / "mount")
    mounted(1)
    save(STATE, root / "step-2")
    assert ds.latest(root) == root / "step-2"


def test_a_save_that_made_nothing_binds_later_ones_to_no_file_system(
    mounted, tmp_path, monkeypatch
):
    """The administrator mounts the root anew after the first save has failed."""
    with monkeypatch.context() as patched:

        def fail(path, *more, **_):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

        patched.setattr(os, "mkdir", fail)
        with raises(ds.errors.StorageError, "Input/output error"):
            save(STATE, tmp_path / "step-1")
    mounted(2)
    save(STATE, tmp_path / "step-2")
    assert ds.latest(tmp_path) == tmp_path / "step-2"


def test_what_was_mounted_again_under_another_number_goes_on(mounted, tmp_path):
    """As by an automounter, between two saves."""
    for step, device in enumerate((1, 2, 2, 3)):
        mounted(device)
        save(STATE, tmp_path / "run" / f"step-{step}")
    assert ds.latest(tmp_path / "run") == tmp_path / "run" / "step-3"


def test_a_root_that_was_deleted_is_made_again(tmp_path):
    save(STATE, tmp_path / "run" / "step-1")
    shutil.rmtree(tmp_path / "run")
    save(STATE, tmp_path / "run" / "step-2")
    assert load_everything(tmp_path / "run" / "step-2")["w"].eq(1).all()


def test_the_error_has_its_number(mounted, tmp_path):
    neighbours = claims.Neighbours()
    neighbours.note_saved("step-1", neighbours.check_mounted(tmp_path / "run"))
    mounted(2)
    with pytest.raises(ds.errors.StorageError) as caught:
        neighbours.check_mounted(tmp_path / "run")
    assert caught.value.errno == errno.ENODEV
