"""``dcp-datastates verify``: of one checkpoint, and of all in a directory."""

import dataclasses
import json
import os

import pytest
import torch
from support.commands import run_cli, run_python
from support.state.checkpoints import save
from support.state.files import data_files, flip_bit, read_file
from support.state.metadata import decision_of
from support.state.roots import save_stock
from support.state.states import filled

from dcp_datastates import verify

MIB = 1 << 20


@pytest.fixture
def checkpoint(tmp_path):
    path = tmp_path / "checkpoint"
    save(
        {"a": filled((700_000,), torch.float32, 1), "c": filled((3_000_001,), torch.uint8, 3)}, path
    )
    return path


def test_the_command_names_all_damage_with_status_1(checkpoint):
    (path,) = data_files(checkpoint)
    begin, _ = read_file(path).span("c")
    flip_bit(path, begin + 2 * MIB)
    flip_bit(path, path.stat().st_size - 1)
    ended = run_cli("verify", "--quiet", checkpoint)
    assert ended.returncode == 1
    lines = ended.stdout.splitlines()
    assert len(lines) == 2, "no line is wrapped, none is about anything else"
    assert lines[0].startswith(f"{path} at byte ")
    assert "'c'" in lines[0]
    assert "table" in lines[1]


def test_json_is_the_report(checkpoint):
    (path,) = data_files(checkpoint)
    flip_bit(path, 2 * MIB)
    ended = run_cli("verify", "--json", "--threads", "2", checkpoint)
    assert ended.returncode == 1
    document = json.loads(ended.stdout)
    report = verify(checkpoint)
    expected = {field.name for field in dataclasses.fields(report)} | {"kind", "whole"}
    assert set(document) == expected
    assert (document["kind"], document["whole"]) == ("checkpoint", False)
    assert document["path"] == str(checkpoint)
    (damage,) = document["damages"]
    assert damage == {
        **dataclasses.asdict(report.damages[0]),
        "tensors": list(report.damages[0].tensors),
    }


@pytest.fixture
def root(tmp_path):
    """Two checkpoints and a link to one of them; and what is none of ours, or none at all."""
    for step in (9, 10):
        save({"w": torch.full((1000,), float(step))}, tmp_path / f"step-{step}")
    (tmp_path / "current").symlink_to("step-10")
    save_stock(tmp_path / "z")
    (tmp_path / "step-11" / "ffffffffffffffff-00000001").mkdir(parents=True)
    (tmp_path / "logs").mkdir()
    return tmp_path


def test_the_command_checks_all_checkpoints_in_a_directory(root):
    ended = run_cli("verify", root)
    assert ended.returncode == 0, ended.stderr
    first, _, second, _, summary = ended.stdout.splitlines()
    assert first == f"{root / 'step-9'}: whole"
    assert second == f"{root / 'step-10'}: whole"
    assert summary == f"3 checkpoints in {root}: 2 whole, 0 damaged, 1 not checked"
    assert "not checked" in ended.stderr
    assert "stock" in ended.stderr


def test_the_command_checks_them_all_although_the_first_is_damaged(root):
    flip_bit(data_files(root / "step-9")[0], 0)
    flip_bit(decision_of(root / "step-10"), 50)
    ended = run_cli("verify", "--quiet", root)
    assert ended.returncode == 1
    nine, ten = ended.stdout.splitlines()
    assert nine.startswith(f"{data_files(root / 'step-9')[0]} at byte 0 ")
    assert ten.startswith(f"{root / 'step-10' / '.metadata'}: ")


def test_a_checkpoint_with_others_below_it_is_checked_as_well(root):
    save({"w": torch.ones(1000)}, root)
    flip_bit(data_files(root)[0], 0)
    ended = run_cli("verify", root)
    assert ended.returncode == 1
    assert f"{root}: damaged in 1 place\n" in ended.stdout
    assert "2 whole, 1 damaged" in ended.stdout


def test_one_that_cannot_be_read_is_status_2_and_the_others_are_checked(root):
    metadata = decision_of(root / "step-9")
    metadata.unlink()
    metadata.mkdir()
    ended = run_cli("verify", root)
    assert ended.returncode == 2
    assert f"{root / 'step-10'}: whole\n" in ended.stdout
    assert "step-9" in ended.stderr
    assert "not checked" in ended.stderr


def test_a_directory_with_nothing_to_check_is_status_2(root):
    for name in ("step-9", "step-10"):
        decision_of(root / name).unlink()
    ended = run_cli("verify", root)
    assert ended.returncode == 2
    assert "0 whole, 0 damaged, 1 not checked" in ended.stdout


def test_json_of_a_directory_has_all_reports(root):
    flip_bit(data_files(root / "step-9")[0], 0)
    ended = run_cli("verify", "--json", root)
    assert ended.returncode == 1
    document = json.loads(ended.stdout)
    said = document["kind"], document["path"], document["whole"]
    assert said == ("directory", str(root), False)
    nine, ten = document["checkpoints"]
    assert (nine["path"], nine["whole"]) == (str(root / "step-9"), False)
    alone = json.loads(run_cli("verify", "--json", root / "step-10").stdout)
    assert {**alone, "seconds": 0} == {**ten, "seconds": 0}
    (unchecked,) = document["unchecked"]
    assert unchecked["path"] == str(root / "z")
    assert "stock" in unchecked["problem"]


def test_trouble_is_status_2_one_line_and_no_traceback(checkpoint, tmp_path):
    save_stock(tmp_path / "stock")
    for arguments, word in [
        (("verify", tmp_path / "nowhere"), "does not exist"),
        (("verify", tmp_path / "stock"), "stock"),
        (("retain", tmp_path / "stock" / ".metadata", "--keep", "1"), "is no directory"),
        (("verify", "s3:///step-1"), "bucket"),
        (("verify", checkpoint, "--threads", "0"), "threads"),
        (("verify",), "PATH"),
        ((), "COMMAND"),
    ]:
        ended = run_cli(*arguments)
        assert ended.returncode == 2, (arguments, ended)
        assert ended.stdout == ""
        assert word in ended.stderr
        assert "Traceback" not in ended.stderr


def test_a_reader_that_goes_away_changes_nothing(checkpoint):
    read, write = os.pipe()
    os.close(read)
    try:
        ended = run_python("-m", "dcp_datastates", "verify", str(checkpoint), stdout=write)
    finally:
        os.close(write)
    assert (ended.returncode, ended.stderr) == (0, "")
