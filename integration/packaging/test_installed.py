"""The wheel and the sdist, each installed into an environment that holds nothing else: they save, load and run."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

TORCH = "torch==2.13.0"


def _run(*command: object, cwd: Path) -> str:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{shlex.join(map(str, command))}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.mark.timeout(1800)  # torch is fetched, and the sdist compiled
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_it_saves_loads_and_runs_in_an_empty_environment(
    kind: str, repository: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    python = tmp_path / "environment" / "bin" / "python"
    install = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    install += ["--constraint", repository / "constraints.txt"]
    install += shlex.split(os.environ.get("PIP_ARGS", ""))
    _run(sys.executable, "-m", "venv", tmp_path / "environment", cwd=tmp_path)
    _run(*install, TORCH, cwd=tmp_path)  # alone and first: nothing that follows may replace it
    _run(*install, request.getfixturevalue(kind), cwd=tmp_path)
    _run(python, "-m", "pip", "check", cwd=tmp_path)
    said = _run(python, "-I", repository / "integration/packaging/smoke.py", cwd=tmp_path)
    assert "saved, loaded, verified" in said
