"""Lets the tests of the job descriptions import the support of all tests."""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = str(Path(__file__).parents[2] / "tests")  # support
sys.path.append(TESTS)  # at the end: other folders import their own conftest by name
