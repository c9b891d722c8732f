"""The device path, on the fake driver: what is saved is what the device's stream had made of it at the call."""

from __future__ import annotations

import logging
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.devices.fake_cuda import (
    CACHE,
    FakeCuda,
    Stepper,
    differing,
    installed,
    model,
    save,
    saved_as_now,
    writer,
)
from support.tiers import tries
from support.waiting import await_that

import dcp_datastates
from dcp_datastates import DataStatesReader, DataStatesWriter
from dcp_datastates.errors import ConfigurationError, DeviceError
from dcp_datastates.io import devices, engine
from dcp_datastates.staging.deferred_reads import DeferredReads

# ---- consistency under overlap ---------------------------------------------------------------------


SIZES = (1, 3, 17, 255, 1000, 4099, 16385, 70001, 257 * 1024)


@pytest.mark.parametrize("saves", tries(24, 400))
def test_steps_right_behind_every_save_of_tensors_of_many_sizes(
    cuda: FakeCuda, tmp_path: Path, saves: int
) -> None:
    """Kernels are enqueued for the very tensors that are being saved, as fast as the gate lets them; up to twelve saves
    are in flight.
    """
    cuda.await_pinned(CACHE)
    tensors = (torch.randn(size) for size in SIZES * 6)
    stepper = Stepper(cuda, {f"{n}": torch.nn.Parameter(each) for n, each in enumerate(tensors)})
    kept = DataStatesWriter(host_cache_size=CACHE, reads="immediate")
    in_flight = []
    for index in range(saves):
        cuda.configure(seed=index + 1, max_delay_us=500 if index % 2 else 2000)
        path, expected = tmp_path / f"{index}", stepper.now()
        future = dcp_datastates.async_save(stepper.named, path, writer=kept).upload_completion
        in_flight.append((path, expected, future))
        stepper.step()
        stepper.step()
        if len(in_flight) == 12 or index % 3 == 0 or index == saves - 1:
            for at, wanted, saved in in_flight:
                saved.result()
                assert differing(at, wanted) == []
                shutil.rmtree(at)
            in_flight.clear()
    assert cuda.count("violations") == 0


def test_two_devices_and_the_host_in_one_state(cuda: FakeCuda, tmp_path: Path) -> None:
    cuda.configure(seed=5)
    first = Stepper(cuda, model(2), device=0)
    second = Stepper(cuda, model(2), device=1)
    on_host = torch.randn(300, 1024)
    for index in range(4):
        state = {
            **{f"first.{name}": value for name, value in first.named.items()},
            **{f"second.{name}": value for name, value in second.named.items()},
            "host": on_host,
        }
        expected = {
            **{f"first.{name}": value for name, value in first.now().items()},
            **{f"second.{name}": value for name, value in second.now().items()},
            "host": on_host.clone(),
        }
        future = save(tmp_path / f"{index}", state)
        second.step()
        first.step()
        on_host.add_(1)
        future.result()
        assert differing(tmp_path / f"{index}", expected) == []


def test_engines_of_earlier_tests_that_end_late_end_no_context(tmp_path: Path) -> None:
    """Something may still hold an engine when its test is over."""
    held = []
    for name in ("first", "second", "third"):
        with installed() as cuda:
            stepper = Stepper(cuda, model())
            cuda.await_pinned(CACHE)
            if name == "third":
                held.clear()
            save(tmp_path / name, stepper.named).result()
            held.append(engine.engine(CACHE))


# ---- what no optimizer owns is copied on the caller's stream ------------------------------------------------


def test_buffers_are_as_they_were_in_the_stream(cuda: FakeCuda, tmp_path: Path) -> None:
    cuda.configure(seed=6, max_delay_us=5000)
    running = cuda.adopt(torch.zeros(300, 1000))
    strided = cuda.adopt(torch.arange(12.0).reshape(3, 4)).t()
    empty = cuda.adopt(torch.empty(0, 3))
    for index in range(5):
        cuda.write(running, torch.full((300, 1000), float(index)))
        future = save(
            tmp_path / f"{index}", {"running": running, "strided": strided, "empty": empty}
        )
        cuda.write(running, torch.full((300, 1000), -7.0))
        future.result()
        expected = {
            "running": torch.full((300, 1000), float(index)),
            "strided": strided.clone(),
            "empty": torch.empty(0, 3),
        }
        assert differing(tmp_path / f"{index}", expected) == []


@pytest.mark.parametrize("reads", ["blocking", "all"])
def test_reads(cuda: FakeCuda, tmp_path: Path, reads: str) -> None:
    cuda.configure(seed=7)
    stepper = Stepper(cuda, model())
    with saved_as_now(stepper, tmp_path / "a", reads=reads):
        stepper.step()


def test_a_buffer_larger_than_what_is_pinned_in_one_call(cuda: FakeCuda, tmp_path: Path) -> None:
    cache = 256 << 20
    buffer = cuda.adopt(torch.randn(40 << 20))
    cuda.await_pinned(cache)
    expected = {"buffer": buffer.clone()}
    future = save(tmp_path / "a", {"buffer": buffer}, host_cache_size=cache)
    cuda.write(buffer, torch.zeros_like(buffer))
    future.result()
    assert differing(tmp_path / "a", expected) == []
    assert cuda.count("pageable_copies") == cuda.count("violations") == 0


def test_synchronous_save(cuda: FakeCuda, tmp_path: Path) -> None:
    cuda.configure(seed=9, max_delay_us=20000)
    stepper = Stepper(cuda, model())
    stepper.step()
    dcp.save(stepper.named, storage_writer=writer(tmp_path / "a"))
    assert differing(tmp_path / "a", stepper.now()) == []


# ---- restoring --------------------------------------------------------------------------------------------


def test_restored_to_the_device(cuda: FakeCuda, tmp_path: Path) -> None:
    """After what the stream was given before, and before what it is given after."""
    values = {name: torch.randn(513, 2000) for name in ("a", "b", "c")}
    dcp.save(values, storage_writer=writer(tmp_path / "x"))
    for seed in range(4):
        cuda.configure(seed=seed, max_delay_us=20000)
        state = {name: cuda.adopt(torch.zeros(513, 2000)) for name in values}
        for tensor in state.values():
            cuda.write(tensor, torch.full((513, 2000), 9.0))  # an initialization
        dcp.load(state, storage_reader=DataStatesReader(tmp_path / "x"))
        for name, tensor in state.items():
            assert torch.equal(tensor, values[name])
    assert cuda.count("bytes_to_device") >= 4 * 3 * 513 * 2000 * 4


def test_restored_into_parts_of_memory(cuda: FakeCuda, tmp_path: Path) -> None:
    values = {"wide": torch.randn(64, 8192), "narrow": torch.randn(4096, 8)}
    dcp.save(values, storage_writer=writer(tmp_path / "x"))
    memory = {"wide": cuda.adopt(torch.zeros(64, 9000)), "narrow": cuda.adopt(torch.zeros(4096, 9))}
    state = {"wide": memory["wide"][:, :8192], "narrow": memory["narrow"][:, :8]}
    dcp.load(state, storage_reader=DataStatesReader(tmp_path / "x"))
    for name, value in values.items():
        assert torch.equal(state[name], value)
    assert memory["wide"][:, 8192:].count_nonzero() == 0


def test_a_load_takes_no_memory_of_the_device(
    cuda: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {
        "a": torch.randn(300, 200),
        "b": torch.randn(300, 200),
        "half": torch.randn(40).half(),
    }
    dcp.save({**values, "step": 7}, storage_writer=writer(tmp_path / "x"))
    state: dict[str, Any] = {
        name: cuda.adopt(torch.zeros_like(each)) for name, each in values.items()
    }
    state |= {"half": cuda.adopt(torch.zeros(40)), "step": 0}  # it is converted on the host
    taken: list[int] = []
    take = cuda.pool.take

    def counted(device: int, stream: int, nbytes: int) -> Any:
        taken.append(nbytes)
        return take(device, stream, nbytes)

    monkeypatch.setattr(cuda.pool, "take", counted)
    with cuda.kernels():
        dcp_datastates.load(tmp_path / "x", state, cast=True)
        assert taken == []
        state["a"].add(1)
        assert taken == [state["a"].nbytes]
    cuda.synchronize()
    for name, value in values.items():
        assert torch.equal(state[name], value.to(state[name].dtype))
    assert state["step"] == 7


# ---- faults -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("symbol", ["cuEventRecord", "cuStreamWaitEvent", "cuMemcpyDtoHAsync_v2"])
def test_a_driver_that_refuses(cuda: FakeCuda, tmp_path: Path, symbol: str) -> None:
    """The save fails with the driver's words, training goes on, and the next save works."""
    stepper = Stepper(cuda, {"only": torch.nn.Parameter(torch.randn(1000, 100))})
    save(tmp_path / "before", stepper.named).result()
    cuda.fail_next(symbol, 1)
    with pytest.raises(BaseException, match=symbol) as raised:
        save(tmp_path / "refused", stepper.named).result()
    causes = getattr(raised.value, "failures", {0: raised.value})
    assert any(isinstance(_cause(each), DeviceError) for each in causes.values())
    assert not (tmp_path / "refused" / ".metadata").exists()
    stepper.step()
    expected = stepper.now()
    save(tmp_path / "after", stepper.named).result()
    assert differing(tmp_path / "after", expected) == []


def _cause(failure: Any) -> BaseException:
    return failure[0] if isinstance(failure, tuple) else failure


def test_a_gate_that_the_driver_refuses(
    cuda: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the save fails, and the step goes on when nothing is read any more."""
    stepper = Stepper(cuda, {"only": torch.nn.Parameter(torch.randn(1000, 100))})
    save(tmp_path / "before", stepper.named).result()
    fail = DeferredReads.fail

    def go_on(reads: DeferredReads, error: BaseException) -> None:
        # Not before it has failed: a save that has read all does not fail any more.
        def let_read() -> None:
            await_that(lambda: reads.failure is not None or reads.captured.done())
            cuda.lib.fake_cuda_stall(0)

        device = threading.Thread(target=let_read)
        device.start()
        fail(reads, error)
        device.join()

    monkeypatch.setattr(DeferredReads, "fail", go_on)
    future = save(tmp_path / "refused", stepper.named, reads="backward")
    cuda.lib.fake_cuda_stall(1)  # the reads are not done when the gate comes
    cuda.fail_next("cuStreamWaitEvent", 1, 1)  # the first is that of the copies
    stepper.step()
    with pytest.raises(BaseException, match="cuStreamWaitEvent"):
        future.result()


def test_a_device_without_a_driver_goes_through_torch(
    cuda: FakeCuda,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("DCP_DATASTATES_CUDA_LIBRARY", str(tmp_path / "no-such-library.so"))
    stepper = Stepper(cuda, model(1))
    with caplog.at_level(logging.WARNING, logger="dcp_datastates"):
        save(tmp_path / "a", stepper.named).result()
        save(tmp_path / "b", stepper.named).result()
    assert differing(tmp_path / "a", stepper.now()) == []
    told = [record for record in caplog.records if "no-such-library.so" in record.getMessage()]
    assert len(told) == 1


def test_what_saves_take_from_the_driver_is_given_back(cuda: FakeCuda, tmp_path: Path) -> None:
    stepper = Stepper(cuda, model())
    kept = DataStatesWriter(host_cache_size=CACHE, reads="immediate")
    cuda.await_pinned(CACHE)
    counts = []
    for index in range(6):
        future = dcp.async_save(
            stepper.named, checkpoint_id=tmp_path / f"{index}", storage_writer=kept
        )
        stepper.step()
        future.result()
        counts.append([cuda.count(name) for name in ("live_streams", "live_registrations")])
    assert counts[1:] == [counts[1]] * 5
    assert cuda.count("live_events") <= 16  # they are used again
    assert cuda.count("early_unregistrations") == 0


# ---- graphs -------------------------------------------------------------------------------------------------


def test_no_save_while_a_graph_is_captured(cuda: FakeCuda, tmp_path: Path) -> None:
    stepper = Stepper(cuda, model(1))
    cuda.in_capture = True
    with pytest.raises(ConfigurationError, match="captured"):
        save(tmp_path / "a", stepper.named)


def test_an_optimizer_whose_step_was_captured_is_never_deferred_again(
    cuda: FakeCuda, tmp_path: Path
) -> None:
    """Its replays call no hook: what it owns is copied on the stream, at the call."""
    cuda.configure(seed=11, max_delay_us=20000)  # reads are under way at the step
    stepper = Stepper(cuda, model())
    expected = stepper.now()
    waits = cuda.count("cuStreamWaitEvent")
    future = save(tmp_path / "before", stepper.named, reads="immediate")
    await_that(lambda: cuda.count("cuStreamWaitEvent") == waits + 2)  # the copies' streams
    cuda.in_capture = True
    # A capture runs nothing.
    torch.optim.Optimizer.profile_hook_step(lambda optimizer: None)(stepper)
    cuda.in_capture = False
    assert cuda.count("cuStreamWaitEvent") == waits + 2  # none on the captured stream
    cuda.lib.fake_cuda_stall(0)
    future.result()
    assert differing(tmp_path / "before", expected) == []
    with saved_as_now(stepper, tmp_path / "after"):
        for name, parameter in stepper.named.items():  # a replay
            cuda.write(parameter, stepper.values[name] + 5)
    assert devices.accelerator.capturing() is False
