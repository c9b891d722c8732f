"""Jobs of the real Accelerate and the real Trainer on two ranks: killed, resumed, and with failing saves."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.processes import Ended, run_ranks

import dcp_datastates as ds

STEPS = 7
LATE = {"read_deadline": 600.0}
"""No tensor of a save is read before the next backward pass: a save whose job is killed before it is not committed."""


class Library(NamedTuple):
    """How a library names its checkpoints."""

    function: str
    below: str
    """The directory of checkpoints, below that of the job."""
    names: dict[int, str]
    """By step."""

    def folder(self, root: Path) -> Path:
        return root / self.below


ACCELERATE = Library(
    "accelerate", "checkpoints", {2: "checkpoint_0", 4: "checkpoint_1", 6: "checkpoint_2"}
)
TRAINER = Library("trainer", "", {number: f"checkpoint-{number}" for number in (2, 4, 6)})
BOTH = [pytest.param(each, id=each.function) for each in (ACCELERATE, TRAINER)]


def job(
    library: Library,
    world: int,
    root: Path,
    scratch: Path,
    environment: dict[str, str] | None = None,
    **arguments: Any,
) -> list[Ended]:
    environments = [
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29500",
            "HF_HUB_OFFLINE": "1",
            **(environment or {}),
        }
        for rank in range(world)
    ]
    return run_ranks(
        f"huggingface_jobs:{library.function}",
        world,
        scratch / "scratch",
        environments=environments,
        folder=str(root),
        **arguments,
    )


def train(library: Library, root: Path, scratch: Path, **arguments: Any) -> dict[str, Any]:
    return [one.result() for one in job(library, 2, root, scratch, **arguments)][0]


def killed(library: Library, root: Path, scratch: Path, **arguments: Any) -> None:
    """Train until the ranks kill themselves."""
    arguments = {"options": LATE, **arguments}
    ended = job(library, 2, root, scratch, **arguments)
    assert [one.exit_code for one in ended] == [-9, -9], f"{ended[0].error}\n{ended[0].log}"


def committed(folder: Path) -> set[str]:
    return {path.parent.name for path in folder.glob("*/.metadata")}


def from_step(losses: dict[int, str], first: int) -> dict[int, str]:
    return {number: loss for number, loss in losses.items() if number >= first}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Jobs that nothing interrupted, one for each library: their checkpoints, and their losses by step."""
    done: dict[str, tuple[Path, dict[int, str]]] = {}

    def job_of(library: Library) -> tuple[Path, dict[int, str]]:
        if library.function not in done:
            folder = tmp_path_factory.mktemp("whole")
            losses = train(library, folder, tmp_path_factory.mktemp("scratch"))["losses"]
            assert list(losses) == list(range(1, STEPS + 1))
            done[library.function] = library.folder(folder), losses
        return done[library.function]

    yield job_of
    for folder, _ in done.values():
        shutil.rmtree(folder)


@pytest.mark.parametrize("library", BOTH)
def test_a_killed_job_goes_on_from_the_newest_commit_with_equal_losses(
    tmp_path: Path, whole: Any, library: Library
) -> None:
    names, folder = library.names, library.folder(tmp_path / "killed")
    killing = {"begun": names[6], "committed": names[4]}
    killed(library, tmp_path / "killed", tmp_path, kill_after=6, killing=killing)
    assert committed(folder) == {names[2], names[4]}
    resumed = train(library, tmp_path / "killed", tmp_path, resume=True)
    assert resumed["losses"] == from_step(whole(library)[1], 5)
    assert committed(folder) == set(names.values())
    for name in names.values():
        assert not ds.verify(folder / name).damages
