"""``watch``: a line for each commit in a pipe, a table on a terminal."""

import json
import os
import pty
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch
from support.commands import run_cli
from support.state.checkpoints import save
from support.waiting import await_that

from dcp_datastates.checkpoints.overview import overview
from dcp_datastates_cli.describe import next_commit, screen


@contextmanager
def watching(*arguments, output=subprocess.PIPE):
    command = [sys.executable, "-m", "dcp_datastates", "watch", *map(str, arguments)]
    process = subprocess.Popen(
        command,
        stdout=output,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # may be ignored here
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("as_json", [False, True])
def test_a_line_for_each_commit_until_an_interrupt(as_json, tmp_path):
    save({"w": torch.ones(100)}, tmp_path / "step-1")
    with watching(tmp_path, "--every", "0.1", *(["--json"] if as_json else [])) as process:
        assert process.stdout is not None
        for step in (1, 2, 3):
            if step > 1:
                save({"w": torch.ones(100)}, tmp_path / f"step-{step}")
            line = process.stdout.readline()
            name = json.loads(line)["name"] if as_json else line.split("  ")[1]
            assert name == f"step-{step}"
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130


def test_a_reader_that_has_gone_ends_it(tmp_path):
    save({"w": torch.ones(100)}, tmp_path / "step-1")
    with watching(tmp_path, "--every", "0.1") as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        save({"w": torch.ones(100)}, tmp_path / "step-2")
        assert process.wait(60) == 0


def test_a_table_on_a_terminal(tmp_path):
    save({"w": torch.ones(100)}, tmp_path / "step-1")
    ours, theirs = pty.openpty()
    shown = b""
    with watching(tmp_path, "--every", "0.1", output=theirs):
        os.set_blocking(ours, False)

        def has_shown():
            nonlocal shown
            try:
                shown += os.read(ours, 1 << 16)
            except BlockingIOError:
                return False
            return b"step-1" in shown and b"age" in shown

        await_that(has_shown)
    os.close(ours)
    os.close(theirs)


def test_the_table_has_age_distance_and_the_next(tmp_path):
    for step in (1, 2, 3):
        save({"w": torch.ones(100)}, tmp_path / f"step-{step}")
    found = overview(tmp_path, 2)
    committed = found.checkpoints
    assert [each.name for each in committed] == ["step-3", "step-2"]
    times = [each.committed_at or 0.0 for each in committed]
    due = next_commit(committed)
    assert due == pytest.approx(times[0] + times[0] - times[1])
    assert next_commit(committed[:1]) is None
    text = screen(found, due - 3600.0, 2)
    assert "next commit   in 1 h, if" in text
    assert "step-3" in text
    assert "next commit   1 h late, if" in screen(found, due + 3600.0, 2)
    assert "newest        step-3, age 1 h, committed 2" in screen(found, times[0] + 3600.0, 2)


def test_what_cannot_be_watched_is_refused(tmp_path):
    for every in ("0", "nan", "inf"):
        assert run_cli("watch", tmp_path, "--every", every).returncode == 2
    assert "no directory" in run_cli("watch", tmp_path / "absent").stderr
    (tmp_path / "file").touch()
    assert run_cli("watch", tmp_path / "file").returncode == 2
