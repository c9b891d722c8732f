"""Failpoints: what the environment may say, and what Python makes of it. Actions: native/tests/failpoints_test.cpp."""

import errno
import signal
import threading
import time

import pytest
from support.crashes.failing import armed, fired
from support.jobs.scripts import run_script

from dcp_datastates.errors import ConfigurationError
from dcp_datastates.storage import failpoints


@pytest.mark.parametrize(
    "entry",
    [
        *("a.before", "=kill", "a.before=", "a.before=die", "Flush=kill", "a b=kill", " "),
        *("a.before=sleep:", "a.before=sleep:soon", "a.before=sleep:1.2.3", "a.before=sleep:inf"),
        *("a.before=sleep:-1", "a.before=sleep:.", "a.before=kill:1", "a.before=stop:"),
        *("a.before=error:", "a.before=error:E", "a.before=error:5", "a.before=error:EWHATEVER"),
        *("a.before=error:eio", "a.before=error:errorcode"),
        *(
            "a.before@=kill",
            "a.before@x=kill",
            "a.before@-1=kill",
            "a.before@99999999999999999999=kill",
        ),
    ],
)
def test_what_is_no_entry_is_refused(entry):
    before = failpoints.current()
    for entries in (entry, f"b.before=sleep:0;{entry}"):
        with pytest.raises(ConfigurationError) as raised, armed(entries):
            pass
        assert repr(entry) in str(raised.value)
    assert failpoints.current() is before


def test_the_first_failpoint_and_the_first_engine_read_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv(failpoints.VARIABLE, "a.before=die")
    run_script(
        """
        from dcp_datastates.errors import ConfigurationError
        from dcp_datastates.io.engine import engine
        from dcp_datastates.storage import failpoints
        for call in (engine, lambda: failpoints.hit("b.before")):
            try:
                call()
            except ConfigurationError as error:
                assert "'a.before=die'" in str(error)
            else:
                raise AssertionError("not refused")
        os.environ[failpoints.VARIABLE] = ""
        engine()
        """,
        tmp_path / "c",
    ).assert_clean()


@pytest.mark.parametrize("entries", ["", ";", ";;", " b.after=kill ; c=stop;"])
def test_other_names_are_left_alone(entries, tmp_path):
    with armed(entries, log=tmp_path / "log"):
        failpoints.hit("b.before")
    assert not fired(tmp_path / "log")


@pytest.mark.parametrize("name", ["EIO", "ENOSPC", "ECONNRESET", "EOPNOTSUPP"])
def test_an_error_is_raised_with_its_number_and_its_place(name, tmp_path):
    with armed(f"b.before@2=error:{name}", log=tmp_path / "log"):
        failpoints.hit("b.before")
        with pytest.raises(OSError, match=r"failpoint b\.before") as raised:
            failpoints.hit("b.before")
        failpoints.hit("b.before")
    assert raised.value.errno == getattr(errno, name)
    assert fired(tmp_path / "log") == ["b.before"]


def test_hits_are_counted_anew_when_the_environment_is_read_again():
    with armed("b.before@1=error:EIO"):
        for _ in range(2):
            with pytest.raises(OSError, match="failpoint"):
                failpoints.hit("b.before")
            failpoints.hit("b.before")
            failpoints.reload()


def test_a_sleep_lets_other_threads_run_and_signals_in():
    class Heard(Exception):
        pass

    def hear(*_):
        raise Heard

    ran = threading.Event()
    before = signal.signal(signal.SIGALRM, hear)
    began = time.monotonic()
    try:
        with armed("b.before=sleep:1000"):
            threading.Timer(0.05, ran.set).start()
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            with pytest.raises(Heard):
                failpoints.hit("b.before")
    finally:
        signal.signal(signal.SIGALRM, before)
    assert ran.is_set()
    assert time.monotonic() - began < 500


def test_the_log_names_what_intervenes(tmp_path):
    ended = run_script(
        """
        import logging
        logging.basicConfig(level=logging.INFO)
        os.environ["DCP_DATASTATES_TRACE"] = path
        import dcp_datastates as ds
        for number in range(2):
            ds.save({"w": torch.ones(10)}, f"{path}-{number}", host_cache_size="64MiB")
        """,
        tmp_path / "trace",
    )
    assert ended.returncode == 0
    told = [line for line in ended.stderr.splitlines() if "the environment intervenes" in line]
    assert len(told) == 1
    assert f"DCP_DATASTATES_TRACE='{tmp_path / 'trace'}'" in told[0]
