"""A writer's life: made and never used, used once, used for every save, closed, closed again."""

import _thread
import gc
import queue
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.state.checkpoints import (
    assert_same,
    async_save,
    committed,
    load,
    load_everything,
    raises,
    save,
    writer,
    zeros,
)
from support.state.states import large
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata

from dcp_datastates import DataStatesReader, DataStatesSavePlanner, track
from dcp_datastates.dcp.compat import FIELDS
from dcp_datastates.errors import DataStatesError
from dcp_datastates.io import engine as engine_module


def test_a_writer_that_was_never_used_closes_silently(tmp_path, capfd, recwarn):
    path = tmp_path / "c"
    unused = writer(path)
    unused.close()
    unused.close()
    del unused
    writer()  # not even closed
    gc.collect()
    assert not path.exists()
    assert capfd.readouterr() == ("", "")
    assert not recwarn.list


def test_close_drains_and_is_idempotent(tmp_path):
    state = large(32)
    ours = writer(tmp_path, reads=0.5)
    future = async_save(state, tmp_path, by=ours)
    ours.close()
    assert committed(tmp_path), "close() returned before the save in flight was committed"
    ours.close()
    future.result(60)
    assert_same(load(zeros(state), tmp_path), state)


def test_a_closed_writer_refuses_saves_by_name(tmp_path):
    ours = writer(tmp_path)
    ours.close()
    with raises(DataStatesError, "close"):
        async_save({"w": torch.ones(1)}, tmp_path, by=ours).result(60)
    assert not committed(tmp_path)


@pytest.mark.parametrize("reads", [0.2, "immediate"])
def test_one_writer_reused_with_checkpoint_id_each_save_to_its_own_place(reads, tmp_path):
    ours = writer(reads=reads)
    tensor = torch.zeros(100_000)
    futures = []
    for number in range(6):
        tensor.fill_(number)
        futures.append(
            async_save(
                {"t": tensor, "n": number}, None, by=ours, checkpoint_id=tmp_path / str(number)
            )
        )
    for future in futures:
        future.result(60)
    for number in range(6):
        found = load_everything(tmp_path / str(number))
        assert_same(found, {"t": torch.full((100_000,), float(number)), "n": number})


def test_a_synchronous_save_does_not_take_over_an_asynchronous_one_in_flight(tmp_path):
    ours = writer(reads=1.0)
    first = async_save(
        {"n": torch.full((100_000,), 1.0)}, None, by=ours, checkpoint_id=tmp_path / "a"
    )
    dcp.save(
        {"n": torch.full((9,), 2.0)},
        checkpoint_id=tmp_path / "b",
        storage_writer=ours,
        no_dist=True,
    )
    first.result(60)
    assert load_everything(tmp_path / "a")["n"].tolist() == [1.0] * 100_000
    assert load_everything(tmp_path / "b")["n"].tolist() == [2.0] * 9


def test_a_synchronous_save_opens_the_window_of_an_asynchronous_one_rather_than_wait(tmp_path):
    parameter = torch.nn.Parameter(torch.ones(100_000))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    track(optimizer)
    future = async_save({"p": parameter}, tmp_path / "a", reads=30)
    began = time.monotonic()
    save({"n": torch.ones(3)}, tmp_path / "b")
    assert time.monotonic() - began < 15, "dcp.save waited for a backward pass that cannot come"
    future.result(60)
    assert committed(tmp_path / "a")
    assert committed(tmp_path / "b")


def test_last_save_tells_what_was_written(tmp_path):
    ours = writer(tmp_path)
    async_save(large(16), tmp_path, by=ours).result(60)
    ours.wait()
    told = ours.last_save
    size = sum(file.stat().st_size for file in tmp_path.rglob("*.safetensors"))
    assert 16 << 20 <= told.written_bytes <= size + (1 << 16)
    assert 0 <= told.call_seconds < 60
    assert told.gate_seconds >= 0
    assert 0 <= told.read_seconds <= told.total_seconds < 60
    assert isinstance(told.direct, bool)


# --- one engine -----------------------------------------------------------------------------------


def test_writers_share_one_engine_which_grows_when_asked_for_more(tmp_path):
    save({"w": torch.ones(3)}, tmp_path / "a", host_cache_size="64MiB")
    shared = engine_module.engine()
    save({"w": torch.ones(3)}, tmp_path / "b", host_cache_size="64MiB")
    assert engine_module.engine() is shared
    size = shared.host_cache_bytes
    save({"w": torch.ones(3)}, tmp_path / "c", host_cache_size=size + (16 << 20))
    assert engine_module.engine() is shared
    assert shared.host_cache_bytes >= size + (16 << 20)
    save({"w": torch.ones(3)}, tmp_path / "d", host_cache_size="32MiB")
    assert shared.host_cache_bytes >= size + (16 << 20), "a smaller wish must not shrink it"
    for name in "abcd":
        assert committed(tmp_path / name)


def test_growing_while_a_save_is_in_flight_keeps_that_save_whole(tmp_path):
    state = large(96)
    future = async_save(state, tmp_path / "a", reads="immediate")
    size = engine_module.engine().host_cache_bytes
    save({"w": torch.ones(3)}, tmp_path / "b", host_cache_size=size + (32 << 20))
    future.result(60)
    assert_same(load(zeros(state), tmp_path / "a"), state)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_state_is_let_go_after_the_save(asynchronous, tmp_path):
    tensor = torch.ones(200_000)
    alive = weakref.ref(tensor)
    ours, planner = writer(tmp_path, reads="all"), DataStatesSavePlanner()
    if asynchronous:
        async_save({"w": tensor}, tmp_path, by=ours, planner=planner).result(60)
    else:
        dcp.save({"w": tensor}, storage_writer=ours, planner=planner)
    ours.wait()
    del tensor
    gc.collect()
    assert alive() is None, "the writer keeps the state alive after the save"


class _OwnMetadata(Metadata):
    """A planner's."""


class _Own(DefaultSavePlanner):
    def create_global_plan(self, all_plans):
        plans, metadata = super().create_global_plan(all_plans)
        return plans, _OwnMetadata(**vars(metadata))


@pytest.mark.parametrize("kind", [DefaultSavePlanner, DataStatesSavePlanner, _Own])
def test_the_metadata_that_dcp_returns_are_those_of_the_checkpoint(kind, tmp_path):
    metadata = async_save({"w": torch.ones(10)}, tmp_path, planner=kind()).result(60)
    assert isinstance(metadata, _OwnMetadata) == (kind is _Own)
    assert metadata.state_dict_metadata.keys() == {"w"}
    expected = vars(DataStatesReader(tmp_path).read_metadata())
    for name in FIELDS - {"storage_meta"}:  # of the save, of the load
        assert vars(metadata)[name] == expected[name]


def test_a_save_in_a_pool_of_threads_that_stays_is_over_with_its_work(tmp_path):
    ours = writer()
    with ThreadPoolExecutor(1) as pool:
        for number in range(2):
            staged = ours.stage({"n": torch.tensor(number)})
            done = pool.submit(
                dcp.save, staged, storage_writer=ours, checkpoint_id=tmp_path / str(number)
            )
            done.result(60)
        began = time.monotonic()
        ours.wait()
        assert time.monotonic() - began < 30
    assert load({"n": torch.tensor(0)}, tmp_path / "1")["n"].item() == 1


def test_a_callback_of_dcps_future_may_take_its_time(tmp_path):
    """It runs in DCP's thread, when the save is over: the next save does not wait for it."""
    go_on = threading.Event()
    first = dcp.async_save(
        {"n": torch.tensor(1)}, storage_writer=writer(tmp_path / "1", reads="immediate")
    )
    first.add_done_callback(lambda _: go_on.wait(60))
    first.result(60)
    dcp.async_save(
        {"n": torch.tensor(2)}, storage_writer=writer(tmp_path / "2", reads="immediate")
    ).result(30)
    go_on.set()


def test_saves_in_threads_that_python_has_not_made(tmp_path):
    outcomes = queue.SimpleQueue()

    def run():
        try:
            for number in range(2):
                dcp.save({"n": torch.tensor(number)}, storage_writer=writer(tmp_path / str(number)))
            outcomes.put(None)
        except BaseException as error:
            outcomes.put(error)

    _thread.start_new_thread(run, ())
    assert outcomes.get(timeout=60) is None
    # What watches over saves that DCP runs is still there.
    dcp.async_save({"n": torch.tensor(2)}, storage_writer=writer(tmp_path / "2")).result(60)
    assert load({"n": torch.tensor(0)}, tmp_path / "2")["n"].item() == 2
