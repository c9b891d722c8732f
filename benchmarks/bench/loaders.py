"""Those who load into tensors that are there: each from what the saver of the same program has left."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open

import dcp_datastates as ds
from bench.savers import torch_checkpointing_manager

Tensors: TypeAlias = dict[str, torch.Tensor]
Load: TypeAlias = Callable[[Path, Tensors], object]


@dataclass(frozen=True)
class Loader:
    name: str
    saver: str
    """The name of the one whose checkpoint it loads."""
    prepare: Callable[[], Load]
    """Given no tensor but one, the load reads as little as it can."""
    own: bool = False


def _ours() -> Load:
    return lambda path, into: ds.load(path, {"model": into}, no_dist=True)


def _ours_by_dcp() -> Load:
    def load(path: Path, into: Tensors) -> None:
        reader = ds.DataStatesReader(path, unexpected="ignore")
        dcp.load({"model": into}, storage_reader=reader, no_dist=True)

    return load


def _stock() -> Load:
    def load(path: Path, into: Tensors) -> None:
        dcp.load({"model": into}, storage_reader=dcp.FileSystemReader(path), no_dist=True)

    return load


def _hugging_face() -> Load:
    def load(path: Path, into: Tensors) -> None:
        reader = dcp.HuggingFaceStorageReader(str(path), thread_count=4)
        dcp.load(into, storage_reader=reader, no_dist=True)

    return load


def _safetensors() -> Load:
    def load(path: Path, into: Tensors) -> None:
        with safe_open(path / "model.safetensors", "pt") as file:
            for name, tensor in into.items():
                tensor.copy_(file.get_tensor(name))

    return load


def _torch_load() -> Load:
    def load(path: Path, into: Tensors) -> None:
        found = torch.load(path / "model.pt", mmap=True)["model"]
        for name, tensor in into.items():
            tensor.copy_(found[name])

    return load


def _fastsafetensors() -> Load:
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup

    def load(path: Path, into: Tensors) -> None:
        loader = SafeTensorsFileLoader(SingleGroup(), torch.device("cpu"), nogds=True)
        loader.add_filenames({0: [str(path / "model.safetensors")]})
        found = loader.copy_files_to_device()
        for name, tensor in into.items():
            tensor.copy_(found.get_tensor(name))
        found.close()
        loader.close()

    return load


def _torchsnapshot() -> Load:
    import torchsnapshot

    def load(path: Path, into: Tensors) -> None:
        snapshot = torchsnapshot.Snapshot(str(path))
        if len(into) == 1:
            for name, tensor in into.items():
                snapshot.read_object(f"0/model/{name}", obj_out=tensor)
        else:
            snapshot.restore({"model": torchsnapshot.StateDict(**into)})

    return load


def _torch_checkpointing() -> Load:
    manager = torch_checkpointing_manager()
    return lambda path, into: manager.load(str(path), into={"model": into})


def _orbax() -> Load:
    import orbax.checkpoint as orbax

    checkpointer = orbax.PyTreeCheckpointer()

    def load(path: Path, into: Tensors) -> None:
        arrays = {name: tensor.numpy() for name, tensor in into.items()}
        restore = orbax.args.PyTreeRestore(
            item=arrays,
            restore_args={
                name: orbax.RestoreArgs(restore_type=type(arrays[name])) for name in arrays
            },
            partial_restore=len(arrays) == 1,
        )
        for name, array in checkpointer.restore(path.absolute(), args=restore).items():
            into[name].copy_(torch.from_numpy(array))

    return load


OURS = "ours"
LOADERS = (
    Loader(OURS, "ours", _ours, own=True),
    Loader("ours by `dcp.load`", "ours", _ours_by_dcp, own=True),
    Loader("`FileSystemReader`", "`FileSystemWriter`, 4 threads", _stock),
    Loader("`HuggingFaceStorageReader`", "`HuggingFaceStorageWriter`", _hugging_face),
    Loader("torch_checkpointing", "torch_checkpointing", _torch_checkpointing),
    Loader("torchsnapshot", "torchsnapshot", _torchsnapshot),
    Loader("safetensors", "safetensors", _safetensors),
    Loader("fastsafetensors", "safetensors", _fastsafetensors),
    Loader("`torch.load(mmap)`", "`torch.save`", _torch_load),
    Loader("orbax", "orbax", _orbax),
)
