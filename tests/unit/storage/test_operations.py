"""File operations where the file system lacks something."""

from __future__ import annotations

import errno
import os

import pytest

from dcp_datastates.storage import operations


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_directory_that_cannot_be_synced_is_no_error(monkeypatch, tmp_path, number):
    def refuse(descriptor):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuse)
    operations.sync_directory(tmp_path, "test")


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.ESTALE])
def test_a_sync_of_a_directory_that_fails_is_an_error(monkeypatch, tmp_path, number):
    def fail(descriptor):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match=os.strerror(number)):
        operations.sync_directory(tmp_path, "test")
