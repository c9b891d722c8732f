"""A test that stands still ends, and is named, also if it holds the GIL."""

import subprocess
import sys

STANDS_STILL = """
import ctypes

def test_that_holds_the_gil():
    lock = ctypes.PyDLL(None).pthread_mutex_lock  # a PyDLL's functions keep the GIL
    mutex = ctypes.create_string_buffer(100)
    lock(mutex)
    lock(mutex)

def test_after_it():
    pass
"""


def test_what_holds_the_gil_is_ended_and_named_and_the_others_run(tmp_path, pytestconfig):
    (tmp_path / "test_it.py").write_text(STANDS_STILL)
    exits = pytestconfig.getini("faulthandler_exit_on_timeout")
    timeout, longer = map(pytestconfig.getini, ["timeout", "faulthandler_timeout"])
    assert 0 < float(timeout) < float(longer)
    limits = f"-o timeout=4 -o faulthandler_timeout=5 -o faulthandler_exit_on_timeout={exits}"
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "1", *limits.split(), "test_it.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert "crashed while running 'test_it.py::test_that_holds_the_gil'" in ended.stdout
    assert "1 failed, 1 passed" in ended.stdout
    assert "in test_that_holds_the_gil" in ended.stderr
