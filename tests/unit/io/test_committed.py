"""Ranges of a checkpoint's data files, and what is said if they cannot be read."""

import pytest

from dcp_datastates.errors import CheckpointNotFoundError, StorageError
from dcp_datastates.io.committed import range_reader


def test_a_range_of_a_file_has_its_bytes(tmp_path):
    file = tmp_path / "f"
    file.write_bytes(bytes(range(200)))
    read = range_reader([file])
    assert bytes(read(str(file), 5, 9)) == bytes([5, 6, 7, 8])
    assert bytes(read(str(file), 198, 300)) == bytes([198, 199])  # `fetch` refuses the rest


def test_a_missing_file_and_what_is_no_file_are_named(tmp_path):
    read = range_reader([tmp_path / "f", tmp_path])
    with pytest.raises(CheckpointNotFoundError, match=f"open {tmp_path}/f: No such file"):
        read(str(tmp_path / "f"), 0, 1)
    with pytest.raises(StorageError, match="it is a directory, not a file"):
        read(str(tmp_path), 0, 1)
