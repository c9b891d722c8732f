"""An object store in memory, and a checkpoint's place in it."""

from __future__ import annotations

import pytest
from support.simulated.object_stores import MemoryStore, installed


@pytest.fixture
def store():
    return MemoryStore()


@pytest.fixture
def path(monkeypatch, store):
    return installed(monkeypatch, store)
