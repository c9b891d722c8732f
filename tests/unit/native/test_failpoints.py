"""The native engine fails where it is told to, and what it does to files is on record."""

from __future__ import annotations

import json
import os
import signal
from itertools import groupby
from pathlib import Path

import pytest
import torch
from support.crashes.failing import armed, fired
from support.jobs.scripts import run_script
from support.state.checkpoints import assert_same, load_everything, raises, save

from dcp_datastates import StorageError

SAVE = """
state = {"w": torch.full((1_000_000,), 4.0), "more": torch.zeros(4_000_000)}
dcp.save(state, storage_writer=writer(), no_dist=True)
"""


def _state(number):
    return {"w": torch.full((1_000_000,), float(number)), "more": torch.zeros(4_000_000)}


@pytest.fixture
def log(tmp_path, monkeypatch):
    path = tmp_path / "log"
    monkeypatch.setenv("DCP_DATASTATES_FAILPOINTS_LOG", str(path))
    return path


def test_a_kill_comes_at_the_hit_that_was_asked_for(tmp_path, monkeypatch, log):
    monkeypatch.setenv("DCP_DATASTATES_FAILPOINTS", "flush.write.after@2=kill")
    monkeypatch.setenv("DCP_DATASTATES_TRACE", str(tmp_path / "trace"))
    ended = run_script(SAVE, tmp_path / "c")
    assert ended.returncode == -signal.SIGKILL, ended
    assert log.read_text() == "flush.write.after\n"
    writes = [line for line in _trace(tmp_path) if line["op"] == "write" and _is_data(line)]
    assert 2 <= len(writes) < 4, "of its three segments, others may have been under way"
    assert not (tmp_path / "c" / ".metadata").exists()


@pytest.mark.parametrize("name", ["restore.open.before", "restore.read.after"])
def test_an_error_fails_the_restore_alone(name, tmp_path):
    save(_state(3), tmp_path / "c")
    with armed(f"{name}@1=error:EIO", natively=True, log=tmp_path / "log"):
        with raises(StorageError, "Input/output error"):
            load_everything(tmp_path / "c")
        assert_same(load_everything(tmp_path / "c"), _state(3))
    assert fired(tmp_path / "log") == [name]


def _trace(tmp_path: Path) -> list[dict[str, object]]:
    text = (tmp_path / "trace").read_bytes()
    text = text[: text.rfind(b"\n") + 1]  # a kill may cut another thread's line short
    lines = list(map(os.fsdecode, text.splitlines()))
    for line in lines:  # as the Python side writes them, to the last space
        assert json.dumps(json.loads(line), ensure_ascii=False) == line
    return [json.loads(line) for line in lines]


def _is_data(line: dict[str, object]) -> bool:
    return str(line["path"]).endswith(".safetensors")


def test_the_trace_of_a_save_is_enough_to_make_its_file(tmp_path, monkeypatch):
    monkeypatch.setenv("DCP_DATASTATES_TRACE", str(tmp_path / "trace"))
    folder = tmp_path / os.fsdecode(b'odd "\\\xc3\xa9\n\xe2\x80\xa8')
    run_script(SAVE + "assert number_at() == 4", folder).assert_clean()
    trace = _trace(tmp_path)
    data = [line for line in trace if _is_data(line)]
    (path,) = {str(line["path"]) for line in data}
    assert [op for op, _ in groupby(line["op"] for line in data)] == [
        *("create", "allocate", "write", "truncate", "sync_begin", "sync")
    ]
    content = bytearray()
    for line in data:
        if line["op"] in ("allocate", "truncate"):
            size = int(str(line["size"]))
            content = content[:size].ljust(size, b"\0")
        elif line["op"] == "write":
            written = bytes.fromhex(str(line["data"]))
            offset = int(str(line["offset"]))
            content[offset : offset + len(written)] = written
    assert content == Path(path).read_bytes()
    assert data[-1]["id"] == data[-2]["id"]

    after = trace[trace.index(data[-1]) + 1 :]
    synced = [line["path"] for line in after if line["op"] == "sync"]
    attempt = str(Path(path).parent)
    assert synced[0] == attempt, "the directory of the file, then those above it"
    assert str(folder) in synced
    assert synced.index(str(folder)) < [line["op"] for line in after].index("rename")
    ids = [line["id"] for line in trace if line["op"] == "sync"]
    assert len(set(ids)) == len(ids)
