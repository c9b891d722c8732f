"""What can go wrong between a device, its driver and the threads of a save, on the fake driver."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.devices.fake_cuda import CACHE, FakeCuda, Stepper, differing, model, save, saved_as_now
from support.jobs.scripts import HASTY_END, run_program
from support.tiers import sampled, tries
from support.waiting import await_that
from torch.distributed._shard import sharded_tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from dcp_datastates import DataStatesReader, DataStatesWriter
from dcp_datastates.io import engine
from dcp_datastates.ranks import failure_detector as detector
from dcp_datastates.ranks.failure_detector import Beat
from dcp_datastates.ranks.rank_set import of_store
from dcp_datastates.saving.operation import SaveOperation
from dcp_datastates.staging import stage
from dcp_datastates.staging import staged_state as walk
from dcp_datastates.staging.deferred_reads import DeferredReads
from dcp_datastates.staging.stage import EagerCopies

SECONDS = 100.0


@pytest.fixture
def snapshots(monkeypatch: pytest.MonkeyPatch) -> list[DeferredReads]:
    """Those of all saves, as they are captured."""
    made: list[DeferredReads] = []
    create = DeferredReads.__init__

    def created(self: DeferredReads, *args: Any) -> None:
        create(self, *args)
        made.append(self)

    monkeypatch.setattr(DeferredReads, "__init__", created)
    return made


@contextmanager
def stalled(cuda: FakeCuda) -> Iterator[None]:
    cuda.lib.fake_cuda_stall(1)
    try:
        yield
    finally:
        cuda.lib.fake_cuda_stall(0)


# ---- writes that no step announces ---------------------------------------------------------------


@pytest.mark.parametrize("saves", tries(2, 6))
def test_a_write_behind_the_queue_and_before_the_reads_tears(
    cuda: FakeCuda, tmp_path: Path, snapshots: list[DeferredReads], saves: int
) -> None:
    """All reads have been given to the driver, which has not done them: no one has let the write pass."""
    stepper = Stepper(cuda, model(4))
    cuda.await_pinned(CACHE)
    torn = index = 0
    while index < saves or not torn:
        index += 1
        cuda.configure(seed=index, max_delay_us=20000, piece=16384)
        stepper.step()
        expected = stepper.now()
        future = save(tmp_path / f"{index}", stepper.named)
        await_that(_is_queued(snapshots[-1]))
        stepper.write_all(1)
        torn += _refused_as_torn(future, cuda, tmp_path / f"{index}", expected)
        assert torn or index < 20


def _refused_as_torn(
    future: Any, cuda: FakeCuda, path: Path, expected: dict[str, torch.Tensor]
) -> bool:
    """Or else committed, and whole."""
    error = future.exception()
    cuda.synchronize()
    if error is None:
        assert differing(path, expected) == []
        return False
    assert "changed before" in repr(error)
    return True


def _is_queued(reads: DeferredReads) -> Callable[[], bool]:
    def holds() -> bool:
        job = reads._job
        return job is not None and all(
            job.wait_queued(portion.group, 0.0) for portion in reads._portions
        )

    return holds


@pytest.mark.parametrize("saves", tries(2, 6))
def test_a_step_behind_the_gate_tears_nothing(cuda: FakeCuda, tmp_path: Path, saves: int) -> None:
    """It moves the counters, too, and the reads may be done much later."""
    stepper = Stepper(cuda, model(4))
    cuda.await_pinned(CACHE)
    for index in range(saves):
        cuda.configure(seed=index, max_delay_us=20000, piece=16384)
        with saved_as_now(stepper, tmp_path / f"{index}"):
            stepper.step()
            stepper.write_all(1)


@pytest.mark.parametrize("saves", tries(2, 6))
def test_a_write_on_another_stream_after_a_foreign_step_tears(
    cuda: FakeCuda, tmp_path: Path, saves: int
) -> None:
    """An optimizer that was not known at the call passes the gate, and owns nothing of what is saved."""
    stepper = Stepper(cuda, {"w": torch.nn.Parameter(torch.randn(4096, 1024))})
    side = cuda.new_stream()
    cuda.await_pinned(CACHE)
    torn = index = 0
    while index < saves or not torn:
        index += 1
        cuda.synchronize()
        cuda.configure(seed=index, max_delay_us=20000, piece=16384)
        expected = stepper.now()
        future = save(tmp_path / f"{index}", stepper.named)
        Stepper(cuda, model(1, 3, 8)).step()
        with cuda.current(side):
            stepper.write_all(1)
        torn += _refused_as_torn(future, cuda, tmp_path / f"{index}", expected)
        assert torn or index < 20


def test_an_optimizer_that_was_unknown_and_owns_what_is_saved_tears_nothing(
    cuda: FakeCuda, tmp_path: Path
) -> None:
    stepper = Stepper(cuda, model(4))
    cuda.await_pinned(CACHE)
    for index in range(4):
        cuda.configure(seed=index, max_delay_us=20000, piece=16384)
        with saved_as_now(stepper, tmp_path / f"{index}"):
            torch.optim.Optimizer.profile_hook_step(lambda optimizer: None)(
                Counting(list(stepper.named.values()), {})
            )
            stepper.write_all(1)


class Counting(torch.optim.Optimizer):
    """Steps nothing by itself."""


def test_memory_is_not_freed_before_the_device_has_read_it(cuda: FakeCuda, tmp_path: Path) -> None:
    stepper = Stepper(cuda, model(2))
    cuda.await_pinned(CACHE)
    stepper.step()
    expected = stepper.now()
    name = next(iter(stepper.named))
    with stalled(cuda):
        future = save(tmp_path / "a", stepper.named)
        freeing = threading.Thread(
            target=lambda: stepper.named[name].untyped_storage().resize_(0), daemon=True
        )
        freeing.start()
        freeing.join(0.5)
        assert freeing.is_alive()
    freeing.join(SECONDS)
    assert not freeing.is_alive()
    future.result()
    assert differing(tmp_path / "a", expected) == []


# ---- memory that a device still writes to ------------------------------------------------------------


def test_who_gives_up_waits_for_eager_copies(
    cuda: FakeCuda, tmp_path: Path, snapshots: list[DeferredReads]
) -> None:
    """Also while DCP's thread waits for the same."""
    running = cuda.adopt(torch.ones(1 << 20))  # no tensor owns it
    cuda.await_pinned(CACHE)
    native = engine.engine(CACHE)
    with stalled(cuda):
        future = save(tmp_path / "a", {"running": running})
        await_that(lambda: snapshots[0]._thread is not None)
        given_up = threading.Thread(
            target=snapshots[0].fail, args=(RuntimeError("a rank is lost"),)
        )
        given_up.start()
        given_up.join(0.5)
        assert given_up.is_alive()
        assert native.stats().slab_segments
    given_up.join(SECONDS)
    with pytest.raises(BaseException, match="a rank is lost"):
        future.result()
    assert not native.stats().slab_segments


def test_a_fault_of_one_device_frees_nothing_that_another_writes_to(
    cuda: FakeCuda, tmp_path: Path
) -> None:
    first, second = (cuda.adopt(torch.ones(1 << 20), device) for device in range(2))
    native = engine.engine(CACHE)
    native.open_device(1)
    cuda.await_pinned(CACHE)
    with stalled(cuda):
        cuda.fail_next("cuEventQuery", 1)
        asked = cuda.count("cuEventQuery")
        future = save(tmp_path / "a", {"first": first, "second": second})
        await_that(lambda: cuda.count("cuEventQuery") > asked + 10)  # the fault, and how it stays
        assert native.stats().slab_segments
    with pytest.raises(BaseException, match="cuEventQuery"):
        future.result()
    assert not native.stats().slab_segments


def test_a_copy_refused_half_way_frees_nothing_that_others_write_to(
    cuda: FakeCuda, tmp_path: Path
) -> None:
    first, second = (cuda.adopt(torch.ones(1 << 18)) for _ in range(2))
    cuda.await_pinned(CACHE)
    native = engine.engine(CACHE)
    held: list[int] = []

    def look() -> None:
        await_that(lambda: cuda.count("cuEventQuery") > asked + 10)  # it waits
        held.append(native.stats().slab_segments)
        cuda.lib.fake_cuda_stall(0)

    with stalled(cuda):
        asked = cuda.count("cuEventQuery")
        cuda.fail_next("cuMemcpyDtoHAsync_v2", 2, 1)
        looking = threading.Thread(target=look)
        looking.start()
        with pytest.raises(BaseException, match="cuMemcpyDtoHAsync"):
            save(tmp_path / "a", {"first": first, "second": second})
        looking.join()
    assert held[0]
    assert not native.stats().slab_segments


def test_dense_copies_live_until_the_device_was_told_to_read_them(
    cuda: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else another thread on the same stream is given their memory, and its kernel comes first."""
    native = engine.engine(CACHE)
    strided = cuda.adopt(torch.randn(300, 1000)).t()
    made: list[weakref.ref[torch.Tensor]] = []
    memory = []
    alive = []

    def dense(tensor: torch.Tensor) -> torch.Tensor:
        memory.append(cuda.adopt(tensor.contiguous()))  # a fake device's, which is not reused
        copied = memory[-1].view(memory[-1].shape)
        made.append(weakref.ref(copied))
        return copied

    class Watched:
        def __getattr__(self, name: str) -> Any:
            return getattr(native, name)

        def copy_to_host(self, *args: Any) -> Any:
            alive.extend(reference() is not None for reference in made)
            return native.copy_to_host(*args)

    make = EagerCopies.make
    monkeypatch.setattr(stage.accelerator, "dense", dense)
    monkeypatch.setattr(EagerCopies, "make", lambda self, _, *args: make(self, Watched(), *args))
    save(tmp_path / "a", {"strided": strided}).result()
    assert alive == [True]


# ---- DCP's thread has other current streams than the caller -----------------------------------------


@pytest.mark.parametrize("saves", tries(3, 8))
def test_what_a_planner_makes_comes_after_the_callers_stream(
    cuda: FakeCuda, tmp_path: Path, saves: int
) -> None:
    made = cuda.adopt(torch.zeros(300, 1000))

    class Planner(DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            return made

    side = cuda.new_stream()
    for index in range(saves):
        cuda.synchronize()
        cuda.configure(seed=index, max_delay_us=20000, piece=16384)
        values = torch.full((300, 1000), float(index + 1))
        with cuda.current(side):
            cuda.write(made, values)
            future = dcp.async_save(
                {"x": torch.zeros(300, 1000)},  # nothing on a device, as far as the capture sees
                storage_writer=DataStatesWriter(tmp_path / f"{index}", host_cache_size=CACHE),
                planner=Planner(),
            )
        future.result()
        assert differing(tmp_path / f"{index}", {"x": values}) == []


@pytest.mark.parametrize("saves", tries(3, 8))
def test_copies_of_sharded_tensors_come_after_the_callers_stream(
    cuda: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saves: int
) -> None:
    def sharded() -> Any:
        meta = sharded_tensor.ShardMetadata([0, 0], [300, 1000], "rank:0/cpu")
        shard = sharded_tensor.Shard(torch.zeros(300, 1000), meta)
        return sharded_tensor.init_from_local_shards([shard], 300, 1000)

    copy_sharded = walk.copy_sharded
    values = torch.zeros(300, 1000)

    def on_device(tensor: Any, name: str) -> Any:
        copied = copy_sharded(tensor, name)
        local = cuda.adopt(copied.local_shards()[0].tensor)
        cuda.write(local, values)  # what ``clone()`` is on a device: a kernel of the current stream
        return copied

    monkeypatch.setattr(walk, "copy_sharded", on_device)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        source, side = sharded(), cuda.new_stream()
        for index in range(saves):
            cuda.synchronize()
            cuda.configure(seed=index, max_delay_us=20000, piece=16384)
            values = torch.full((300, 1000), float(index + 1))
            with cuda.current(side):
                future = save(tmp_path / f"{index}", {"x": source})
            future.result()
            found = sharded()
            dcp.load({"x": found}, storage_reader=DataStatesReader(tmp_path / f"{index}"))
            assert torch.equal(found.local_shards()[0].tensor, values)
    finally:
        dist.destroy_process_group()


# ---- ranks that are lost ---------------------------------------------------------------------------


def test_a_heart_beats_on_while_a_save_is_given_up(
    cuda: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank dies; on another, the collective with it hangs on the device, and eager copies behind that."""
    monkeypatch.setattr(detector, "SILENCE_SECONDS", 5.0)
    monkeypatch.setattr(detector, "_ACTIVE_SECONDS", 0.2)
    monkeypatch.setattr(detector, "is_gone", lambda who: False)  # other machines

    def beating(rank: int) -> detector.FailureDetector:
        rank_set = of_store(rank, (0, 1, 2), dist.FileStore(str(tmp_path / "store"), 3))
        made = detector.FailureDetector(rank_set, rank_set.connect("commit"), Beat)
        made.save_started()
        return made

    running = cuda.adopt(torch.ones(1 << 20))
    cuda.await_pinned(CACHE)
    detectors = [beating(rank) for rank in range(3)]
    saves: list[SaveOperation] = []
    created = SaveOperation.__init__

    def create(self: SaveOperation, *args: Any, **options: Any) -> None:
        created(self, *args, **options)
        saves.append(self)

    monkeypatch.setattr(SaveOperation, "__init__", create)
    try:
        with stalled(cuda):
            future = save(tmp_path / "a", {"running": running})
            detectors[1].save_started(saves[0]._lost)
            await_that(lambda: all(each.value for each in detectors[0]._watched.values()))
            detectors[2].close()
            await_that(lambda: saves[0].error is not None)
            time.sleep(1.5 * detector.SILENCE_SECONDS)
            assert [loss.rank for loss in detectors[0].losses()] == [2]
        assert "rank 2" in str(future.exception())
    finally:
        for each in detectors:
            each.close()


# ---- what is done in the background, and cannot be --------------------------------------------------


def test_a_cache_that_cannot_be_pinned_is_told_of_once(
    cuda: FakeCuda, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stepper = Stepper(cuda, model(1))
    native = engine.engine(CACHE)
    for _ in range(8):
        cuda.fail_next("cuMemHostRegister_v2", 2)
    native.open_device(0)
    await_that(lambda: native.devices_prepared)
    for name in ("a", "b"):
        save(tmp_path / name, stepper.named).result()
        assert differing(tmp_path / name, stepper.now()) == []
    messages = [each.getMessage() for each in caplog.records]
    told = [each for each in messages if "cannot be pinned" in each]
    assert len(told) == 1
    assert "cuMemHostRegister_v2" in told[0]


def test_a_node_that_cannot_be_preferred_is_told_of_once(
    cuda: FakeCuda, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "dcp_datastates")
    cuda.lib.fake_cuda_set_attribute(134, 62)  # the device's node, which this machine lacks
    stepper = Stepper(cuda, model(1))
    cuda.await_pinned(CACHE)
    for name in ("a", "b"):
        save(tmp_path / name, stepper.named).result()
    told = [each.getMessage() for each in caplog.records if "far from" in each.getMessage()]
    assert len(told) == 1
    assert "NUMA node 62" in told[0]


# ---- drivers that are not as one would wish ------------------------------------------------------


def test_a_driver_of_12_8_alone(cuda: FakeCuda, tmp_path: Path) -> None:
    cuda.lib.fake_cuda_set_version(12080)
    stepper = Stepper(cuda, model(20, 64, 512))
    cuda.await_pinned(CACHE)
    with saved_as_now(stepper, tmp_path / "a"):
        stepper.step()


def test_one_copy_engine_for_each_direction(cuda: FakeCuda, tmp_path: Path) -> None:
    """Saves and loads at the same time, and steps behind them."""
    cuda.be_hostile("engines")
    stepper = Stepper(cuda, model(6, 1024))
    cuda.await_pinned(CACHE)
    for index in range(4):
        cuda.configure(seed=index + 1, max_delay_us=5000, piece=65536)
        expected = stepper.now()
        future = save(tmp_path / f"{index}", stepper.named)
        stepper.step()
        if index:
            found = {name: cuda.adopt(torch.zeros_like(value)) for name, value in expected.items()}
            dcp.load(found, storage_reader=DataStatesReader(tmp_path / f"{index - 1}"))
        future.result()
        assert differing(tmp_path / f"{index}", expected) == []


def test_a_stream_of_another_context_fails_the_save_by_name(cuda: FakeCuda, tmp_path: Path) -> None:
    stepper = Stepper(cuda, model(2))
    cuda.await_pinned(CACHE)
    foreign = cuda.new_stream(foreign=True)
    with cuda.current(foreign), pytest.raises(BaseException, match="cuEventRecord"):
        save(tmp_path / "a", stepper.named).result()
    stepper.step()
    expected = stepper.now()
    save(tmp_path / "b", stepper.named).result()
    assert differing(tmp_path / "b", expected) == []


# ---- the end --------------------------------------------------------------------------------------------

HANGS = """
import tempfile, time, torch
import torch.distributed.checkpoint as dcp
from support.devices.fake_cuda import CACHE, Stepper, installed, model
from dcp_datastates import DataStatesWriter
context = installed()
cuda = context.__enter__()
stepper = Stepper(cuda, model(6, 2048))  # six segments
state = dict(stepper.named)
if {eager}:
    state["running"] = cuda.adopt(torch.ones(1 << 20))
cuda.await_pinned(CACHE)
cuda.lib.fake_cuda_stall(1)  # a collective waits for a rank that is gone
writer = DataStatesWriter(tempfile.mkdtemp(), host_cache_size=CACHE, reads="immediate")
dcp.async_save(state, storage_writer=writer)
time.sleep(0.5)
raise SystemExit("training gave up")
"""


@pytest.mark.parametrize("eager", sampled([False, True], keep=[False]))
def test_a_process_ends_though_its_device_hangs(eager: bool, tmp_path: Path) -> None:
    ended = run_program(HASTY_END + HANGS.format(eager=eager), tmp_path, timeout=90)
    assert ended.returncode == 1, ended.stderr
    assert "training gave up" in ended.stderr
