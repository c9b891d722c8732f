"""Fixtures for the tests with the real torchtitan, which are skipped where it is not installed."""

from __future__ import annotations

import functools
import importlib.util
import logging
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from jobs import Launcher, Mesh

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))  # support
sys.path.insert(0, str(Path(__file__).parent))

_MISSING = [
    name
    for name in ("torchtitan", "triton", "tokenizers")
    if importlib.util.find_spec(name) is None
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if _MISSING:
        why = f"{', '.join(_MISSING)} not installed: pip install '.[torchtitan]'"
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=why))


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    """Pytest's, emptied after the test: checkpoints are large."""
    yield tmp_path
    shutil.rmtree(tmp_path, ignore_errors=True)


@pytest.fixture(autouse=True)
def _quiet_dcp() -> None:
    """DCP logs each of its functions at DEBUG, which would bury every report of a failure."""
    for name in list(logging.root.manager.loggerDict):
        if name.endswith("dcp_logger"):
            logging.getLogger(name).setLevel(logging.WARNING)


@pytest.fixture(scope="session")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    """Runs jobs; one for all tests of a worker."""
    from jobs import Launcher

    launcher = Launcher(tmp_path_factory.mktemp("torchtitan"))
    yield launcher
    launcher.close()


@pytest.fixture(scope="session")
def stock_job(
    launcher: Launcher, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Mesh], tuple[Path, dict[int, str]]]:
    """Runs four steps on a mesh, with torchtitan's own synchronous saves; their folder, and the losses. Once for all
    tests of a worker: they only read it.
    """
    from jobs import Trial

    @functools.cache
    def run(mesh: Mesh) -> tuple[Path, dict[int, str]]:
        folder = tmp_path_factory.mktemp("stock")
        ended = launcher.run(Trial(folder, mesh, 4, "disabled", stock=True))
        return folder, ended.check().losses

    return run
