"""Forked children: one error refuses every call, and what runs without a call does nothing."""

import re
from pathlib import Path

import pytest
from support.jobs.scripts import run_script

import dcp_datastates

ROOT = Path(dcp_datastates.__file__).parent

AT_FORKS_AND_ENDS = {
    "process/forks.py": "the flag that every call asks",
    "process/ending.py": "the one registration for the end of the process, which asks the flag",
    "process/garbage.py": "the child's own program runs with the garbage collector",
    "ranks/gloo_group.py": "destructors of gloo wait for threads, which a child does not have",
    "staging/step_gate.py": "an optimizer's step in a child must not wait for the parent's reads",
}
"""The files that register with ``atexit`` or ``os.register_at_fork``, and why."""

CALLS = """
import inspect, threading
import dcp_datastates as ds

HARMLESS = {
    *("on_load", "on_save", "errors", "track"),  # they note, or compute
    *("Keep", "AutoInterval", "PerRank", "RngState", "Trainable"),
    *("Weights", "DataStatesSavePlanner"),  # values
    *("validate_checkpoint_id", "checkpoint_id", "rank_set", "config", "path", "path_of", "root", "interval"),
    *("close", "failures", "stats", "record", "doing", "last_save", "enter", "add", "should_synchronize_after_execute"),
    *("captured", "committed", "archived", "staging_completion", "upload_completion"),  # futures, which are asked below
    *("prepare_local_plan", "prepare_global_plan", "write_data", "finish"),  # DCP has made other calls before
}

def check_refused(*objects, least):
    "Each function of the API, and each method of these objects, raises the error, and names this process's parent."
    pairs = [(ds, name) for name in dir(ds) if not name.startswith("_")]
    pairs += [(thing, name) for thing in objects for name in dir(type(thing)) if not name.startswith("_")]
    pairs += [(handle.committed, name) for name in ("result", "exception", "done", "add_done_callback", "wait")]
    assert all(map(repr, objects))
    refused = 0
    for thing, name in pairs:
        if name in HARMLESS:
            continue
        try:
            call = getattr(thing, name)
            parameters = inspect.signature(call).parameters.values()
            call(**{each.name: None for each in parameters if each.default is each.empty and "*" not in str(each)})
        except ds.errors.ForkedProcessError as error:
            assert f"was forked from process {parent}" in str(error) and "spawn" in str(error), error
            refused += 1
        else:
            raise AssertionError(f"{name} of {thing} is not refused")
    assert refused >= least, refused

parent = os.getpid()
"""
"""Calls of the whole API, for programs."""

HOLD = """
locks = [
    value
    for name, module in sorted(sys.modules.items())
    if name.startswith("dcp_datastates")
    for thing in [module, handle, handle.committed, manager, *vars(manager).values(), *vars(ours).values()]
    for value in getattr(thing, "__dict__", {}).values()
    if "lock" in type(value).__name__.lower() or isinstance(value, threading.Condition)
]
assert len(locks) > 15, locks
held, done = threading.Event(), threading.Event()

def hold():
    import contextlib
    with contextlib.ExitStack() as stack:
        for lock in {id(lock): lock for lock in locks}.values():
            stack.enter_context(lock)
        held.set()
        done.wait()

holder = threading.Thread(target=hold, daemon=True)
holder.start()
held.wait()
"""
"""A thread that holds every lock of the package's modules, and those of some objects."""


@pytest.mark.parametrize("ending", ["sys.exit(0)", "os._exit(0)"])
def test_a_child_that_was_forked_while_every_lock_was_held_is_refused_and_ends(ending, tmp_path):
    ended = run_script(
        """
        state, optimizer = owned(1)
        keep = ds.Keep(best=("loss", "min"))
        manager = ds.CheckpointManager(path + "-manager", every=1, keep=keep, on_signal=[signal.SIGUSR2])
        reader, ours = DataStatesReader(path), writer(reads=3600)
        handle = ds.async_save(state, path, writer=ours)
        """
        + _indented(HOLD)
        + f"""
        with manager:
            child = os.fork()
            if child == 0:
                signal.alarm(25)  # kills this child if it hangs
                check_refused(manager, reader, ours, handle, least=40)
                optimizer.step()  # hooks
                state["w"].sum().backward()
                torch.zeros(3).share_memory_()
                track(torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))]))
                import gc
                del manager, reader, ours, handle, state, optimizer
                gc.collect()
                assert os.fork() or os._exit(0) is None
                {ending}
            _, status = os.waitpid(child, 0)
            done.set()
            holder.join()
            assert os.waitstatus_to_exitcode(status) == 0, os.waitstatus_to_exitcode(status)
        assert not handle.committed.done()
        optimizer.step()
        handle.result(30)
        assert number_at() == 1.0
        """,
        tmp_path / "c",
        preface=CALLS,
    )
    ended.assert_clean()
    assert ended.stderr == ""


def test_processes_of_multiprocessing_are_refused_and_their_children_too(tmp_path):
    ended = run_script(
        """
        import multiprocessing
        state, optimizer = owned(1)
        handle = ds.async_save(state, path, reads=3600)
        context = multiprocessing.get_context("fork")
        while "reading" not in repr(handle):
            time.sleep(0.01)

        def run(depth):
            signal.alarm(25)
            check_refused(least=20)
            optimizer.step()  # waits for no read of the parent's, nor does what follows
            state["w"].share_memory_()
            if depth:
                process = context.Process(target=run, args=(depth - 1,))
                process.start()
                process.join()
                assert process.exitcode == 0

        run_in = context.Process(target=run, args=(1,))
        run_in.start()
        run_in.join()
        assert run_in.exitcode == 0
        optimizer.step()
        handle.result(30)
        assert number_at() == 1.0
        """,
        tmp_path / "c",
        preface=CALLS,
    )
    ended.assert_clean()


def test_children_of_a_process_that_has_only_imported_the_package_save_and_load(tmp_path):
    ended = run_script(
        """
        import dcp_datastates as ds
        from dcp_datastates.storage.attempt import next_attempt
        ds.configure_engine(copy_threads=1)
        state, optimizer = owned(0)
        optimizer.step()
        children = []
        for number in (1, 2):
            child = os.fork()
            if child == 0:
                mine, optimizer = owned(number)
                ds.save(mine, f"{path}-{number}/c")  # not beside the others: nothing there tells of them
                assert number_at(f"{path}-{number}/c") == number
                with open(f"{path}-{number}.attempt", "w") as file:
                    file.write(next_attempt(None).name)
                sys.exit(0)
            children.append(child)
        for child in children:
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        ds.save(state, path)
        drawn = {next_attempt(None).name, *(open(f"{path}-{number}.attempt").read() for number in (1, 2))}
        assert len({name.partition("-")[0] for name in drawn}) == 3, drawn  # in a bucket, nothing else tells them apart
        """,
        tmp_path / "c",
    )
    ended.assert_clean()


def test_every_function_for_forks_and_ends_of_the_process_has_a_reason():
    found = {
        str(file.relative_to(ROOT))
        for file in ROOT.rglob("*.py")
        for call in ("register_at_fork(", "atexit.register(", "_register_atexit")
        if call in file.read_text()
    }
    assert found == set(AT_FORKS_AND_ENDS), "use process/ending.py, or say in this file why"


def test_the_locks_of_modules_are_reentrant():
    """A signal handler, or a destructor, may come to the thread that holds one."""
    found = {
        f"{file.name}: {line}"
        for file in ROOT.rglob("*.py")
        for line in re.findall(
            r"^\w+ = threading\.(?:Lock|Condition|Event|Semaphore)\(.*", file.read_text(), re.M
        )
    }
    assert found == set(), "use threading.RLock"


def _indented(text):
    return "".join(f"        {line}" for line in text.splitlines(keepends=True))
