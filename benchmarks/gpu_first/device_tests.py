"""Step 3: the tests for a GPU, those first that teach most, with the second at which each was over."""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

from gpu_first.step import Findings, Options, main

__all__ = ["FIRST", "TESTS", "in_order", "outcome_of"]

TESTS = Path(__file__).parents[2] / "tests" / "device" / "test_gpu.py"

FIRST = (
    "test_the_host_cache_is_pinned",
    "test_equal_to_a_synchronous_stock_save",
    "test_restored_behind_what_the_stream_was_given",
    "test_thousands_of_small_tensors",
    "test_a_captured_step",
    "test_ways_to_train",
    "test_a_write_that_no_step_announces",
    "test_only_the_device_in_use_gets_a_context",
)
"""Whatever else there is comes after them."""

_OUTCOME = re.compile(r"::(\S+(?: \S+)*?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b")


def in_order(source: str) -> list[str]:
    """The tests in a file's ``source``, those of :data:`FIRST` first."""
    names = re.findall(r"^def (test_\w+)", source, re.MULTILINE)
    return [*(name for name in FIRST if name in names), *(n for n in names if n not in FIRST)]


def outcome_of(line: str) -> tuple[str, str] | None:
    """A test, and how it ended, if a line of ``pytest -v`` says so."""
    found = _OUTCOME.search(line)
    return None if found is None else (found[1], found[2].lower())


def add_options(arguments: argparse.ArgumentParser) -> None:
    arguments.add_argument(
        "--seconds", type=float, default=500, help="then pytest is asked to say what has failed"
    )


def measure(options: Options, findings: Findings) -> None:
    began = time.monotonic()
    # As `make gpu-test` does, and from elsewhere than the sources, so that what is installed is tested.
    command = [sys.executable, "-m", "pytest", "-v", "-rs", "-c", os.devnull]
    command += ["--rootdir", str(TESTS.parents[1]), "--import-mode=importlib", "--tb=short"]
    command += ["-p", "no:cacheprovider", "--basetemp", str(options.dir / "pytest")]
    command += ["-o", "tmp_path_retention_policy=none", "-o", "faulthandler_timeout=60"]
    command += [f"{TESTS}::{name}" for name in in_order(TESTS.read_text())]
    ended: dict[str, list[object]] = {}
    findings.note("tests", ended)
    with subprocess.Popen(
        command, cwd=options.dir, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        asking = threading.Timer(options.seconds, process.send_signal, (signal.SIGINT,))
        asking.daemon = True
        asking.start()
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            if skipped := re.match(r"SKIPPED \[\d+\] \S+: (.*)", line):
                findings.note("skipped", sorted({*findings.get("skipped", ()), skipped[1]}))
            found = outcome_of(line)
            if found is not None:
                ended[found[0]] = [found[1], round(time.monotonic() - began, 1)]
                findings.save()
        asking.cancel()
    findings.note("pytest_exit_code", process.returncode)
    findings.note("outcomes", dict(Counter(str(outcome) for outcome, _ in ended.values())))
    if process.returncode != 0:
        raise SystemExit(process.returncode)


if __name__ == "__main__":
    sys.exit(main(measure, add_options))
