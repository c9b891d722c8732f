"""Which directory a path means: relative ones, home directories, symbolic links."""

import os
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.state.checkpoints import (
    CACHE,
    assert_same,
    async_save,
    causes,
    committed,
    load,
    load_everything,
    raises,
    save,
    writer,
)

import dcp_datastates
from dcp_datastates import DataStatesReader, DataStatesWriter
from dcp_datastates.errors import ConfigurationError, StorageError

STATE = {"w": torch.arange(1000.0)}


class _Late(DataStatesWriter):
    """DCP's thread tells the path after the caller has gone on."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, host_cache_size=CACHE, **kwargs)
        self.go_on = threading.Event()

    def reset(self, checkpoint_id=None):
        assert self.go_on.wait(60)
        super().reset(checkpoint_id)


@pytest.fixture
def two_places(tmp_path, monkeypatch):
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here", tmp_path / "there"


@pytest.mark.parametrize("how", ["dcp", "ours"])
def test_a_relative_path_is_below_the_working_directory_at_the_call(how, two_places):
    here, there = two_places
    by = _Late()
    if how == "dcp":
        future = async_save(STATE, None, by=by, checkpoint_id="rel/c")
    else:
        future = dcp_datastates.async_save(STATE, "rel/c", writer=by).upload_completion
    os.chdir(there)
    by.go_on.set()
    future.result(60)
    assert committed(here / "rel/c")
    assert os.listdir(there) == []
    os.chdir(here)
    assert_same(load_everything("rel/c"), STATE)


def test_a_relative_path_of_a_writer_is_below_the_working_directory_when_it_was_made(two_places):
    here, there = two_places
    by, reader = writer("c"), DataStatesReader("c")
    os.chdir(there)
    dcp.save(STATE, storage_writer=by)
    assert committed(here / "c")
    assert_same(load_everything("c", reader), STATE)
    dcp.save(STATE, storage_writer=by, checkpoint_id="d")
    assert committed(there / "d")


def test_a_bad_path_that_dcp_s_thread_tells_fails_the_save_and_not_the_next(two_places):
    here, _ = two_places
    by = writer()
    with raises(ConfigurationError, "s3:///key"):
        async_save(STATE, None, by=by, checkpoint_id="s3:///key").result(60)
    with raises(ConfigurationError, "s3:///key"):
        by.committed.result(60)
    async_save(STATE, None, by=by, checkpoint_id="c").result(60)
    assert committed(here / "c")


def test_a_relative_path_in_a_directory_that_is_gone_is_refused(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    writer(tmp_path / "c")
    with pytest.raises(OSError, match="absolute path"):
        writer("c")


# --- ~ ----------------------------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path, monkeypatch):
    (tmp_path / "home").mkdir()
    (tmp_path / "work").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "home"


def test_a_tilde_is_the_home_directory_wherever_a_path_is_given(home):
    save(STATE, "~/runs/1")
    dcp.save(STATE, storage_writer=writer(), checkpoint_id=Path("~/runs/2"))
    dcp_datastates.async_save(STATE, "~/runs/3", host_cache_size=CACHE).upload_completion.result(60)
    assert sorted(os.listdir(home / "runs")) == ["1", "2", "3"]
    assert_same(load(dict(STATE), "~/runs/1"), STATE)
    assert_same(load_everything(None, _reset_to("~/runs/2")), STATE)
    assert dcp_datastates.latest("~/runs") == home / "runs/3"
    assert dcp_datastates.verify("~/runs/3").whole
    dcp_datastates.retain("~/runs", keep=1)
    assert [committed(home / "runs" / name) for name in "123"] == [False, False, True]
    assert os.listdir(".") == [], "a directory named ~ is a trap: rm -rf ~"


def _reset_to(path):
    reader = DataStatesReader()
    reader.reset(path)
    return reader


def test_a_user_that_does_not_exist_is_refused_with_the_way_out(home):
    with raises(ConfigurationError, "~nobody-of-that-name", "./~nobody-of-that-name/c"):
        writer("~nobody-of-that-name/c")
    save(STATE, "./~nobody-of-that-name/c")
    assert_same(load_everything("./~nobody-of-that-name/c"), STATE)
    assert os.listdir(".") == ["~nobody-of-that-name"]


# --- symbolic links -----------------------------------------------------------------------------------


class _Repointing(DataStatesWriter):
    """Between the files and the publication, the path comes to mean another directory."""

    def finish(self, metadata, results):
        link = Path(self.link)
        link.unlink()
        link.symlink_to(self.target)
        super().finish(metadata, results)


@pytest.mark.parametrize("how", ["save", "async_save"])
@pytest.mark.parametrize("below", ["", "step-1"])
def test_all_of_a_save_goes_to_the_directory_that_the_path_meant_when_it_began(
    below, how, tmp_path
):
    link = tmp_path / "link"
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    link.symlink_to("first")
    by = _Repointing(link / below, host_cache_size=CACHE)
    by.link, by.target = link, "second"
    if how == "save":
        dcp.save(STATE, storage_writer=by)
    else:
        async_save(STATE, None, by=by).result(60)
    assert os.listdir(tmp_path / "second") == []
    assert_same(load_everything(tmp_path / "first" / below), STATE)
    save(STATE, link / below)
    assert_same(load_everything(tmp_path / "second" / below), STATE)


def test_a_link_to_a_directory_that_is_still_to_come_is_followed(tmp_path):
    (tmp_path / "link").symlink_to("to/come")
    save(STATE, tmp_path / "link")
    assert_same(load_everything(tmp_path / "to/come"), STATE)


def test_a_link_that_leads_nowhere_fails_the_save(tmp_path):
    (tmp_path / "link").symlink_to("link")
    with pytest.raises(Exception) as caught:
        save(STATE, tmp_path / "link" / "c")
    assert all(
        isinstance(cause, (StorageError, ConfigurationError)) for cause in causes(caught.value)
    )
