"""The names of a checkpoint's files do not lead out of the folder to which they are written."""

from __future__ import annotations

import pytest
from support.state.checkpoints import raises

from dcp_datastates.errors import CheckpointCorruptError
from dcp_datastates.huggingface.files import read_files, write_files

GOOD = {"a.json": b"1", "below/b.bin": b"2", "..c": b"3"}


def test_files_are_written_as_they_were_read(tmp_path):
    write_files(tmp_path / "one", GOOD)
    assert read_files(tmp_path / "one") == GOOD


@pytest.mark.parametrize(
    "name",
    [
        *("../outside", "below/../../outside", "..", ".", "", "/outside", "//outside", "a/./b"),
        *("linked/outside", "link", "a\0b"),
    ],
)
def test_a_name_that_leads_out_is_refused_and_nothing_is_written(name, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "linked").symlink_to(tmp_path)
    (folder / "link").symlink_to(tmp_path / "outside")
    with raises(CheckpointCorruptError, repr(name)[1:-1]):
        write_files(folder, {**GOOD, name: b"x"})
    assert sorted(path.name for path in folder.iterdir()) == ["link", "linked"]
    assert not (tmp_path / "outside").exists()
