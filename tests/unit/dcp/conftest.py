"""A path in a file system, or in a store."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.simulated.object_stores import MemoryStore, installed

from dcp_datastates.storage.object_path import Location


@pytest.fixture(params=["directory", "store"])
def place(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Location:
    """Where a test saves, for questions with the same answer in a directory and in a store."""
    return tmp_path if request.param == "directory" else installed(monkeypatch, MemoryStore())
