"""What users of Lightning do, beside Lightning's own strategies: ``lightning_rows.py`` has the rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_rows import FAILED, ROWS, Compiled, Net, Use, all_rows
from test_training import job


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    return all_rows(str(tmp_path_factory.mktemp("rows")), "single")


@pytest.fixture(scope="module")
def ddp(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    folder = tmp_path_factory.mktemp("rows")
    arguments = {"module": "lightning_rows", "folder": str(folder), "device": "ddp"}
    ranks = job("all_rows", 2, folder, seconds=300.0, **arguments)
    first, *_ = [one.result() for one in ranks]
    return first


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("device", ["single", "ddp"])
def test_a_row_ends_as_with_lightnings_own(
    device: str, name: str, request: pytest.FixtureRequest
) -> None:
    own, ours = request.getfixturevalue(device)[name]
    assert not str(own).startswith(FAILED), own
    assert ours == own


@pytest.mark.parametrize(("saved", "loaded"), [(Compiled, Net), (Net, Compiled)])
def test_a_job_may_begin_or_cease_to_compile(
    tmp_path: Path, saved: type[Net], loaded: type[Net]
) -> None:
    """Lightning's own cannot."""
    use = Use("single", tmp_path)
    path = use.save(saved())
    assert use.resume(loaded(), path) == use.resume(saved(), path)
