"""Fixtures for all tests; puts ``tests/`` on the path, so that ``support`` is found by ranks as well."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import logging
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from support.jobs.ranks import close_pool
from support.tiers import SHARES, part_of

from dcp_datastates.storage import attempt

with contextlib.suppress(ImportError):  # not where only the tests for a GPU run
    from hypothesis import settings

    settings.register_profile("untimed", deadline=None)  # the machine may be busy
    settings.load_profile("untimed")


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    """Pytest's, emptied after the test: checkpoints are large."""
    yield tmp_path
    shutil.rmtree(tmp_path, ignore_errors=True)


@pytest.fixture
def memory_path(tmp_path: Path) -> Iterator[Path]:
    """:func:`tmp_path`, in memory if the system has such a directory: for thousands of small files, and for questions
    that have the same answer on any disk.
    """
    memory = Path("/dev/shm")
    if not os.access(memory, os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="pytest-", dir=memory) as directory:
        yield Path(directory)


@pytest.fixture(autouse=True)
def _attempts_of_today() -> Iterator[None]:
    """A test with attempts of the future leaves none of them to the tests after it."""
    before = attempt._incarnation
    yield
    attempt._incarnation = before


@pytest.fixture
def shared_dir(tmp_path: Path) -> Path:
    """A fresh directory that all ranks see."""
    return tmp_path


@pytest.fixture
def s3_root(tmp_path: Path) -> str:
    """The URL of an empty prefix in the bucket of this process's S3 server, which its stores use from now on."""
    from support.stores.server import BUCKET, endpoint, use

    use(endpoint())
    return f"s3://{BUCKET}/{tmp_path.parent.name}/{tmp_path.name}"


@pytest.fixture
def store() -> Any:
    """An object store in memory."""
    from support.simulated.object_stores import MemoryStore

    return MemoryStore()


@pytest.fixture
def slow(store: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of an archive in :func:`store`. What that refuses is tried again soon."""
    from support.simulated.object_stores import installed

    from dcp_datastates.tiers import carrying

    monkeypatch.setattr(carrying, "_FIRST_PAUSE", 0.01)
    monkeypatch.setattr(carrying, "_LONGEST_PAUSE", 0.05)
    # Of its own: the process has one archive for each directory.
    return str(installed(monkeypatch, store, f"{secrets.token_hex(4)}/step-1").parent)


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process group of this process alone."""
    import torch.distributed as dist

    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "s"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def _no_plans_cached() -> Iterator[None]:
    """Stock planners cache plans in class attributes; no test sees another's."""
    yield
    from support.state.planners import forget_cached_plans

    forget_cached_plans()


@pytest.fixture(autouse=True)
def _quiet_dcp() -> None:
    """DCP logs each of its functions at DEBUG, which would bury every report of a failure."""
    for name in list(logging.root.manager.loggerDict):
        if name.endswith("dcp_logger"):
            logging.getLogger(name).setLevel(logging.WARNING)


def pytest_addoption(parser: pytest.Parser) -> None:
    parts = range(1, len(SHARES) + 1)
    parser.addoption("--part", type=int, choices=parts, help="run one third of the tests")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if part := config.getoption("part"):
        others = [item for item in items if part_of(item.nodeid) != part]
        items[:] = [item for item in items if part_of(item.nodeid) == part]
        config.hook.pytest_deselected(items=others)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test that may take longer, by a mark or by `--timeout 0`, is not ended by ``faulthandler_timeout``."""
    mark = item.get_closest_marker("timeout")
    seconds = mark.args[0] if mark else item.config.getoption("timeout", None)
    if seconds is not None and not 0 < seconds < float(item.config.getini("faulthandler_timeout")):
        faulthandler.cancel_dump_traceback_later()


def pytest_collection_finish() -> None:
    """What is imported by now is no garbage: many tests collect it, and would look at all of torch each time."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    close_pool()
