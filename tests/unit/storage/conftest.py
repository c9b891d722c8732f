"""A checkpoint's place in an object store in memory."""

import pytest
from support.simulated.object_stores import installed


@pytest.fixture
def path(monkeypatch, store):
    return installed(monkeypatch, store)
