"""The step gate does not wait without a bound, not in a signal handler either, and leaves nothing behind."""

import gc

import pytest
import torch
from support.jobs.ranks import ranks
from support.jobs.scripts import run_script
from support.state.checkpoints import (
    assert_same,
    async_save,
    committed,
    load,
    raises,
    writer,
    zeros,
)
from support.state.loops import owned
from support.state.planners import LatePlanner
from support.waiting import await_that
from torch._dynamo.testing import CompileCounter
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from dcp_datastates import track
from dcp_datastates.errors import SaveStalledError

SECONDS = 60.0


def test_a_save_that_is_never_planned_is_given_up_and_training_goes_on(tmp_path, caplog):
    state, optimizer = owned(value=2.0)
    planner = LatePlanner()
    future = async_save(state, tmp_path, planner=planner, commit_timeout=1.0)
    optimizer.step()
    assert state["w"][0] == 1.0
    planner.may_plan.set()
    with raises(SaveStalledError, "commit_timeout=1", "plan"):
        future.result(SECONDS)
    assert "training goes on" in caplog.text
    assert not committed(tmp_path)
    async_save(state, tmp_path).result(SECONDS)
    assert_same(load(zeros(state), tmp_path), state)


def test_moving_memory_waits_no_longer_than_a_step(tmp_path):
    state, _optimizer = owned(value=2.0)
    planner = LatePlanner()
    future = async_save(state, tmp_path, planner=planner, commit_timeout=1.0)
    state["w"].share_memory_()
    planner.may_plan.set()
    with raises(SaveStalledError):
        future.result(SECONDS)
    assert not committed(tmp_path)


SLOW_STORAGE = """
os.environ["DCP_DATASTATES_FAILPOINTS"] = "flush.write.before=sleep:{pause}"
parameter = torch.nn.Parameter(torch.full((32 << 20,), 2.0))  # four times the host cache
optimizer = torch.optim.SGD([parameter], lr=1.0)
track(optimizer)
parameter.grad = torch.ones_like(parameter)
saving = writer(host_cache_size="32MiB", {options})
future = dcp.async_save({{"w": parameter.detach()}}, storage_writer=saving)
"""

STEPPED = """
began = time.monotonic()
optimizer.step()
waited = time.monotonic() - began
assert parameter[0].item() == 1.0
"""

LOADED = """
future.result(60)
found = {"w": torch.zeros(32 << 20)}
dcp.load(found, storage_reader=DataStatesReader(path), no_dist=True)
assert found["w"].unique().tolist() == [2.0]
"""


def _slow(path, then, *, pause, options, before=""):
    script = before + SLOW_STORAGE.format(pause=pause, options=options) + then
    ended = run_script(script, path, timeout=90)
    ended.assert_clean()
    return ended


def test_reads_that_stand_still_fail_the_save_and_nothing_is_committed(tmp_path):
    failed = """
try:
    future.result(60)
except BaseException as error:
    assert "SaveStalledError" in repr(error), error
else:
    raise AssertionError("committed")
assert not os.path.exists(path + "/.metadata")
"""
    _slow(tmp_path / "c", STEPPED + failed, pause=2.5, options="commit_timeout=1.0")


def test_a_slow_save_that_goes_on_is_waited_for(tmp_path):
    longer = "assert waited > 1.5, waited  # than the timeout"
    _slow(tmp_path / "c", STEPPED + longer + LOADED, pause=0.6, options="commit_timeout=1.5")


def test_a_signal_handler_saves_while_the_gate_waits(tmp_path):
    handler = """
import threading

def handler(*_):
    mine = {"w": torch.full((1_000_000,), 9.0)}
    dcp.save(mine, storage_writer=writer(path + "-preempted"), no_dist=True)
    print("saved")

signal.signal(signal.SIGTERM, handler)
"""
    interrupted = """
time.sleep(1)  # planned by now: the step opens the window, and is the first to wait for the reads
threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
optimizer.step()
assert number_at(path + "-preempted") == 9.0
"""
    ended = _slow(
        tmp_path / "c", interrupted + LOADED, pause=0.3, options="reads=3600", before=handler
    )
    assert ended.stdout.split() == ["saved"]


def test_a_signal_handler_saves_whatever_it_interrupts(tmp_path):
    """At random moments of saves and steps; the handler's save is done or fails, and nothing hangs."""
    ended = run_script(
        """
import random
state, optimizer = owned(0)
handled = []

ours = writer(path + "-h", commit_timeout=1.0)

def handler(*_):
    try:
        dcp.save({"w": torch.full((1_000_000,), 9.0)}, storage_writer=ours, no_dist=True)
        handled.append(None)
    except BaseException as error:  # DCP's CheckpointException is one
        handled.append(error)

signal.signal(signal.SIGALRM, handler)
for number in range(12):
    signal.setitimer(signal.ITIMER_REAL, random.uniform(0.0001, 0.03))
    expected = state["w"][0].item()
    future = dcp.async_save(state, storage_writer=writer(commit_timeout=5.0))
    optimizer.step()
    future.result(30)
    assert number_at() == expected
    signal.setitimer(signal.ITIMER_REAL, 0)
print(sum(error is None for error in handled), len(handled), [error for error in handled if error])
""",
        tmp_path / "c",
        timeout=120,
    )
    ended.assert_clean()
    assert int(ended.stdout.split()[0]) > 0, ended.stdout


def test_gradient_hooks_go_with_their_optimizer(tmp_path):
    model = torch.nn.Linear(512, 512)
    ours = writer(reads=0.05)
    for number in range(10):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        track(optimizer)
        path = tmp_path / str(number % 2)
        async_save(model.state_dict(), None, by=ours, checkpoint_id=path).result(SECONDS)
    gc.collect()  # of an earlier optimizer, which may be in a cycle
    hooks = [len(parameter._post_accumulate_grad_hooks) for parameter in model.parameters()]
    assert max(hooks) == 1
    del optimizer
    gc.collect()
    assert [len(parameter._post_accumulate_grad_hooks) for parameter in model.parameters()] == [
        0
    ] * 2


def test_a_step_waits_for_what_is_tracked_beside_its_optimizer(tmp_path):
    parameter, low = torch.nn.Parameter(torch.zeros(1)), torch.zeros(1_000_000)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    track(optimizer, also=[low])
    future = async_save({"low": low}, tmp_path, reads=3600)
    optimizer.step()
    low.fill_(9)
    future.result(SECONDS)
    assert_same(load({"low": torch.ones_like(low)}, tmp_path), {"low": torch.zeros_like(low)})


@pytest.mark.parametrize("whole", [False, True])
def test_a_compiled_step_waits_for_each_save_and_compiles_once(tmp_path, whole):
    """``whole``: the step itself is compiled; else a function that calls it."""
    torch.compiler.reset()
    parameter = torch.nn.Parameter(torch.full((1_000_000,), 9.0))
    optimizer = torch.optim.SGD([parameter], lr=torch.tensor(1.0))
    parameter.grad = torch.ones_like(parameter)
    compiles = CompileCounter()
    step = torch.compile(optimizer.step if whole else lambda: optimizer.step(), backend=compiles)
    step()
    assert compiles.frame_count == 1
    for number in range(3):
        before = parameter.detach().clone()
        future = async_save({"w": parameter}, tmp_path / str(number), reads=3600)
        assert not future.done()
        step()
        future.result(SECONDS)
        assert torch.equal(parameter.detach(), before - 1)
        found = load({"w": torch.zeros(1_000_000)}, tmp_path / str(number))
        assert torch.equal(found["w"], before)
    assert compiles.frame_count == 1


def _offloaded(local):
    """As FSDP2's CPUOffloadPolicy leaves a parameter: a mesh of GPUs, and the shard on the host."""
    mesh = DeviceMesh("cuda", [0], _init_backend=False, _rank=0)
    spec = DTensorSpec(mesh, (Shard(0),), TensorMeta(local.shape, local.stride(), local.dtype))
    return torch.nn.Parameter(DTensor(local, spec, requires_grad=False))


def test_offloaded_parameters_get_no_hook_and_are_saved_before_they_change(tmp_path):
    """With a hook, FSDP2 would wait for the copy of each gradient to the host."""
    parameter = _offloaded(torch.full((1_000_000,), 2.0))
    optimizer = torch.optim.SGD([parameter], lr=1.0, foreach=False)
    track(optimizer)
    parameter.grad = torch.ones_like(parameter)
    future = async_save({"w": parameter}, tmp_path, reads=3600)
    assert not parameter._post_accumulate_grad_hooks
    optimizer.step()
    future.result(SECONDS)
    assert parameter._local_tensor.unique().tolist() == [1.0]
    assert load({"w": torch.zeros(1_000_000)}, tmp_path)["w"].unique().tolist() == [2.0]


def _plain(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def _with_an_empty_group(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.add_param_group({"params": []})
    return optimizer


def _beside_offloaded(model):
    parameters = [*model.parameters(), _offloaded(torch.ones(8))]
    return torch.optim.SGD(parameters, lr=1.0, foreach=False)


@pytest.mark.parametrize("make", [_plain, _with_an_empty_group, _beside_offloaded])
def test_the_next_backward_pass_opens_the_window(make, tmp_path):
    model = torch.nn.Linear(512, 512)
    for number in range(2):
        optimizer = make(model)  # a newer one
        track(optimizer)
        future = async_save(model.state_dict(), tmp_path / str(number), reads=3600)
        model(torch.ones(1, 512)).sum().backward()
        await_that(future.done, SECONDS)
        model.zero_grad()


@ranks(1)
def test_on_a_cpu_mesh_the_backward_pass_of_fsdp_opens_the_window(shared_dir):
    """There, FSDP2 has no copy to wait for."""
    model = torch.nn.Linear(512, 512)
    fully_shard(model, offload_policy=CPUOffloadPolicy(pin_memory=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    track(optimizer)
    future = async_save(model.state_dict(), shared_dir, reads=3600)
    model(torch.ones(1, 512)).sum().backward()
    await_that(future.done, SECONDS)
