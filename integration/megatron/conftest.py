"""Fixtures for the tests with the real Megatron-Core, which are left out where it is not installed."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
TESTS = HERE.parents[1] / "tests"  # support
sys.path += [str(TESTS), str(HERE)]  # at the end: other folders import their own conftest by name

from support.jobs.libraries import missing, server_with_libraries  # noqa: E402, F401

_MISSING = missing(["megatron"], "megatron")
collect_ignore_glob = ["test_*.py"] if _MISSING else []


def pytest_report_header() -> str | None:
    """Say why there are no tests."""
    return _MISSING or None
