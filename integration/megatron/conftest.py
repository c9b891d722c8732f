"""Fixtures for the tests with the real Megatron-Core, which are skipped where it is not installed."""

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
sys.path += [TESTS, HERE]  # at the end: other folders import their own conftest by name


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not importlib.util.find_spec("megatron"):
        why = "megatron-core not installed: pip install '.[megatron]'"
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=why))


@pytest.fixture(scope="session", autouse=True)
def _server_with_libraries(request: pytest.FixtureRequest) -> None:
    """Ranks are forked from a server that has imported the libraries of all folders asked for, which takes seconds.

    Accelerate imports deepspeed where it is installed. What is not installed is left out.
    """
    folders = {item.path.parent for item in request.session.items}
    jobs = [path.stem for folder in folders for path in folder.glob("*_jobs.py")]
    if "huggingface_jobs" in jobs:
        jobs += ["deepspeed", "deepspeed.comm"]
    with pytest.MonkeyPatch.context() as patch:
        paths = [TESTS, *map(str, folders), os.environ.get("PYTHONPATH", "")]
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        patch.setenv("OMP_NUM_THREADS", "1")
        multiprocessing.get_context("forkserver").set_forkserver_preload(jobs)
        forkserver.ensure_running()
