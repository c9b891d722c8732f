"""Jobs of the real torchtitan: same losses and same bits as with its own checkpoint manager."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.commands import ROOT
from support.tiers import sampled

from compare import assert_same
from dcp_datastates import verify
from jobs import Launcher, Mesh, Trial

STEPS = 4
MODES = ("async", "async_with_pinned_mem")
StockJob = Callable[[Mesh], tuple[Path, dict[int, str]]]
FSDP = Mesh(fsdp=2)
TP = Mesh(tp=2)
BOTH = Mesh(fsdp=2, tp=2)


def step(folder: Path, number: int) -> Path:
    return folder / "checkpoint" / f"step-{number}"


@pytest.mark.parametrize("mesh", sampled([FSDP, TP, BOTH], keep=[FSDP]), ids=str)
def test_every_save_is_what_a_stock_synchronous_save_of_that_step_is(
    launcher: Launcher, stock_job: StockJob, tmp_path: Path, mesh: Mesh
) -> None:
    stock, expected = stock_job(mesh)
    assert list(expected) == list(range(1, STEPS + 1))
    for mode in MODES:
        ours = tmp_path / mode
        assert launcher.run(Trial(ours, mesh, STEPS, mode)).check().losses == expected
        for number in range(1, STEPS + 1):
            assert_same(step(stock, number), step(ours, number))
            assert not verify(step(ours, number)).damages


@pytest.mark.parametrize(
    ("mesh", "other", "mode"),
    sampled(
        [(BOTH, FSDP, "async_with_pinned_mem"), (FSDP, BOTH, "async")],
        keep=[(BOTH, FSDP, "async_with_pinned_mem")],
    ),
    ids=["4-ranks-on-2", "2-ranks-on-4"],
)
def test_a_killed_job_resumes_at_another_world_size_as_stock_does(
    launcher: Launcher, tmp_path: Path, mesh: Mesh, other: Mesh, mode: str
) -> None:
    stock, ours = tmp_path / "stock", tmp_path / "ours"

    def kill_after(number: int) -> dict[str, Any]:
        return {"hook": "hooks:kill_after", "hook_options": {"step": number, "rank": 1}}

    # Stock saves synchronously, and has step 1; ours dies with step 2 captured, and not read.
    ended = launcher.run(Trial(stock, mesh, 3, "disabled", stock=True, **kill_after(1)))
    assert ended.codes[1] == -9
    ended = launcher.run(Trial(ours, mesh, 3, mode, **kill_after(2)))
    assert ended.codes[1] == -9
    assert (step(ours, 1) / ".metadata").exists()
    assert not (step(ours, 2) / ".metadata").exists()

    expected = launcher.run(Trial(stock, other, 3, "disabled", stock=True)).check().losses
    found = launcher.run(Trial(ours, other, 3, mode)).check().losses
    assert list(found) == [2, 3]
    assert found == expected
    for number in (2, 3):
        assert_same(step(stock, number), step(ours, number))


def test_the_step_gate_alone_holds_in_async_mode(
    launcher: Launcher, stock_job: StockJob, tmp_path: Path
) -> None:
    """Torchtitan does not wait for staging in this mode, and here no backward pass starts the reads."""

    def trial(name: str, gate: bool) -> Trial:
        return Trial(
            tmp_path / name,
            FSDP,
            STEPS,
            "async",
            options={"reads": 600.0},
            hook="hooks:read_late",
            hook_options={"gate": gate},
        )

    stock, _ = stock_job(FSDP)
    launcher.run(trial("gated", True)).check()
    for number in range(1, STEPS + 1):
        assert_same(step(stock, number), step(tmp_path / "gated", number))

    torn = launcher.run(trial("free", False))
    assert any(torn.codes)
    assert "SnapshotTornError" in "".join(torn.logs)
    assert not (step(tmp_path / "free", 1) / ".metadata").exists()


def test_the_command_of_the_example_saves_by_this_package(
    launcher: Launcher, tmp_path: Path
) -> None:
    """With the debug model in place of the large one."""
    from torchtitan.models.llama3 import config_registry

    text = (ROOT / "examples/torchtitan.md").read_text()
    (command,) = re.findall(r"^(torchrun .*?)^```", text, re.DOTALL | re.MULTILINE)
    words = shlex.split(command.replace("\\\n", " "))
    module, llama, config, name, *flags = words[words.index("torchtitan.train") + 1 :]
    assert (module, llama, config) == ("--module", "llama3", "--config")
    assert hasattr(config_registry, name)
    launcher.run(Trial(tmp_path, FSDP, 2, stock=True, flags=flags)).check()
    assert not verify(step(tmp_path, 2)).damages
