"""The file ``README`` of a checkpoint is there for people; no save and no deletion depends on it."""

import shlex

import pytest
import torch
from support.state.checkpoints import load_everything, save

from dcp_datastates import delete
from dcp_datastates.storage import local
from dcp_datastates_cli.main import main


@pytest.fixture
def path(tmp_path):
    save({"w": torch.arange(5.0)}, tmp_path / "ckpt")
    return tmp_path / "ckpt"


def test_each_command_that_it_names_runs(path, tmp_path):
    text = (path / "README").read_text()
    commands = [
        line.strip()
        for line in text.splitlines()
        if line.strip().startswith("dcp-datastates convert")
    ]
    assert len(commands) == 4
    for number, command in enumerate(commands):
        command = (
            command.split("(")[0]
            .replace("PATH", str(path))
            .replace("OUT", str(tmp_path / str(number)))
        )
        assert main(shlex.split(command)[1:]) == 0
        assert (tmp_path / str(number)).exists()


def test_what_the_program_put_there_stays(path):
    (path / "README").write_text("mine")
    save({"w": torch.zeros(5)}, path)
    assert load_everything(path)["w"].eq(0).all()
    delete(path)
    assert (path / "README").read_text() == "mine"


FIRST = (
    "This is a checkpoint of dcp_datastates, a storage backend for torch.distributed.checkpoint.\n"
)
"""Of all releases."""


@pytest.mark.parametrize(
    "change",
    [lambda text: text[:10], lambda text: text[:200], lambda _: FIRST + "Further lines.\n" * 1000],
    ids=["cut in its first line", "cut", "another release's"],
)
def test_one_that_was_written_in_part_or_by_another_release_goes_with_the_checkpoint(path, change):
    file = path / "README"
    file.write_text(change(file.read_text()))
    delete(path)
    assert not path.exists()


def test_an_empty_one_is_not_this_packages(path):
    (path / "README").write_text("")
    delete(path)
    assert (path / "README").exists()


def test_one_that_cannot_be_written_or_read_fails_nothing(tmp_path):
    """A directory of that name stands for all errors: tests may run as root, whom no permission stops."""
    (tmp_path / "ckpt" / "README").mkdir(parents=True)
    save({"w": torch.ones(5)}, tmp_path / "ckpt")
    delete(tmp_path / "ckpt")
    assert (tmp_path / "ckpt" / local.README_NAME).is_dir()
    assert list((tmp_path / "ckpt").iterdir()) == [tmp_path / "ckpt" / "README"]
