"""torchtitan's own unit tests of its checkpoint manager, with this package's in its place.

    python stock_tests.py CHECKOUT

runs ``tests/unit_tests/test_checkpoint.py`` of a checkout of torchtitan's repository (its wheel and its sdist have
none) against the torchtitan in the checkout if it is whole, else against the one that is installed. Exit status 0: what
fails is what :data:`EXCEPTIONS` names, each with its reason, and nothing else.
"""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

__all__ = ["EXCEPTIONS", "run", "unexpected"]

EXCEPTIONS = {
    "test_trainer_uses_checkpoint_interface_with_concrete_default": (
        "asserts that the trainer's default config is of the class that has the name CheckpointManager: the swap "
        "changes the name, and the trainer's default is torchtitan's business"
    ),
    "test_save_and_purge_keeps_last_k_checkpoints": (
        "its double of dcp.save makes directories step-N that hold no checkpoint, and it asserts that they are "
        "deleted by name: here commits count, and what is not committed evicts nothing"
    ),
    "test_legacy_config_only_adds_dcp_specific_fields": (
        "asserts the exact set of fields of the stock class's config: this one has the writer's options too"
    ),
}
"""Tests that fail with this package's manager, and why they must."""


class Swap:
    """A plugin for pytest: every module of torchtitan that offers its manager offers this package's."""

    def pytest_sessionstart(self) -> None:
        import torchtitan.components.checkpointer
        import torchtitan.trainer  # noqa: F401 - it must not be given another default

        from dcp_datastates.torchtitan import DataStatesCheckpointManager

        for name, module in list(sys.modules.items()):
            if name.startswith("torchtitan.components.checkpoint") and hasattr(
                module, "CheckpointManager"
            ):
                module.CheckpointManager = DataStatesCheckpointManager  # type: ignore[attr-defined]


def run(checkout: Path) -> dict[str, str]:
    """Run them in a process of their own; by name: ``passed``, ``skipped``, or the message of the failure."""
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[2])]
    if (checkout / "torchtitan" / "train.py").exists():
        paths.insert(0, str(checkout))
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")]).rstrip(
            os.pathsep
        ),
    }
    with TemporaryDirectory() as directory:
        report = Path(directory, "report.xml")
        tests = checkout / "tests" / "unit_tests" / "test_checkpoint.py"
        ran = subprocess.run(
            [sys.executable, __file__, "--run", str(tests), str(report)],
            env=environment,
            cwd=directory,
            capture_output=True,
            text=True,
        )
        if not report.exists():
            raise AssertionError(ran.stdout[-5000:] + ran.stderr[-5000:])
        return dict(_outcomes(ElementTree.parse(report).iter("testcase")))


def _outcomes(cases: Iterable[ElementTree.Element]) -> Iterable[tuple[str, str]]:
    for case in cases:
        outcome = "passed"
        for child in case:
            if child.tag in ("failure", "error"):
                outcome = child.get("message") or child.tag
            elif child.tag == "skipped":
                outcome = "skipped"
        yield case.get("name", ""), outcome


def unexpected(outcomes: dict[str, str]) -> list[str]:
    """What failed and is no exception, and which exception passed."""
    wrong = []
    for name, outcome in outcomes.items():
        if outcome not in ("passed", "skipped") and name not in EXCEPTIONS:
            wrong.append(f"{name} failed: {outcome}")
        if outcome == "passed" and name in EXCEPTIONS:
            wrong.append(f"{name} passed, and is named as an exception")
    return wrong


def main() -> int:
    if sys.argv[1] == "--run":
        _, _, tests, report = sys.argv
        options = [
            "-q",
            "-p",
            "no:cacheprovider",
            f"--rootdir={Path(tests).parent}",
            "-c",
            os.devnull,
        ]
        return int(pytest.main([*options, f"--junitxml={report}", tests], plugins=[Swap()]))
    outcomes = run(Path(sys.argv[1]).resolve())
    for name, outcome in outcomes.items():
        print(f"{outcome if outcome in ('passed', 'skipped') else 'FAILED':8} {name}")
        if name in EXCEPTIONS:
            print(f"         named as an exception: {EXCEPTIONS[name]}")
        elif outcome not in ("passed", "skipped"):
            print(f"         {outcome}")
    wrong = unexpected(outcomes)
    print(f"{len(outcomes)} tests, {list(outcomes.values()).count('passed')} passed")
    print("\n".join(wrong) or "nothing unexpected")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
