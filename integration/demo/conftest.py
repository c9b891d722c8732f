"""Lets the tests of the demo import its modules."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
TESTS = HERE.parents[1] / "tests"  # support
sys.path += [str(TESTS), str(HERE)]  # at the end: other folders import their own conftest by name
