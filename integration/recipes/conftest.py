"""The examples for libraries that `make` does not install; each test is skipped without its own.

Ray's processes alone take a minute or more of two cores.
"""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = str(Path(__file__).parents[2] / "tests")  # support
HERE = str(Path(__file__).parent)
sys.path += [TESTS, HERE]  # at the end: other folders import their own conftest by name
