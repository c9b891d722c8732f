"""Tests with frameworks: left out where these are missing, and fast where each rank needs them."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
from multiprocessing import forkserver
from pathlib import Path

import pytest

_TESTS = Path(__file__).parents[2]


def missing(names: list[str], extra: str) -> str:
    """Which packages of these ``names`` are missing, and that ``extra`` installs them; empty if none is."""
    absent = [name for name in names if not importlib.util.find_spec(name)]
    return f"{', '.join(absent)} not installed: pip install '.[{extra}]'" if absent else ""


@pytest.fixture(scope="session", autouse=True)
def server_with_libraries(request: pytest.FixtureRequest) -> None:
    """Start the server that ranks are forked from. It imports the libraries of all folders with tests, which takes
    seconds. For the ``conftest.py`` of such a folder to import.

    Accelerate imports deepspeed where it is installed. What is not installed is left out.
    """
    folders = {item.path.parent for item in request.session.items}
    jobs = [path.stem for folder in folders for path in folder.glob("*_jobs.py")]
    if "huggingface_jobs" in jobs:
        jobs += ["deepspeed", "deepspeed.comm"]
    with pytest.MonkeyPatch.context() as patch:
        paths = [str(_TESTS), *map(str, folders), os.environ.get("PYTHONPATH", "")]
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        patch.setenv("OMP_NUM_THREADS", "1")
        multiprocessing.get_context("forkserver").set_forkserver_preload(jobs)
        forkserver.ensure_running()
