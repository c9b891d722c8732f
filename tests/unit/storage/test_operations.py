"""File operations where the file system lacks something."""

import errno
import os
from contextlib import nullcontext

import pytest

from dcp_datastates.errors import StorageError
from dcp_datastates.storage import operations


@pytest.mark.parametrize(
    ("number", "is_error"),
    [
        *((number, False) for number in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)),
        *((number, True) for number in (errno.EIO, errno.ENOSPC, errno.ESTALE)),
    ],
)
def test_a_sync_of_a_directory_may_be_lacking_which_is_said_once_but_not_fail(
    monkeypatch, tmp_path, caplog, number, is_error
):
    def refuse(descriptor):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuse)
    monkeypatch.setattr(operations, "_unsynced", set())
    for _ in range(2):
        with pytest.raises(OSError, match=os.strerror(number)) if is_error else nullcontext():
            operations.sync_directory(tmp_path, "test")
    said = [each.getMessage() for each in caplog.records]
    assert [str(tmp_path) in each and "fsync of a directory" in each for each in said] == (
        [] if is_error else [True]
    )


def test_where_proc_is_not_mounted_nothing_looks_as_if_it_were_gone(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setattr(operations, "_path_of", lambda descriptor: f"/nowhere/{descriptor}")
    with (
        pytest.raises(StorageError, match="/proc is not mounted"),
        operations.during("p", tmp_path),
    ):
        operations.unlink(tmp_path / "file")
    assert (tmp_path / "file").exists()
