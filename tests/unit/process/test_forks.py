"""Forked children: no lock of the parent's is held there, and no module has state that nothing forgets."""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import pkgutil
import queue
import threading
from pathlib import Path
from types import ModuleType

import pytest
from support.jobs.scripts import run_script

import dcp_datastates
from dcp_datastates.process import forks

LOCKS = (
    type(threading.Lock()),
    type(threading.RLock()),
    threading.Condition,
    threading.Event,
    threading.Semaphore,
    queue.Queue,
    queue.SimpleQueue,
)

VALID_IN_A_CHILD = {
    "dcp_datastates.storage.attempt": "names of attempts stay unique: they are claimed on storage",
    "dcp_datastates.checkpoints.first_rank": "counted by process group, which a child does not have",
    "dcp_datastates.ranks.rank_set": "looked up by the default group's store",
    "dcp_datastates.commit.publish": "what was published still is",
    "dcp_datastates.dcp.compat": "a warning that was given",
    "dcp_datastates.process.ending": "a child that is forked at the end ends, too",
    "dcp_datastates.storage.failpoints": "what the environment said",
    "dcp_datastates.storage.presence": "when storage last failed",
    "dcp_datastates.process.forks": "the registry itself",
    "dcp_datastates.io.devices": "what was logged; a child with the parent's CUDA context is lost anyway",
    "dcp_datastates.staging.ownership": "the optimizers exist in the child, too",
    "dcp_datastates.manager.naming": "names of models, which exist in the child, too",
    "dcp_datastates.manager.live_optimizer": "names of parameters, which exist in the child, too",
    "dcp_datastates.manager.optimizers": "what is kept for optimizers, which exist in the child, too",
    "dcp_datastates.format.metadata_check": "caches of constants",
    "dcp_datastates.format.dcp_stub": "caches of constants",
    "dcp_datastates.format.metadata_document": "caches of constants",
    "dcp_datastates.storage.operations": "numbers of a trace",
    "dcp_datastates.saving.output": "a line that was logged",
    "dcp_datastates.checkpoints.listing": "lines that were logged",
}
"""Modules whose state a child may go on with, and why."""

_CONTAINERS = {
    *("dict", "list", "set", "OrderedDict", "defaultdict", "deque", "count"),
    *("WeakSet", "WeakKeyDictionary", "WeakValueDictionary"),
}


def _modules() -> list[ModuleType]:
    found = pkgutil.walk_packages(dcp_datastates.__path__, "dcp_datastates.")
    names = [info.name for info in found if not info.name.endswith(("__main__", "_native"))]
    modules = []
    for name in names:
        # What integrates a library needs the library itself:
        optional = name.split(".")[1] in (
            *("torchtitan", "deepspeed", "lightning", "huggingface", "megatron"),
        )
        with contextlib.suppress(*[ImportError] * optional):
            modules.append(importlib.import_module(name))
    return modules


def _mutable_names(module: ModuleType) -> set[str]:
    """Names of a module that functions rebind, or that are bound to a container and are no constants."""
    tree = ast.parse(inspect.getsource(module))
    names = {name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names}
    for node in tree.body:
        if isinstance(node, ast.Assign):
            targets, value = node.targets, node.value
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            targets, value = [node.target], node.value
        else:
            continue
        made = value.func if isinstance(value, ast.Call) else None
        called = getattr(made, "attr", getattr(made, "id", ""))
        if called in _CONTAINERS or isinstance(value, (ast.Dict, ast.List, ast.Set)):
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return {name for name in names if not name.isupper() and not name.startswith("__")}


MODULES = _modules()


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_every_lock_of_a_module_is_free_in_a_child(module: ModuleType) -> None:
    bare = [name for name, value in vars(module).items() if isinstance(value, LOCKS)]
    assert bare == [], "use forks.ProcessLock"


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_every_module_with_state_says_what_a_child_forgets(module: ModuleType) -> None:
    names = _mutable_names(module)
    if module.__name__ in VALID_IN_A_CHILD:
        assert names, f"{module.__name__} has no state any more: take it off the list"
        return
    assert not names or module.__name__ in forks.handled(), (
        f"{names}: use forks.after_fork, or say in this file why a child may keep them"
    )


def test_a_child_forked_while_every_lock_is_held_saves_and_loads(tmp_path: Path) -> None:
    ended = run_script(
        """
import threading
import dcp_datastates
state, optimizer = owned(1)
dcp.async_save(state, storage_writer=writer()).result(30)  # makes what is made at first use
locks = [
    value
    for name, module in sorted(sys.modules.items())
    if name.startswith("dcp_datastates")
    for value in vars(module).values()
    if hasattr(type(value), "__enter__") and "Lock" in type(value).__name__ or
    type(value).__name__ == "lock"
]
assert len(locks) > 5, locks
held, done = threading.Event(), threading.Event()

def hold():
    import contextlib
    with contextlib.ExitStack() as stack:
        for lock in {id(lock): lock for lock in locks}.values():
            stack.enter_context(lock)
        held.set()
        done.wait()

holder = threading.Thread(target=hold)
holder.start()
held.wait()
child = os.fork()
if child == 0:
    signal.alarm(25)  # kills this child if it hangs
    code = 1
    try:
        mine, optimizer = owned(2)
        future = dcp.async_save(mine, storage_writer=writer(path + "-child"), no_dist=True)
        optimizer.step()
        future.result(20)
        code = 0 if number_at(path + "-child") == 2.0 else 2
    except BaseException:
        import traceback
        traceback.print_exc()
    finally:
        os._exit(code)
_, status = os.waitpid(child, 0)
done.set()
holder.join()
assert os.waitstatus_to_exitcode(status) == 0, os.waitstatus_to_exitcode(status)
""",
        tmp_path / "c",
    )
    ended.assert_clean()
