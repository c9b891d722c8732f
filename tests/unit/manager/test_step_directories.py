"""The newest checkpoint among directories that a framework numbers, of this package and of the framework's own."""

from pathlib import Path

import pytest
import torch

import dcp_datastates as ds
from dcp_datastates.manager.step_directories import newest_numbered, number_of


def is_stock(path):
    return (path / "stock").exists()


def newest(folder):
    found = newest_numbered(folder, "run-", is_stock)
    return None if found is None else found.name


def save(*paths):
    for path in paths:
        ds.save({"a": torch.arange(8)}, path)


@pytest.mark.parametrize(
    ("name", "number"),
    [("run-0", 0), ("run-12", 12), ("run-", -1), ("run-1b", -1), ("other-1", -1), ("run--1", -1)],
)
def test_the_number_in_a_name(name, number):
    assert number_of(Path("/root", name), "run-") == number


def test_the_newest_of_ours_counts_or_a_higher_number_of_the_frameworks(tmp_path):
    assert newest(tmp_path) is None
    save(tmp_path / "run-12", tmp_path / "run-9", tmp_path / "best")
    assert newest(tmp_path) == "run-9"  # saved later; and "best" is no run
    for name in ("run-8", "best-30"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "stock").touch()
    assert newest(tmp_path) == "run-9"
    (tmp_path / "run-40").mkdir()
    assert newest(tmp_path) == "run-9"
    for name in ("run-40", "run-10"):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "stock").touch()
    assert newest(tmp_path) == "run-40"


def test_one_of_ours_that_is_damaged_does_not_count(tmp_path):
    save(tmp_path / "run-1", tmp_path / "run-2")
    (data,) = (tmp_path / "run-2").glob("*/*.safetensors")
    data.write_bytes(data.read_bytes()[:-1])
    assert newest(tmp_path) == "run-1"


def test_what_could_not_be_loaded_does_not_count(tmp_path):
    save(tmp_path / "run-1", tmp_path / "run-2")
    (tmp_path / "run-3").mkdir()
    (tmp_path / "run-3" / "stock").touch()
    for left_out, found in ((["run-3"], "run-2"), (["run-2", "run-3"], "run-1")):
        newest = newest_numbered(tmp_path, "run-", is_stock, leave_out=left_out)
        assert newest is not None
        assert newest.name == found
