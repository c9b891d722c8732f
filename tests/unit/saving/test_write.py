"""A rank's files count only once storage shows them as they were written; a thread that cannot start is named."""

import os
from pathlib import Path

import pytest
import torch
from support.jobs.scripts import run_script
from support.state.checkpoints import load_everything, raises, save

import dcp_datastates as ds

STATE = {"w": torch.arange(5000.0), "step": 1}


@pytest.fixture
def shown_size(monkeypatch):
    """``shown_size(of)``: the data files have ``of(size)`` bytes from now on, whatever was written.

    As with some mounts of object stores, on which ``ftruncate`` succeeds and does nothing.
    """
    real = os.stat

    def lie(of):
        def stat(path, *more, **named):
            status = real(path, *more, **named)
            if isinstance(path, Path) and path.suffix == ".safetensors":
                fields = list(status)
                fields[6] = of(status.st_size)
                return os.stat_result(fields)
            return status

        monkeypatch.setattr(os, "stat", stat)

    yield lie
    monkeypatch.setattr(os, "stat", real)


@pytest.mark.parametrize(
    "of",
    [lambda size: -(-size // 4096) * 4096, lambda size: size - 1, lambda size: 0],
    ids=["padded for direct writes", "short", "empty"],
)
def test_a_file_of_another_size_fails_the_save_by_name(of, shown_size, tmp_path):
    save({**STATE, "step": 0}, tmp_path / "run")
    shown_size(of)
    with raises(
        ds.errors.StorageError, ".safetensors", "bytes were written", "mount of an object store"
    ):
        ds.save(STATE, tmp_path / "run")
    shown_size(lambda size: size)
    assert load_everything(tmp_path / "run")["step"] == 0, "the old checkpoint stands"
    ds.save(STATE, tmp_path / "run")
    assert load_everything(tmp_path / "run")["step"] == 1


WITHOUT_A_THREAD = """
    import threading
    import dcp_datastates as ds

    start = threading.Thread.start

    def refuse(thread):
        if thread.name == "dcp_datastates-{name}":
            raise RuntimeError("can't start new thread")
        start(thread)

    threading.Thread.start = refuse
    try:
        ds.save({{"w": torch.ones(3)}}, path)
    except ds.errors.DataStatesError as error:
        print("refused:", error)
"""


@pytest.mark.parametrize("name", ["planning", "reading", "commit"])
def test_a_save_without_a_thread_names_the_limit(name, tmp_path):
    ended = run_script(WITHOUT_A_THREAD.format(name=name), tmp_path / "run")
    line = next(line for line in ended.stdout.splitlines() if line.startswith("refused:"))
    assert "can't start new thread" in line
    assert "ulimit -u" in line
    assert "is ending" not in line
