"""The dashboard and the alerts, tried by Debian's ``prometheus`` package; each test is skipped without it."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "tests"))  # support
