"""The files of a plan, for the engine: resolves each item of the plan, and puts the data at its place in the layout.

This works with any planning. Files that are prepared take a shorter way (``planning/prepared_write.py``).
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.planner import WriteItem

from dcp_datastates._native import Engine, SaveFile, Transfer
from dcp_datastates.errors import DataStatesError, UnsupportedStateError
from dcp_datastates.format.layout import FileLayout, SealedFile, TensorEntry
from dcp_datastates.io.devices import HOST, THROUGH_TORCH, dense, place
from dcp_datastates.io.tensor_memory import add_region, check_storable, local_tensor
from dcp_datastates.planning.prepared_write import finish_file
from dcp_datastates.planning.save_planning import SavePlanning
from dcp_datastates.process.garbage import collection_paused
from dcp_datastates.process.progress import Progress
from dcp_datastates.staging.deferred_reads import DeferredReads
from dcp_datastates.staging.ownership import STABLE
from dcp_datastates.storage.object_path import Location

__all__ = ["Sources", "files_to_write", "resolve_object"]

_Source = tuple[torch.Tensor, int, int]
"""A tensor in memory that the engine can read, its device, and the group whose gate covers it."""


@dataclass(eq=False)
class Sources:
    """The data that a plan's items resolve to."""

    engine: Engine
    planning: SavePlanning
    reads: DeferredReads | None
    keep: list[Any]
    """Objects that must stay alive until they have been read."""
    progress: Progress
    devices: set[int] = field(default_factory=set)
    """Devices of tensors that are not deferred: the kernels that compute these tensors may still be running."""

    def resolve(self, item: WriteItem, entry: TensorEntry) -> _Source:
        """The tensor of an item, which ``entry`` describes."""
        self.progress.step()
        tensor, device = _resolve_tensor(self, item, entry)
        reads = self.reads
        group = STABLE if reads is None else reads.group_of(tensor.data_ptr(), entry.nbytes)
        if device != HOST and group == STABLE:
            self.devices.add(device)
            tensor = dense(tensor)
        self.keep.append(tensor)
        return tensor, device, group


def files_to_write(
    items: Sequence[WriteItem],
    sources: Sources,
    layouts: Sequence[FileLayout],
    paths: Sequence[Location],
) -> tuple[list[SaveFile], list[SealedFile]]:
    """The files at ``paths``, with these ``items`` laid out in them.

    Raises :class:`UnsupportedStateError`, :class:`UnsupportedTensorError`, and what ``resolve_data`` raises.
    """
    files, sealed = [], []
    for layout, path in zip(layouts, paths, strict=True):
        sources.progress.step()
        objects = [resolve_object(sources.planning, items[entry.item]) for entry in layout.objects]
        file = layout.seal([len(data) for data in objects])
        content = Transfer()
        content.add_buffer(0, file.header, STABLE)
        _add_tensors(content, items, sources, layout.tensors)
        files.append(finish_file(path, file, content, objects, sources.keep))
        sealed.append(file)
    return files, sealed


def resolve_object(planning: SavePlanning, item: WriteItem) -> memoryview:
    """The bytes of a BYTE_IO item. Raises :class:`UnsupportedStateError` if it does not pickle."""
    try:
        data = planning.resolve_data(item)
    except (pickle.PicklingError, TypeError, AttributeError) as error:  # pickle raises any of these
        raise UnsupportedStateError(
            f"object {item.index.fqn!r} of the state cannot be stored: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(data, io.BytesIO):
        raise DataStatesError(
            f"the planner resolved {item.index.fqn!r} to a {type(data).__name__}; its plan says BYTE_IO"
        )
    return data.getbuffer()


@collection_paused()
def _add_tensors(
    content: Transfer,
    items: Sequence[WriteItem],
    sources: Sources,
    entries: Sequence[TensorEntry],
) -> None:
    for entry in entries:
        tensor, device, group = sources.resolve(items[entry.item], entry)
        if entry.nbytes:
            add_region(content, entry.offset, tensor, entry.nbytes, group, device)


def _resolve_tensor(
    sources: Sources, item: WriteItem, entry: TensorEntry
) -> tuple[torch.Tensor, int]:
    """The tensor with the bytes that ``entry`` describes, in memory that the engine can read, and its device."""
    data = sources.planning.resolve_data(item)
    name = item.index.fqn
    if not isinstance(data, torch.Tensor):
        raise DataStatesError(
            f"the planner resolved {name!r} to a {type(data).__name__}; its plan says tensor"
        )
    tensor = local_tensor(data)
    check_storable(tensor, name)
    tensor = tensor.detach()
    as_planned = tuple(tensor.shape) == entry.sizes or tensor.numel() == entry.nbytes == 0
    if not as_planned or tensor.dtype != entry.dtype:
        raise DataStatesError(
            f"the planner resolved {name!r} to {tensor.dtype} {tuple(tensor.shape)}; its plan says "
            f"{entry.dtype} {entry.sizes}: a planner that transforms data must plan what it returns"
        )
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    device = place(sources.engine, tensor)
    if device == THROUGH_TORCH:
        return tensor.cpu(), HOST
    return tensor, device
