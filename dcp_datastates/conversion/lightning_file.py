"""What Lightning has saved through this package, as the file that Lightning's own strategies write and resume from.

In a checkpoint of this package lie the model under ``state_dict``, optimizers by names of parameters under
``optimizer_0``, …, and all else, pickled by each rank, under ``files``. In Lightning's file, an optimizer lies as its
``state_dict()`` gives it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from dcp_datastates.conversion.source import Source, TensorInfo, Want, unpickled, value_of
from dcp_datastates.format.key_paths import KeyPath
from dcp_datastates.format.stored_names import is_under
from dcp_datastates.manager.packed_optimizer import packed_optimizer
from dcp_datastates.manager.structure import put_together, taken_apart

__all__ = [
    "FURTHER_TENSORS",
    "GROUPS",
    "META",
    "MODEL",
    "NAMES",
    "OPTIMIZERS",
    "LightningFile",
    "is_of_lightning",
    "lightning_checkpoint",
    "optimizer_name",
]

MODEL: Final = "state_dict"
OPTIMIZERS: Final = "optimizer_states"
META: Final = "meta.pt"
"""The name of the file with all else that Lightning saves."""

FURTHER_TENSORS: Final = "dcp_datastates_tensors"
"""The key, in that file, of the names of further states that are tensors, such as those of ``WeightAveraging``."""
NAMES: Final = "dcp_datastates_names"
"""The key of the model's own names of those values whose names here are others: ``torch.compile`` adds to them."""

GROUPS: Final = "dcp_datastates_groups"
"""The key of the names of each optimizer's groups, in their order."""

_FILE: Final = f"files.rank-0.{META}"


def optimizer_name(number: int) -> str:
    """Under which name an optimizer is stored."""
    return f"optimizer_{number}"


def lightning_checkpoint(stored: Mapping[str, Any], meta: Mapping[str, Any]) -> dict[str, Any]:
    """What Lightning's own strategies would have saved.

    Args:
        stored: The nested state in the checkpoint. Parts of it may be left out.
        meta: What lies in the file :data:`META`.
    """
    found = dict(meta)
    own = found.pop(NAMES, {})
    further, groups = found.pop(FURTHER_TENSORS, ()), found.pop(GROUPS, [])
    found |= {name: stored[name] for name in further if name in stored}
    found[MODEL] = {own.get(name, name): value for name, value in stored.get(MODEL, {}).items()}
    if "lr_schedulers" in found:  # else ``save_weights_only``
        found[OPTIMIZERS] = [
            packed_optimizer(stored.get(optimizer_name(number), {}), each)
            for number, each in enumerate(groups)
        ]
    return found


def is_of_lightning(source: Source) -> bool:
    """Whether a checkpoint was saved by Lightning, through this package."""
    return _FILE in source.objects


class LightningFile(Source):
    """What Lightning has saved: the values of ``source``, which lie where they lie in Lightning's file."""

    def __init__(self, source: Source, allow_objects: bool) -> None:
        self.path, self.format = source.path, source.format
        self._source = source
        meta = unpickled(
            value_of(source, _FILE, allow_objects), f"{source.path}: {META}", allow_objects
        )
        self._own, self._structure = taken_apart(meta, META)
        self.tensors = {
            **{name: info for name, info in source.tensors.items() if _is_taken(name)},
            **{n: TensorInfo(each.dtype, tuple(each.shape)) for n, each in self._own.items()},
        }
        self.objects = [name for name in source.objects if _is_taken(name)]
        self.paths = {
            name: _path_in_model(name, path)
            for name, path in source.paths.items()
            if _is_taken(name)
        }

    def nested(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """See :class:`Source`."""
        stored = {name: value for name, value in values.items() if name not in self._own}
        meta = put_together(self._structure, lambda path, *_: values[path])
        return lightning_checkpoint(super().nested(stored), meta)

    def chunks(self, name: str) -> Sequence[ChunkStorageMetadata]:
        """See :class:`Source`."""
        return super().chunks(name) if name in self._own else self._source.chunks(name)

    def fill(self, wants: Sequence[Want]) -> None:
        """See :class:`Source`."""
        for want in wants:
            if (own := self._own.get(want.name)) is not None:
                want.into.copy_(own.reshape(-1)[want.begin : want.end])
        self._source.fill([want for want in wants if want.name not in self._own])

    def object_bytes(self, name: str) -> bytes:
        """See :class:`Source`."""
        return self._source.object_bytes(name)


def _path_in_model(name: str, path: KeyPath) -> KeyPath:
    """A value of the model that was renamed is one of the model's all the same."""
    if path[0] == MODEL or not is_under(name, frozenset({MODEL})):
        return path
    return MODEL, name.removeprefix(f"{MODEL}.")


def _is_taken(name: str) -> bool:
    """Whether it is no file of a rank. (What else is not Lightning's own is left out when all is nested.)"""
    return not is_under(name, frozenset({"files"}))
