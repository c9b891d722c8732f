"""What the Trainer of transformers has saved through this package, as the folder from which the Trainer itself resumes.

In a checkpoint of this package lie the model under ``model``, the optimizer by names of parameters under ``optimizer``,
and each rank's small files under ``files``. In the Trainer's folder, the model is a Hugging Face model, and
``optimizer.pt`` has what the optimizer's ``state_dict()`` gives.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from dcp_datastates.checkpoints.inventory import names_at
from dcp_datastates.conversion.hugging_face import hf_output
from dcp_datastates.conversion.output_file import Output, write_small_file
from dcp_datastates.conversion.source import Selected, Source
from dcp_datastates.conversion.torch_file import write_torch
from dcp_datastates.format.stored_names import is_under
from dcp_datastates.manager.structure import packed_optimizer
from dcp_datastates.storage import local

MODEL: Final = "model"
OPTIMIZER: Final = "optimizer"


def trainer_source(source: Source) -> Source:
    """The model, whose names are those of its parameters, and the optimizer."""
    names = {
        name.removeprefix(f"{MODEL}."): name
        for name in source.names()
        if is_under(name, frozenset({MODEL, OPTIMIZER}))
    }
    return Selected(source, names)


def trainer_output(
    source: Source,
    folder: Path,
    shard_bytes: int,
    files: Mapping[str, bytes],
    allow_objects: bool,
) -> Output:
    """The folder of a checkpoint of the Trainer.

    Args:
        source: What :func:`trainer_source` gives.
        files: The small files of all ranks.
    """
    names = [name for name in source.tensors if not is_under(name, frozenset({OPTIMIZER}))]
    weights = Selected(source, dict(zip(names, names, strict=True)))
    model = hf_output(weights, folder, shard_bytes, files)
    path = folder / "optimizer.pt"
    optimizer = partial(write_torch, _Optimizer(source), path, allow_objects)

    def finish() -> None:
        model.finish()
        for name in files.keys() - set(names_at(folder)):
            path = folder / name
            local.make_directories(path.parent, "convert")
            write_small_file(path, files[name])

    return Output([*model.units, optimizer], finish)


class _Optimizer(Selected):
    """The optimizer in ``source``, as its ``state_dict()`` gave it."""

    def __init__(self, source: Source) -> None:
        below = frozenset({OPTIMIZER})
        super().__init__(source, {name: name for name in source.names() if is_under(name, below)})

    def nested(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """See :class:`Source`."""
        return packed_optimizer(super().nested(values)[OPTIMIZER])
