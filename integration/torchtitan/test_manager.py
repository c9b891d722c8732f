"""The manager by itself, in this process: futures, staging, purging, closing."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from compare import tensors_of
from dcp_datastates import (
    DataStatesReader,
    DataStatesWriter,
    async_save,
    inspect,
    load,
    pin,
)
from dcp_datastates.errors import ConfigurationError, IncompatibleStateError, StorageError
from dcp_datastates.results import SaveHandle

pytest.importorskip("torchtitan", reason="pip install '.[torchtitan]'")

WIDTH = 256  # 256 KiB in float32: large enough to be deferred


class Fused(nn.Module):
    """Keeps one weight, and saves it in two: tensors that no optimizer owns."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.fused = nn.Parameter(torch.randn(WIDTH, 2, WIDTH))
        self.register_state_dict_post_hook(self._split)

    @staticmethod
    def _split(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        fused = state.pop(f"{prefix}fused")
        state[f"{prefix}first"] = fused[:, 0].contiguous()
        state[f"{prefix}second"] = fused[:, 1].contiguous()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((x @ self.plain) @ self.fused.sum(1)).square().mean()


class Optimizers:
    """What the trainer's container is to the manager."""

    def __init__(self, model: nn.Module) -> None:
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def state_dict(self) -> dict[str, Any]:
        return {
            f"{number}.{name}": value
            for number, state in self.optimizer.state_dict()["state"].items()
            for name, value in state.items()
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Job:
    """A model, its optimizer and a manager."""

    def __init__(self, base: Path, **options: Any) -> None:
        from dcp_datastates.torchtitan import DataStatesCheckpointManager

        torch.manual_seed(0)
        self.model = Fused()
        self.optimizers = Optimizers(self.model)
        options = {
            "enable": True,
            "folder": "checkpoint",
            "interval": 1,
            "keep_latest_k": 0,
            "last_save_model_only": False,
            "host_cache_size": "64MiB",
            **options,
        }
        self.manager = DataStatesCheckpointManager.Config(**options).build(
            dataloader=None,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=None,
            states={},
            sd_adapter=None,
            base_folder=str(base),
        )
        del self.manager.states["dataloader"], self.manager.states["lr_scheduler"]
        self.folder = base / options["folder"]

    def step(self) -> None:
        self.model(torch.randn(4, WIDTH)).backward()
        self.manager.maybe_wait_for_staging()
        self.optimizers.optimizer.step()
        self.optimizers.optimizer.zero_grad()

    def expected(self) -> dict[str, torch.Tensor]:
        state = {**self.model.state_dict()}
        state.update((f"optimizer.{k}", v) for k, v in self.optimizers.state_dict().items())
        return {name: value.detach().clone() for name, value in state.items()}

    def steps(self) -> list[str]:
        return sorted(path.name for path in self.folder.glob("step-*"))


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Makes jobs, in a process group of one, as a trainer on one device has it."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    jobs: list[Job] = []

    def make(**options: Any) -> Job:
        jobs.append(Job(tmp_path, **options))
        return jobs[-1]

    yield make
    for one in jobs:
        one.manager.close()
    dist.destroy_process_group()


@pytest.mark.parametrize("mode", ["disabled", "async", "async_with_pinned_mem"])
def test_saves_hold_the_state_of_their_step_split_weights_too(
    job: Callable[..., Job], mode: str
) -> None:
    one = job(async_mode=mode)
    expected = {}
    for number in range(1, 5):
        one.step()
        expected[number] = one.expected()
        one.manager.save(number, last_step=number == 4)
    for number, state in expected.items():
        found = tensors_of(DataStatesReader(one.folder / f"step-{number}"))
        assert found.keys() == state.keys()
        assert all(torch.equal(found[name], value) for name, value in state.items())


@pytest.mark.parametrize(
    ("options", "saved"),
    [
        ({"interval": 2}, ["step-2", "step-4", "step-5"]),
        ({"interval": 4, "enable_first_step_checkpoint": True}, ["step-1", "step-4", "step-5"]),
        ({"load_only": True}, []),
        ({"keep_latest_k": 2}, ["step-4", "step-5"]),
        ({"keep_latest_k": 2, "last_save_model_only": True}, ["step-4", "step-5"]),
    ],
)
def test_steps_are_saved_and_kept_by_torchtitans_policies(
    options: dict[str, Any], saved: list[str], job: Callable[..., Job]
) -> None:
    one = job(**options)
    for number in range(1, 6):
        one.step()
        one.manager.save(number, last_step=number == 5)
    one.manager.close()
    assert one.steps() == saved


def test_a_last_save_of_the_model_alone_is_exported_in_its_dtype(job: Callable[..., Job]) -> None:
    one = job(last_save_model_only=True, export_dtype="bfloat16")
    one.step()
    one.manager.save(1, last_step=True)
    found = load(one.folder / "step-1")
    assert set(found) == {"plain", "first", "second"}
    assert all(value.dtype == torch.bfloat16 for value in found.values())
    assert torch.equal(found["plain"], one.model.plain.bfloat16())


def test_a_job_without_checkpoints_begins_with_the_initial_one(
    job: Callable[..., Job], tmp_path: Path
) -> None:
    first = job(folder="first", async_mode="disabled")
    first.step()
    first.manager.save(1)
    assert not job(folder="none").manager.load()
    path = str(tmp_path / "first" / "step-1")
    second = job(folder="second", initial_load_path=path)
    second.step()
    assert second.manager.load()
    assert torch.equal(second.model.plain, first.model.plain)
    second.manager.save(7)
    second.manager.maybe_wait_for_saving()
    for parameter in second.model.parameters():
        parameter.data.zero_()
    again = job(folder="second", initial_load_path=path)
    assert again.manager.load()
    assert torch.equal(again.model.plain, first.model.plain)
    with pytest.raises(FileNotFoundError, match="load_step=9"):
        again.manager.load(9)
    with pytest.raises(ConfigurationError, match="is no directory"):
        job(folder="third", initial_load_path=str(tmp_path / "nowhere")).manager.load()
    with pytest.raises(ConfigurationError, match="'optimiser'"):
        job(folder="second", exclude_from_loading=["optimiser"]).manager.load()


@pytest.mark.parametrize("mode", ["async", "async_with_pinned_mem"])
def test_the_step_gate_waits_and_not_the_trainer(
    job: Callable[..., Job], mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, the gate does not stop the host."""
    started: list[SaveHandle] = []

    def note(*given: Any, **options: Any) -> SaveHandle:
        started.append(async_save(*given, **options))
        return started[-1]

    monkeypatch.setattr("dcp_datastates.manager.frameworks.async_save", note)
    one = job(reads=600.0, async_mode=mode)
    one.step()
    one.manager.save(1)
    one.manager.maybe_wait_for_staging()
    assert not started[0].captured.done()
    expected = one.expected()
    one.step()
    one.manager.maybe_wait_for_saving()
    found = tensors_of(DataStatesReader(one.folder / "step-1"))
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_a_failed_save_raises_from_the_next_one_and_evicts_nothing(
    job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    from dcp_datastates.torchtitan.manager import newest_step

    one = job(keep_latest_k=2)
    for number in (1, 2):
        one.step()
        one.manager.save(number)
    one.step()
    one.manager.save(3)
    one.manager.maybe_wait_for_saving()
    monkeypatch.setattr(
        "dcp_datastates.saving.rank_context.begin_write",
        _raise(StorageError(28, "no space", "there")),
    )
    for number in (4, 5):
        one.step()
        one.manager.save(number)
        one.step()  # goes on: the failure is the next save's to tell
        with pytest.raises(StorageError, match="no space"):
            one.manager.maybe_wait_for_saving()
    monkeypatch.undo()
    one.manager._saves.wait()
    assert {"step-2", "step-3"} <= set(one.steps())
    assert newest_step(one.folder, "structure") == 3
    one.step()
    one.manager.save(6)
    one.manager.close()
    assert newest_step(one.folder, "structure") == 6


def _raise(error: Exception) -> Callable[..., Any]:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise error

    return fail


def test_purging_keeps_good_commits_and_what_is_not_a_step(job: Callable[..., Job]) -> None:
    one = job(async_mode="disabled", keep_latest_k=2)
    one.step()
    dcp.save({"x": torch.ones(4)}, checkpoint_id=str(one.folder / "step-1"))  # stock's
    DataStatesWriter(one.folder / "best").close()
    dcp.save({"x": torch.ones(4)}, storage_writer=DataStatesWriter(one.folder / "best"))
    (one.folder / "old-step-2").mkdir()
    (one.folder / "step-9").mkdir()  # of a save that failed: torchtitan would count it
    one.manager.save(2)
    one.manager._saves.wait()
    assert one.steps() == ["step-1", "step-2", "step-9"]
    for number in (3, 4):
        one.manager.save(number)
        one.manager._saves.wait()
    assert one.steps() == ["step-3", "step-4", "step-9"]
    assert (one.folder / "best" / ".metadata").exists()
    assert (one.folder / "old-step-2").exists()


def test_a_pinned_checkpoint_does_not_keep_stock_ones(job: Callable[..., Job]) -> None:
    one = job(async_mode="disabled", keep_latest_k=2)
    dcp.save({"x": torch.ones(4)}, checkpoint_id=str(one.folder / "step-1"))  # stock's
    for number in (2, 3, 4):
        one.step()
        one.manager.save(number)
        if number == 2:
            pin(one.folder / "step-2")
    one.manager._saves.wait()
    assert one.steps() == ["step-2", "step-3", "step-4"]


def test_it_resumes_from_the_newest_whole_checkpoint(job: Callable[..., Job]) -> None:
    from dcp_datastates.torchtitan.manager import newest_step

    one = job(async_mode="disabled")
    one.step()
    for number in (1, 2, 3):
        one.manager.save(number)
    (data,) = (one.folder / "step-3").glob("*/*.safetensors")
    data.write_bytes(data.read_bytes()[:-1])
    (one.folder / "step-7").mkdir()
    assert newest_step(one.folder, "structure") == 2


def test_stock_checkpoints_load_and_ours_cast(job: Callable[..., Job], tmp_path: Path) -> None:
    one = job()
    half = {name: value.bfloat16() for name, value in one.model.state_dict().items()}
    dcp.save(half, checkpoint_id=str(tmp_path / "stock"))
    dcp.save(half, storage_writer=DataStatesWriter(tmp_path / "ours"))
    for name in ("stock", "ours"):
        with torch.no_grad():
            for parameter in one.model.parameters():
                parameter.zero_()
        one.manager._load_from(str(tmp_path / name), model_only=True)
        assert torch.equal(one.model.plain, half["plain"].float())


def test_a_program_that_has_changed_resumes_by_the_options_of_a_load(
    job: Callable[..., Job], tmp_path: Path
) -> None:
    """The manager of torchtitan loads through DCP: there, a missing name is an error, and there is no way out."""
    one = job()
    state = one.model.state_dict()
    stored = {f"old_{name}": torch.ones_like(each) for name, each in state.items()}
    del stored["old_first"]
    dcp.save(stored, storage_writer=DataStatesWriter(tmp_path / "ours"))
    before = one.model.plain.detach().clone()
    for rename, said in (({}, "'plain'"), ({"old_": ""}, "'first'")):
        one.manager.config.rename = rename
        with pytest.raises(IncompatibleStateError, match=said) as raised:
            one.manager._load_from(str(tmp_path / "ours"), model_only=True)
        assert "checkpoint.missing" in str(raised.value)
        assert torch.equal(one.model.plain, before)
    one.manager.config.missing = "warn"
    one.manager._load_from(str(tmp_path / "ours"), model_only=True)
    assert one.model.plain.eq(1).all()
    assert one.manager.config.load_options()["allow_objects"] is False
    one.manager.config.allow_objects = True
    assert one.manager.config.load_options()["allow_objects"] is True


def test_close_drains_what_is_in_flight_and_may_be_called_again(job: Callable[..., Job]) -> None:
    one = job(async_mode="async", reads=600.0)
    one.step()
    one.manager.save(1)
    one.manager.close()
    assert (one.folder / "step-1" / ".metadata").exists()
    one.manager.close()


def test_close_raises_a_failure_that_was_not_asked_about(
    job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = job(async_mode="async")
    one.step()
    monkeypatch.setattr(
        "dcp_datastates.saving.rank_context.begin_write", _raise(StorageError(28, "full", "x"))
    )
    one.manager.save(1)
    with pytest.raises(StorageError, match="full"):
        one.manager.close()


def test_a_writer_that_is_closed_in_the_thread_of_anothers_save_leaves_that_alone(
    job: Callable[..., Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A manager that garbage collection closes: it may run in DCP's thread."""
    from dcp_datastates.commit.place import Place

    other, publish, closed = DataStatesWriter(tmp_path / "other"), Place.publish, []

    def close_other(*args: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            other.close()
            closed.append(True)
        publish(*args)

    monkeypatch.setattr(Place, "publish", close_other)
    one = job(async_mode="disabled")
    one.step()
    one.manager.save(1)
    assert closed
    assert (one.folder / "step-1" / ".metadata").exists()


def test_half_built_managers_close() -> None:
    from dcp_datastates.torchtitan import DataStatesCheckpointManager

    bare = DataStatesCheckpointManager.__new__(DataStatesCheckpointManager)
    bare.close()
    bare.enable = True  # the constructor raised after this
    bare.close()
    off = DataStatesCheckpointManager.Config(enable=False).build(
        dataloader=None,
        model_parts=[],
        optimizers=None,
        lr_schedulers=None,
        states={},
        sd_adapter=None,
    )
    assert off.save(1) is False
    off.close()


class Fresh:
    """A part of the state that is made anew at every call, and remembers, weakly, what it made."""

    def __init__(self) -> None:
        self.made: list[weakref.ref[torch.Tensor]] = []

    def state_dict(self) -> dict[str, Any]:
        tensor = torch.ones(WIDTH, WIDTH)
        self.made.append(weakref.ref(tensor))
        return {"tensor": tensor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


@pytest.mark.parametrize("mode", ["async", "async_with_pinned_mem"])
def test_no_tensor_of_a_save_stays_without_garbage_collection(
    job: Callable[..., Job], monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    from dcp_datastates.staging.deferred_reads import DeferredReads

    one = job(async_mode=mode)
    one.manager.states["fresh"] = fresh = Fresh()
    one.step()
    monkeypatch.setattr("torchtitan.tools.utils.GarbageCollection.collect", lambda *_: None)
    gc.collect()
    gc.disable()
    try:
        for number in range(1, 6):
            one.step()
            one.manager.save(number)
        one.manager.maybe_wait_for_saving()
        assert len(fresh.made) == 5
        assert [reference() for reference in fresh.made] == [None] * 5
        for reads in [each for each in gc.get_objects() if type(each) is DeferredReads]:
            assert reads.kept is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"host_cache_size": "1MiB"}, "host_cache_size='1MiB' is below"),
        ({"reads": "sometimes"}, "reads='sometimes'"),
        ({"verify": "trust"}, "verify='trust'"),
        ({"missing": "never"}, "missing='never'"),
    ],
)
def test_options_that_cannot_work_are_refused_early(options: dict[str, Any], said: str) -> None:
    from dcp_datastates.torchtitan import DataStatesCheckpointManager

    with pytest.raises(ConfigurationError, match=said):
        DataStatesCheckpointManager.Config(**options)


def test_the_override_keeps_torchtitans_fields() -> None:
    from torchtitan.components.checkpointer import CheckpointManager

    from dcp_datastates.torchtitan import DataStatesCheckpointManager, datastates

    stock = CheckpointManager.Config(enable=True, interval=3, folder="there")
    chosen = datastates(stock, host_cache_size="16GiB")
    assert isinstance(chosen, DataStatesCheckpointManager.Config)
    assert (chosen.interval, chosen.folder, chosen.host_cache_size) == (3, "there", "16GiB")
    assert chosen.async_mode == "async"
    assert datastates(stock, async_mode="disabled").async_mode == "disabled"
    stock.async_mode = "async_with_pinned_mem"
    assert datastates(stock).async_mode == "async_with_pinned_mem"
    from torchtitan.experiments.torchft.checkpoint import TorchFTCheckpointManager

    with pytest.raises(ConfigurationError, match="TorchFTCheckpointManager"):
        datastates(TorchFTCheckpointManager.Config(enable=True))
    with pytest.raises(
        ConfigurationError, match=r"no option .host_cash.; did you mean .host_cache_size"
    ):
        datastates(stock, host_cash=1)


def test_a_config_function_of_a_job_can_choose_the_manager() -> None:
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    from dcp_datastates.torchtitan import DataStatesCheckpointManager, with_datastates

    chosen = with_datastates(llama3_debugmodel(), host_cache_size="1GiB").checkpoint
    assert isinstance(chosen, DataStatesCheckpointManager.Config)
    assert chosen.host_cache_size == "1GiB"


def test_it_needs_nothing_of_torchtitans_manager_for_dcp() -> None:
    """Only ``BaseCheckpointManager``: the other may go."""
    code = """
import sys, types
gone = types.ModuleType("torchtitan.components.checkpointer.dcp")
gone.AsyncMode = gone.CheckpointManager = None  # checkpointer/__init__.py imports these names
sys.modules[gone.__name__] = gone
from torchtitan.components.checkpointer.base import BaseCheckpointManager
from dcp_datastates.torchtitan import DataStatesCheckpointManager, datastates
assert issubclass(DataStatesCheckpointManager, BaseCheckpointManager)
DataStatesCheckpointManager.Config(enable=True, folder="x")
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def test_the_package_does_not_import_torchtitan() -> None:
    code = "import sys, dcp_datastates; sys.exit('torchtitan' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("kind", ["all", "excluded", "model only", "forgotten"])
def test_only_what_torchtitan_did_not_mean_to_leave_unread_is_warned_about(
    kind: str, job: Callable[..., Job], caplog: pytest.LogCaptureFixture
) -> None:
    options = {"exclude_from_loading": ["optimizer"]} if kind == "excluded" else {}
    one = job(async_mode="disabled", **options)
    one.step()
    one.manager.save(1)
    if kind == "forgotten":
        one.optimizers.optimizer = torch.optim.AdamW(one.model.parameters())
    one.manager._load_from(str(one.folder / "step-1"), model_only=kind == "model only")
    warned = [
        record.getMessage() for record in caplog.records if "stay unread" in record.getMessage()
    ]
    assert ["'optimizer." in message for message in warned] == [True] * (kind == "forgotten")


def test_a_folder_in_a_store_is_saved_to_purged_and_resumed_from(
    job: Callable[..., Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from support.stores.server import BUCKET, endpoint, use

    use(endpoint())
    monkeypatch.chdir(tmp_path)
    root = f"s3://{BUCKET}/{tmp_path.parent.name}/{tmp_path.name}"
    one = job(folder=root, keep_latest_k=2)
    for step in (1, 2, 3):
        one.step()
        one.manager.save(step, last_step=step == 3)
    one.manager.close()
    assert one.manager.folder == root
    assert [each.name for each in inspect(root).checkpoints] == ["step-3", "step-2"]

    again = job(folder=root)
    again.step()
    assert again.manager.load()
    assert torch.equal(again.model.plain, one.model.plain)
    with pytest.raises(FileNotFoundError, match=f"{root}/step-9"):
        again.manager.load(9)
    begun = job(folder="local", initial_load_path=f"{root}/step-3")
    assert begun.manager.load()
    assert torch.equal(begun.model.plain, one.model.plain)
    assert not [path for path in tmp_path.rglob("*") if ":" in path.name]
