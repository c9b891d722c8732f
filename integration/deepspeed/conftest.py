"""Fixtures for the tests with the real DeepSpeed, which are skipped where it is not installed."""

from __future__ import annotations

import importlib.util
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
os.environ["DS_ACCELERATOR"] = "cpu"
os.environ["DS_BUILD_OPS"] = "0"

_MISSING = importlib.util.find_spec("deepspeed") is None
collect_ignore_glob = ["test_*.py"] if _MISSING else []


def pytest_report_header() -> str | None:
    """Say why there are no tests."""
    if _MISSING:
        return "deepspeed is not installed: pip install '.[deepspeed]'"
    return None


@dataclass(frozen=True)
class Trained:
    """A job of two ranks that has trained each ZeRO stage twice: with DeepSpeed's own checkpoints and with this
    package's.
    """

    root: Path
    """Has ``stock/STAGE`` and ``ours/STAGE``, the directories given to ``save_checkpoint``."""
    ranks: list[Any]
    """The result of each rank."""

    def of(self, stage: int, name: str) -> list[Any]:
        """Each rank's result ``name`` for ``stage``."""
        return [rank[str(stage)][name] for rank in self.ranks]


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """See :class:`Trained`."""
    from deepspeed_jobs import run

    root = tmp_path_factory.mktemp("trained")
    return Trained(root, run("trains", root))
