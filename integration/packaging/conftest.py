"""The distributions in ``dist/``, as ``make dist`` leaves them there."""

from __future__ import annotations

from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


def _only(pattern: str) -> Path:
    found = list((REPOSITORY / "dist").glob(pattern))
    assert len(found) == 1, f"dist/ holds {len(found)} of {pattern}, not one: `make dist` builds it"
    return found[0]


@pytest.fixture(scope="session")
def repository() -> Path:
    return REPOSITORY


@pytest.fixture(scope="session")
def wheel() -> Path:
    return _only("*.whl")


@pytest.fixture(scope="session")
def sdist() -> Path:
    return _only("*.tar.gz")
