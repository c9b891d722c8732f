"""A path in a file system, or in a store."""

import pytest
from support.simulated.object_stores import MemoryStore, installed


@pytest.fixture(params=["directory", "store"])
def place(request, tmp_path, monkeypatch):
    """Where a test saves, for questions with the same answer in a directory and in a store."""
    return tmp_path if request.param == "directory" else installed(monkeypatch, MemoryStore())
