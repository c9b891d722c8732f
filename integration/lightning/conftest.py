"""Fixtures for the tests with the real Lightning, which are skipped where it is not installed."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import sys
from multiprocessing import forkserver
from pathlib import Path

import pytest

TESTS = str(Path(__file__).parents[2] / "tests")  # support
HERE = str(Path(__file__).parent)
sys.path[:0] = [TESTS, HERE]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("lightning") is None:
        why = "lightning not installed: pip install 'dcp_datastates[lightning]'"
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=why))


@pytest.fixture(scope="session", autouse=True)
def _server_with_lightning() -> None:
    """Ranks are forked from a server that has imported Lightning, which takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        paths = [TESTS, HERE, os.environ.get("PYTHONPATH", "")]
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        patch.setenv("OMP_NUM_THREADS", "1")
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["lightning_jobs"])
        forkserver.ensure_running()
