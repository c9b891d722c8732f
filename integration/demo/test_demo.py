"""What the demo installs, and what it prints: with runs that are made up, and by itself."""

from __future__ import annotations

import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from support.commands import ROOT, run

from report import Run, Saved, report_losses, report_stalls, say_what_comes_next

MAKEFILE = (ROOT / "Makefile").read_text()
PAGE = 60
"""Lines; 80 characters wide."""


def made_up(phase: str, *, call: float, gate: float, iteration: float, first: int = 1) -> Run:
    saved = Saved(88_000_000, 1.0, call + gate, call, gate, 0.0, 400.0, iteration)
    numbers = range(first, 6)
    return Run(
        *(phase, 4, "FSDP2", 7_000_000),
        losses={number: 1.0 / number for number in numbers},
        saves=dict.fromkeys(numbers, saved),
    )


@pytest.fixture
def runs() -> list[Run]:
    return [
        made_up("stock", call=500, gate=0, iteration=1000),
        made_up("staged", call=0, gate=250, iteration=750),
        made_up("datastates", call=1, gate=0, iteration=500),
    ]


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=80)


def printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_chart_draws_training_waits_and_saves_on_one_axis(
    runs: list[Run], console: Console
) -> None:
    report_stalls(runs, console)
    chart = printed(console).partition("An iteration, and the save beside it")[2]
    bars = re.findall(r"^.*(?: |^)([▓█]+) *$", chart, re.MULTILINE)
    assert [(bar.count("▓"), bar.count("█")) for bar in bars] == [(26, 26), (13, 26), (1, 25)]
    assert bars[0].startswith("▓"), "stock waits in the call"
    assert bars[1].endswith("▓"), "the stager is waited for before the step"
    assert [len(save) for save in re.findall("━━+", chart)] == [21, 21, 21]


def test_it_ends_with_what_was_seen_and_what_to_do_next(runs: list[Run], console: Console) -> None:
    resumed = made_up("resumed", call=1, gate=0, iteration=500, first=4)
    resumed.resumed_from = 3
    say_what_comes_next(runs, resumed, 30.0, console)
    text = " ".join(printed(console).split())
    assert "500 ms with FileSystemWriter" in text
    assert "250 ms with DefaultStager" in text
    assert "1 ms with DataStatesWriter" in text
    assert "from step 3" in text
    named = re.findall(r"[\w/]+\.(?:py|md)\b", text)
    assert len(named) == 3
    assert [name for name in named if not (ROOT / name).is_file()] == []


def test_other_losses_after_the_resume_fail_the_demo(runs: list[Run], console: Console) -> None:
    resumed = made_up("resumed", call=1, gate=0, iteration=500, first=4)
    report_losses(runs[0], runs[2], resumed, console)
    resumed.losses[5] *= 1.001
    with pytest.raises(SystemExit, match="the resumed job's losses differ"):
        report_losses(runs[0], runs[2], resumed, console)


def test_the_demo_is_one_page(tmp_path: Path) -> None:
    demo = [sys.executable, str(ROOT / "integration/demo/run.py")]
    ended = run(demo, tmp_path, DEMO_ITERATIONS="8")  # the fewest between a kill and a resume
    text = ended.stdout
    assert len(text.splitlines()) <= PAGE, text
    assert "SIGKILL to all ranks" in text
    assert "resumed on 2 ranks" in text
    assert "What to do next" in text


def make(*arguments: str) -> str:
    """What ``make`` prints, without the variables of the one that runs the tests."""
    ended = subprocess.run(
        ["make", *arguments],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=True,
    )
    return ended.stdout


def steps_of(target: str) -> list[list[str]]:
    """In an empty environment: of each step of the set-up, what pip installs."""
    steps: list[list[str]] = []
    for line in make("--dry-run", target, "VENV=not-there").replace("\\\n", "").splitlines():
        if line.startswith("echo") and "set-up of not-there" in line:
            steps.append([])
        elif " -m pip " in line:
            words = shlex.split(line)[shlex.split(line).index("install") + 1 :]
            steps[-1] += [
                word
                for before, word in zip(["", *words[:-1]], words, strict=True)
                if word[0] != "-" and before not in ("--constraint", "--config-settings")
            ]
    return steps


def test_the_demo_installs_torch_and_the_package_alone() -> None:
    torch, tools, package = steps_of("demo")
    assert [name.partition("==")[0] for name in torch] == ["torch"]
    assert tools == ["cmake", "ninja", "pybind11", "scikit-build-core"]
    assert package == ["."]
    assert steps_of("install")[0] == torch, "torch comes first, that nothing replaces it"


def test_the_help_lists_what_a_user_may_make() -> None:
    text = make("help")
    groups = re.findall(r"^\S.*$", text, re.MULTILINE)
    assert groups == ["Try it", "Test it", "Measure it", "Publish it", "On a GPU"]
    listed = set(re.findall(r"^  make ([\w-]+)", text, re.MULTILINE))
    (phony,) = re.findall(r"^\.PHONY: help(.*?[^\\])$", MAKEFILE, re.DOTALL | re.MULTILINE)
    assert listed - set(phony.replace("\\", " ").split()) == set()
    assert {"demo", "test", "lint", "bench", "dist", "gpu-first"} <= listed
