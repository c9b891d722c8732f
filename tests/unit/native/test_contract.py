"""The native engine's contract with Python: forks, signals, ownership of memory, clear refusals."""

import gc
import os
import signal
import threading
import weakref

import numpy as np
import pytest
from support.jobs.scripts import run_script

from dcp_datastates import _native

NEVER = 1000.0


class Owner:
    """Something that a job keeps alive."""


@pytest.fixture
def engine():
    engine = _native.Engine(64 << 20)
    yield engine
    engine.shutdown()


@pytest.fixture
def data():
    return np.random.default_rng(0).integers(0, 255, 64 << 20, dtype=np.uint8)


def save(engine, path, data, window, keepalive=None):
    content = _native.Transfer()
    content.add_buffer(0, data)
    file = _native.SaveFile(str(path), data.nbytes, content)
    return engine.save([file], [str(path.parent)], 0, window, keepalive)


def test_a_forked_child_is_refused_and_may_drop_all_it_inherited(engine, data, tmp_path):
    window = _native.Window(NEVER)
    job = save(engine, tmp_path / "file", data, window)
    slab = engine.slab(1, 0, 1.0)
    waiting = threading.Thread(target=lambda: job.wait(1.0))
    waiting.start()  # so that a lock may be held when the fork comes
    child = os.fork()
    if child == 0:
        refused = 0
        for use in (engine.stats, lambda: job.fault):
            try:
                use()
            except RuntimeError:
                refused += 1
        window.open()
        slab.release()
        alive = engine.alive
        del engine, job, window, slab
        gc.collect()
        os._exit(0 if refused == 2 and not alive else 1)
    assert os.waitpid(child, 0)[1] == 0
    waiting.join()
    window.open()
    assert job.wait(60)
    assert job.fault is None


def _wait_for_a_job(engine, data, path):
    save(engine, path, data, _native.Window(NEVER)).wait(60)


def _wait_for_a_segment(engine, data, path):
    file = _native.SaveFile("s3://a", 4, _native.Transfer())
    job = engine.save_streamed([file], 0, _native.Window(NEVER), None)
    next(job.stream(0))


@pytest.mark.parametrize("wait", [_wait_for_a_job, _wait_for_a_segment])
def test_a_wait_hears_signals(wait, engine, data, tmp_path):
    def interrupt(*_):
        raise InterruptedError("heard")

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(InterruptedError, match="heard"):
            wait(engine, data, tmp_path / "file")
    finally:
        signal.signal(signal.SIGALRM, before)


def test_an_interpreter_that_ends_while_daemon_threads_wait_ends_cleanly(tmp_path, monkeypatch):
    monkeypatch.setenv("DCP_DATASTATES_FAILPOINTS", "restore.open.before=sleep:1")
    run_script(
        """
        import threading
        from dcp_datastates import _native
        from dcp_datastates.storage import failpoints

        class SlowToGo:
            def __del__(self, sleep=time.sleep):
                sleep(0.5)  # so that every wait's slice ends within the end of the interpreter

        engine = _native.Engine(64 << 20, failpoints=failpoints.current())
        content = _native.Transfer()
        content.add_buffer(0, memory := bytearray(4))
        file = _native.SaveFile(path, 4, content)
        save = engine.save([file], [], 0, _native.Window(1000.0), memory)
        plan = _native.RestorePlan()
        plan.add_file(path, file.nbytes, 4, content)
        restore = engine.restore(plan, memory)
        slab = engine.slab(engine.max_slab_bytes, 0, 1.0)
        waits = [lambda: save.wait(1000.0), lambda: restore.wait(1000.0)]
        waits += [lambda: save.wait_read(-1, 1000.0), lambda: engine.slab(1, 1, 1000.0)]
        for wait in 8 * waits:
            threading.Thread(target=wait, daemon=True).start()
        time.sleep(0.2)
        slow = SlowToGo()
        """,
        tmp_path / "file",
    ).assert_clean()


@pytest.mark.parametrize("cycle", [False, True])
def test_a_dropped_job_lets_go_of_its_sources(cycle, engine, data, tmp_path):
    owner = Owner()
    gone = weakref.ref(owner)
    job = save(engine, tmp_path / "file", data, _native.Window(NEVER), owner)
    if cycle:
        owner.job = job
    del owner
    gc.collect()
    assert gone() is not None
    del job
    if cycle:
        gc.collect()
    assert gone() is None


IN_A_CYCLE = """
import gc, weakref
import numpy as np
from dcp_datastates import _native
from dcp_datastates.storage import failpoints

class Owner:
    pass

def start(verb):
    data = np.zeros(64 << 20, np.uint8)  # so large that it is unmapped when it is freed
    content = _native.Transfer()
    content.add_buffer(0, data)
    memory = [data]  # the oldest of the cycle: cleared first
    owner = Owner()
    keepalive = [memory, owner]
    file = _native.SaveFile(path, data.nbytes, content)
    if verb == "save":
        owner.job = engine.save([file], [], 0, _native.Window(0.0), keepalive)
    else:
        plan = _native.RestorePlan()
        plan.add_file(path, file.nbytes, data.nbytes, content)
        owner.job = engine.restore(plan, keepalive)
    return owner, weakref.ref(data)

engine = _native.Engine(64 << 20, failpoints=failpoints.current())
gc.disable()
"""


@pytest.mark.parametrize(
    ("verb", "between"), [("save", "read.before"), ("restore", "restore.read.after@2")]
)
def test_memory_in_a_cycle_with_its_job_outlives_the_copies(verb, between, tmp_path, monkeypatch):
    log = tmp_path / "log"
    monkeypatch.setenv("DCP_DATASTATES_FAILPOINTS", f"{between}=sleep:0.5")
    monkeypatch.setenv("DCP_DATASTATES_FAILPOINTS_LOG", str(log))
    run_script(
        IN_A_CYCLE
        + f"""
if {verb!r} == "restore":
    saved, _ = start("save")
    assert saved.job.wait(30) and saved.job.fault is None
owner, data = start({verb!r})
while not os.path.exists({str(log)!r}):  # a copy is under way, and has not touched the memory yet
    time.sleep(0.01)
del owner
assert data() is not None
gc.collect()
assert data() is None
""",
        tmp_path / "file",
    ).assert_clean()


def test_a_job_that_a_finalizer_brings_back_is_refused_and_keeps_its_memory(engine, data, tmp_path):
    brought_back = []

    class Phoenix(Owner):
        def __del__(self):
            brought_back.append(self)

    owner = Phoenix()
    memory = [data, owner]
    owner.job = save(engine, tmp_path / "file", data, _native.Window(NEVER), memory)
    del owner, memory
    gc.collect()
    (owner,) = brought_back
    (memory,) = (each for each in gc.get_referents(owner.job) if isinstance(each, list))
    assert memory[0] is data
    with pytest.raises(RuntimeError, match="garbage collected"):
        owner.job.wait(1)


def test_a_missing_file_is_a_fault_with_errno_and_path(engine, data, tmp_path):
    content = _native.Transfer()
    content.add_buffer(0, bytearray(4))
    plan = _native.RestorePlan()
    plan.add_file(str(tmp_path / "none"), 12, 4, content)
    job = engine.restore(plan, None)
    assert job.wait(10)
    assert (job.fault.kind, job.fault.errno, job.fault.operation) == ("io", 2, "open")
    assert job.fault.path == str(tmp_path / "none")


@pytest.mark.parametrize(
    "misuse",
    [
        lambda: _native.Engine(1),
        lambda: _native.Transfer().add(-1, 1, 1),
        lambda: _native.Transfer().add_many([1], [1, 2], [1], [1]),
        lambda: _native.SaveFile("", 0, _native.Transfer()),
        lambda: _native.SaveFile("file", 3, _native.Transfer()),
        lambda: _native.SaveFile("a\0b", 0, _native.Transfer()),
        lambda: _native.Window(float("nan")),
    ],
)
def test_misuse_is_a_value_error(misuse):
    with pytest.raises(ValueError, match=r"\S"):
        misuse()
