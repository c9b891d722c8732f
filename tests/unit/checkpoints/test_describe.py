"""``inspect`` says what is in a checkpoint, and what lies in a directory of them."""

import dataclasses
import json
import os
import shutil

import pytest
import torch
from support.commands import run_cli
from support.state.checkpoints import Malice, raises, save
from support.state.chunks import boxes, save_by_ranks
from support.state.files import data_files, flip_bit
from support.state.metadata import decision_of
from support.state.roots import NEWER, save_stock, uncommitted
from support.state.states import Opinion, filled

from dcp_datastates import inspect
from dcp_datastates.checkpoints.describe import Checkpoint, DtypeTotal, Object, Tensor
from dcp_datastates.checkpoints.overview import Directory
from dcp_datastates.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    ForeignCheckpointError,
)
from dcp_datastates.storage import decisions
from dcp_datastates.storage.attempt import Attempt
from dcp_datastates.storage.local_store import LocalStore
from dcp_datastates.storage.object_path import stored
from dcp_datastates.text import columns


@pytest.fixture
def checkpoint(tmp_path):
    path = tmp_path / "step-7"
    state = {
        "w": filled((300, 40), torch.float32),
        "b[0]": filled((40,), torch.float32),
        "half": filled((), torch.bfloat16),
        "empty": torch.empty(0, 3, dtype=torch.int8),
        "opinion": Opinion("x"),
    }
    save(state, path)
    return path


def test_a_checkpoint_is_described(checkpoint):
    found = inspect(checkpoint)
    assert isinstance(found, Checkpoint)
    (file,) = data_files(checkpoint)
    metadata = decision_of(checkpoint)
    assert found.committed
    assert found.attempt == file.parent.name
    assert found.committed_at is not None
    assert abs(metadata.stat().st_mtime - found.committed_at) < 60  # the coarse clock of files
    assert found.nbytes == file.stat().st_size + metadata.stat().st_size
    assert found.ranks == 1
    assert [(f.path, f.rank, f.nbytes, f.found_nbytes) for f in found.files] == [
        (f"{file.parent.name}/{file.name}", 0, file.stat().st_size, file.stat().st_size)
    ]
    assert found.tensors == (
        Tensor("b[0]", (40,), "float32", 160, 1),
        Tensor("empty", (0, 3), "int8", 0, 1),
        Tensor("half", (), "bfloat16", 2, 1),
        Tensor("w", (300, 40), "float32", 48_000, 1),
    )
    assert found.dtypes == (
        DtypeTotal("float32", 2, 48_160),
        DtypeTotal("bfloat16", 1, 2),
        DtypeTotal("int8", 1, 0),
    )
    (element,) = found.objects
    assert isinstance(element, Object)
    assert element.name == "opinion"
    assert element.nbytes > 0
    assert found.uncommitted == ()


def test_ranks_and_chunks_are_counted(tmp_path):
    dense = filled((6, 10), torch.float32)
    rows = boxes(dense.shape, [[1, 2, 3], []])
    save_by_ranks(tmp_path, [{"x": (dense, rows[:2])}, {"x": (dense, rows[2:])}])
    found = inspect(tmp_path)
    assert found.ranks == 2
    assert len(found.files) == 4
    assert sorted(file.rank for file in found.files) == [0, 0, 1, 1]
    assert found.tensors == (Tensor("x", (6, 10), "float32", 240, 4),)


def test_attempts_that_are_not_the_checkpoint_say_what_is_decided_about_them(checkpoint):
    uncommitted(checkpoint)
    (found,) = inspect(checkpoint).uncommitted
    assert (found.attempt, found.state, found.files, found.nbytes) == (NEWER, "undecided", 1, 100)
    decisions.withdraw(stored(checkpoint), Attempt.parse(NEWER))
    assert inspect(checkpoint).uncommitted[0].state == "withdrawn"


def test_an_uncommitted_checkpoint_is_described_by_its_attempts(tmp_path):
    uncommitted(tmp_path / "step-1", size=55)
    found = inspect(tmp_path / "step-1")
    assert not found.committed
    assert found.attempt is None
    assert [(a.attempt, a.nbytes) for a in found.uncommitted] == [(NEWER, 55)]


def test_files_that_are_missing_or_cut_show(checkpoint):
    (file,) = data_files(checkpoint)
    os.truncate(file, 1000)
    assert inspect(checkpoint).files[0].found_nbytes == 1000
    file.unlink()
    assert inspect(checkpoint).files[0].found_nbytes is None


def test_large_metadata_of_another_program_are_not_read_whole(tmp_path, monkeypatch):
    """As those of stock DCP are at thousands of ranks. Every look at the directory above would read them."""
    save_stock(tmp_path / "stock")
    with open(tmp_path / "stock" / ".metadata", "r+b") as file:
        file.truncate(1 << 30)  # a sparse file
        file.seek(-1, os.SEEK_END)
        file.write(b".")  # as pickles end
    monkeypatch.setattr(LocalStore, "get", pytest.fail)
    with raises(ForeignCheckpointError, "stock"):
        inspect(tmp_path / "stock")


def test_nothing_and_damage_and_stock_are_errors(tmp_path, checkpoint):
    for path in (tmp_path / "nowhere", tmp_path / "empty", tmp_path / "file"):
        if path.name == "empty":
            path.mkdir()
        if path.name == "file":
            path.write_text("")
        with raises(CheckpointNotFoundError, path.name):
            inspect(path)
    save_stock(tmp_path / "stock")
    with raises(ForeignCheckpointError, "stock"):
        inspect(tmp_path / "stock")
    flip_bit(decision_of(checkpoint), 40)
    with raises(CheckpointCorruptError, "decision"):
        inspect(checkpoint)


@pytest.fixture
def root(tmp_path):
    root = tmp_path / "ckpt"
    for name in ("step-9", "step-10", "best", "step-11"):
        save({"w": torch.ones(100)}, root / name)
    data_files(root / "step-11")[0].unlink()
    uncommitted(root / "step-12")
    save_stock(root / "stock-3")
    (root / "logs").mkdir()
    return root


def test_a_directory_of_checkpoints_is_listed_as_latest_sees_it(root):
    found = inspect(root)
    assert isinstance(found, Directory)
    assert found.latest == "best"
    assert [(c.name, c.step, c.format, c.committed) for c in found.checkpoints] == [
        ("step-11", 11, "dcp_datastates", True),
        ("best", None, "dcp_datastates", True),
        ("step-10", 10, "dcp_datastates", True),
        ("step-9", 9, "dcp_datastates", True),
        ("step-12", 12, "dcp_datastates", False),
        ("stock-3", 3, "other", True),
    ]
    problems = {c.name: c.problem for c in found.checkpoints}
    assert "missing" in problems["step-11"]
    assert problems["step-10"] is None
    assert "abandoned" in problems["step-12"]
    assert "stock" in problems["stock-3"]


def test_a_listed_checkpoint_has_size_ranks_and_time(root):
    listed = {c.name: c for c in inspect(root).checkpoints}["step-10"]
    alone = inspect(root / "step-10")
    for name in ("nbytes", "ranks", "committed_at", "attempt"):
        assert getattr(listed, name) == getattr(alone, name)


# --- the command -------------------------------------------------------------------------------------

CHECKPOINT_FIELDS = (
    "kind path committed attempt committed_at nbytes ranks files dtypes tensors objects tensor_count object_count "
    "uncommitted metrics pins"
)


def test_json_of_a_checkpoint(checkpoint):
    document = json.loads(run_cli("inspect", "--json", checkpoint).stdout)
    assert set(document) == set(CHECKPOINT_FIELDS.split())
    assert document["kind"] == "checkpoint"
    assert (document["tensor_count"], document["object_count"]) == (4, 1)
    assert document["tensors"] is None
    document = json.loads(run_cli("inspect", "--json", "--tensors", checkpoint).stdout)
    assert document["tensors"][-1] == {
        "name": "w",
        "shape": [300, 40],
        "dtype": "float32",
        "nbytes": 48_000,
        "chunks": 1,
    }
    assert set(document["files"][0]) == {"path", "rank", "nbytes", "found_nbytes", "nodes"}
    assert set(document["dtypes"][0]) == {"dtype", "tensors", "nbytes"}


def test_json_of_a_directory(root):
    document = json.loads(run_cli("inspect", "--json", root).stdout)
    more = "failure failure_is_past free_nbytes free_saves next_commit"
    assert set(document) == {"kind", "path", "latest", "checkpoints", *more.split()}
    assert document["latest"] == "best"
    fields = (
        "name step format committed attempt nbytes ranks committed_at problem unjudged metrics pins "
        "in_flight written_at"
    )
    assert set(document["checkpoints"][0]) == set(fields.split())


def test_nothing_in_a_checkpoint_is_unpickled_but_its_metadata(tmp_path):
    victim = tmp_path / "victim"
    save({"malice": Malice(victim)}, tmp_path / "step-1")
    shutil.rmtree(victim, ignore_errors=True)  # a save may copy an object
    ended = run_cli("inspect", "--tensors", tmp_path / "step-1")
    assert ended.returncode == 0
    assert "malice" in ended.stdout
    assert "malice" not in run_cli("inspect", tmp_path / "step-1").stdout, "without --tensors"
    assert run_cli("verify", tmp_path / "step-1").returncode == 0
    assert not victim.exists()


# --- in Python ------------------------------------------------------------------------------------------


def test_inspect_returns_the_same_and_reads_well(checkpoint):
    found = inspect(checkpoint)
    assert found == inspect(checkpoint)
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.nbytes = 0
    lines = str(found).splitlines()
    assert lines[0] == str(checkpoint)
    assert lines[1].startswith("  committed 20")
    assert "in 1 file of 1 rank: 4 tensors, 1 object" in lines[2]
    (row,) = (line for line in lines if line.startswith("  w "))
    assert row.split() == ["w", "300", "×", "40", "float32", "46.88", "KiB", "1"]
    assert any(line.startswith("  half ") and "scalar" in line for line in lines)
    assert any(line.startswith("  b[0] ") for line in lines)
    assert any(line.startswith("  opinion ") and "object" in line for line in lines)


def test_the_text_says_what_is_wrong_and_stays_short(tmp_path):
    path = tmp_path / "c"
    save({f"t{n}": torch.ones(3) for n in range(100)}, path)
    (file,) = data_files(path)
    uncommitted(path)
    file.write_bytes(file.read_bytes()[:-1])
    text = str(inspect(path))
    assert f"attempt {NEWER} is undecided: 1 file, 100 B" in text
    size = file.stat().st_size
    assert f"has {size} bytes instead of {size + 1}" in text
    assert text.splitlines()[-1] == "  … and 84 more"
    file.unlink()
    (row,) = (line for line in str(inspect(path)).splitlines() if file.name in line)
    assert row.endswith("missing")
    decision_of(path).unlink()
    assert "not committed" in str(inspect(path))


def test_a_directory_of_checkpoints_reads_well(tmp_path):
    for number in (1, 2):
        save({"w": torch.ones(3)}, tmp_path / f"step-{number}")
    uncommitted(tmp_path / "step-3")
    found = inspect(tmp_path)
    assert found == dataclasses.replace(inspect(tmp_path), free_nbytes=found.free_nbytes)
    first, headers, second, third, last = str(found).splitlines()
    assert first == str(tmp_path)
    assert headers.split()[:2] == ["checkpoint", "step"]
    assert second.startswith("  step-2")
    assert second.endswith("latest")
    assert third.startswith("  step-1")
    assert "not committed: in flight or abandoned" in last


def test_names_cannot_break_a_row():
    lines = columns(("name", "size>"), [("a\nb\x1b", 10), (None, 200), ("c", 3)], most=2)
    assert lines == [
        "  name       size",
        "  a\\nb\\x1b     10",
        "              200",
        "  … and 1 more",
    ]
