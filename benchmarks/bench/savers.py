"""Those who save: each a function that prepares one, given the state, and returns how it saves.

What an optional package lacks is raised by the function, and becomes the row's error.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

import dcp_datastates as ds
from bench.states import State
from bench.system import sync_tree


@dataclass
class Started:
    """A save after the call: the default is one that has written all that it will."""

    commit: Callable[[], object] = lambda: None
    """Waits until it is committed."""
    may_step: Callable[[], object] = lambda: None
    """Waits until the state may change."""
    gate: Callable[[], float] = lambda: 0.0
    """After the commit: seconds for which the optimizer's step itself waited."""


class Commit(threading.Thread):
    """Waits for the commit, and makes durable what it left in the page cache."""

    def __init__(self, started: Started, path: Path) -> None:
        super().__init__()
        self._save, self._path = started, path
        self._error: Exception | None = None
        self.at = 0.0
        """When that was, by ``perf_counter``."""
        self.start()

    def run(self) -> None:
        try:
            self._save.commit()
            sync_tree(self._path)
        except Exception as error:
            self._error = error
        self.at = time.perf_counter()

    def wait(self) -> None:
        self.join()
        if self._error is not None:
            raise self._error


Save: TypeAlias = Callable[[Path], Started]


@dataclass(frozen=True)
class Saver:
    name: str
    prepare: Callable[[State], Save]
    own: bool = False
    warm_ups: int = 1
    """Three where plans are cached: the structure is known from the third save on."""
    pauses: bool = True
    """Whether the accelerator computes between the call and the step."""
    loads_as: str = ""
    """Who loads what it has saved."""


def _nested(state: State) -> dict[str, Any]:
    return {"model": state.tensors}


def _ours(**options: Any) -> Callable[[State], Save]:
    def prepare(state: State) -> Save:
        planner = ds.DataStatesSavePlanner()

        def save(path: Path) -> Started:
            handle = ds.async_save(
                _nested(state), path, planner=planner, reads="immediate", **options
            )
            return Started(handle.result, gate=lambda: handle.stats.gate_seconds)

        return save

    return prepare


def _ours_by_dcp(planner: Callable[[], Any]) -> Callable[[State], Save]:
    def prepare(state: State) -> Save:
        kept = planner()

        def save(path: Path) -> Started:
            writer = ds.DataStatesWriter(path, reads="immediate")
            future: Any = dcp.async_save(_nested(state), storage_writer=writer, planner=kept)

            def gate() -> float:
                assert writer.last_save is not None
                return writer.last_save.gate_seconds

            return Started(future.result, gate=gate)

        return save

    return prepare


def _stock(threads: int, staged: bool = False) -> Callable[[State], Save]:
    def prepare(state: State) -> Save:
        planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
        stager = DefaultStager(StagingOptions(False, True, True, False)) if staged else None

        def save(path: Path) -> Started:
            writer = dcp.FileSystemWriter(path, thread_count=threads)
            found: Any = dcp.async_save(
                _nested(state), storage_writer=writer, planner=planner, async_stager=stager
            )
            if staged:
                return Started(found.upload_completion.result, found.staging_completion.result)
            return Started(found.result)

        return save

    return prepare


def _hugging_face(state: State) -> Save:
    def save(path: Path) -> Started:
        tensors = state.tensors
        writer = dcp.HuggingFaceStorageWriter(
            str(path), fqn_to_index_mapping=dict.fromkeys(tensors, 1), thread_count=4
        )
        dcp.save(tensors, storage_writer=writer)
        return Started()

    return save


def _safetensors(state: State) -> Save:
    def save(path: Path) -> Started:
        path.mkdir()
        save_file(state.tensors, path / "model.safetensors")
        return Started()

    return save


def _torch_save(state: State) -> Save:
    def save(path: Path) -> Started:
        path.mkdir()
        torch.save(_nested(state), path / "model.pt")
        return Started()

    return save


def _torchsnapshot(state: State) -> Save:
    import torchsnapshot

    def save(path: Path) -> Started:
        app_state = {"model": torchsnapshot.StateDict(**state.tensors)}
        return Started(torchsnapshot.Snapshot.async_take(str(path), app_state).wait)

    return save


def torch_checkpointing_manager() -> Any:
    """O_DIRECT is off: on ext4 its writes fail with EINVAL."""
    import torch_checkpointing
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    config = torch_checkpointing.CheckpointManager.Config.with_async_save()
    config.storage_config = LocalFileSystemStorageConfig(use_direct_io=False)
    return config.build()


def _torch_checkpointing(state: State) -> Save:
    manager = torch_checkpointing_manager()

    def may_step() -> None:
        with manager.lock():
            pass

    def save(path: Path) -> Started:
        return Started(manager.save(str(path), _nested(state)).result, may_step)

    return save


def _orbax(state: State) -> Save:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import orbax.checkpoint as orbax

    checkpointer = orbax.AsyncCheckpointer(orbax.PyTreeCheckpointHandler())

    def save(path: Path) -> Started:
        arrays = {name: each.numpy() for name, each in state.tensors.items()}
        checkpointer.save(path.absolute(), args=orbax.args.PyTreeSave(arrays))
        return Started(checkpointer.wait_until_finished)

    return save


def _nvidia(state: State) -> Save:
    from nvidia_resiliency_ext.checkpointing.async_ckpt.torch_ckpt import TorchAsyncCheckpoint

    checkpointer = TorchAsyncCheckpoint(persistent_queue=False)

    def save(path: Path) -> Started:
        path.mkdir()
        checkpointer.async_save(_nested(state), path / "model.pt")
        return Started(lambda: checkpointer.finalize_async_save(blocking=True, no_dist=True))

    return save


def _fast_persist(state: State) -> Save:
    from deepspeed.io import FastFileWriter, FastFileWriterConfig
    from deepspeed.ops.op_builder import AsyncIOBuilder

    handle = AsyncIOBuilder().load(verbose=False).aio_handle(8 << 20, 8, False, True, 4)
    pinned = handle.new_cpu_locked_tensor(256 << 20, torch.empty(0, dtype=torch.uint8))

    def save(path: Path) -> Started:
        path.mkdir()
        writer = FastFileWriter(str(path / "model.pt"), FastFileWriterConfig(handle, pinned))
        torch.save(_nested(state), f=writer)
        writer.close()
        return Started()

    return save


def start_process_group() -> None:
    """One rank."""
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    os.environ["MASTER_ADDR"] = "localhost"
    store = dist.TCPStore("localhost", 0, is_master=True)
    os.environ["MASTER_PORT"] = str(store.port)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)


OURS = "ours"
SAVERS = (
    Saver(OURS, _ours(), own=True, warm_ups=3, loads_as="ours"),
    Saver("ours, the step directly after the call", _ours(), own=True, warm_ups=3, pauses=False),
    Saver("ours, host cache of 64 MiB", _ours(host_cache_size="64MiB"), own=True, warm_ups=3),
    Saver(
        "ours, host cache of 64 MiB, the step directly after the call",
        _ours(host_cache_size="64MiB"),
        own=True,
        warm_ups=3,
        pauses=False,
    ),
    Saver("ours by `dcp.async_save`", _ours_by_dcp(ds.DataStatesSavePlanner), own=True, warm_ups=3),
    Saver("the same, DCP's planner", _ours_by_dcp(dcp.DefaultSavePlanner), own=True),
    Saver("`FileSystemWriter`, 1 thread", _stock(1), loads_as="`FileSystemReader`"),
    Saver("`FileSystemWriter`, 4 threads", _stock(4), loads_as="`FileSystemReader`"),
    Saver("`DefaultStager`, 4 threads", _stock(4, staged=True), loads_as="`FileSystemReader`"),
    Saver("`HuggingFaceStorageWriter`", _hugging_face, loads_as="`HuggingFaceStorageReader`"),
    Saver("torch_checkpointing", _torch_checkpointing, loads_as="torch_checkpointing"),
    Saver("torchsnapshot", _torchsnapshot, loads_as="torchsnapshot"),
    Saver("safetensors", _safetensors, loads_as="safetensors"),
    Saver("`torch.save`", _torch_save, loads_as="`torch.load(mmap)`"),
    Saver("orbax", _orbax, loads_as="orbax"),
    Saver("nvidia-resiliency-ext", _nvidia),
    Saver("FastPersist (DeepSpeed)", _fast_persist),
)
