"""Back to stock: writes a checkpoint of this package as torch.distributed.checkpoint's own writer does.

    python -m dcp_datastates.torchtitan.convert ckpt/step-100 elsewhere/step-100

What comes out is what stock torchtitan loads. One process does it, with memory for one whole checkpoint.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from dcp_datastates.reader import DataStatesReader

__all__ = ["to_stock"]


class _Everything(DefaultLoadPlanner):
    """Loads objects into a flat state, too: by name, whatever was there."""

    def load_bytes(self, read_item: Any, value: Any) -> None:
        self.original_state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=False)


class _AsItWas(DefaultSavePlanner):
    """Saves a flat state with the paths that the names had."""

    def __init__(self, paths: Any) -> None:
        super().__init__(flatten_state_dict=False)
        self._paths = paths

    def create_global_plan(self, all_plans: Any) -> Any:
        plans, metadata = super().create_global_plan(all_plans)
        metadata.planner_data = self._paths
        self.metadata = metadata
        return plans, metadata


def to_stock(source: Path, target: Path) -> None:
    """Write the checkpoint at ``source`` to ``target``, in stock DCP's format.

    Objects are unpickled on the way: for checkpoints from sources you trust. Raises FileExistsError if there is
    something at ``target``, and what loading raises.
    """
    if target.exists():
        raise FileExistsError(f"{target} exists; choose another place, or remove it")
    metadata: Metadata = DataStatesReader(source).read_metadata()
    state: dict[str, Any] = {}
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            state[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
        else:
            state[name] = None
    dcp.load(  # type: ignore[attr-defined]
        state,
        storage_reader=DataStatesReader(source),
        planner=_Everything(flatten_state_dict=False),
        no_dist=True,
    )
    dcp.save(  # type: ignore[attr-defined]
        state,
        storage_writer=FileSystemWriter(str(target)),
        planner=_AsItWas(metadata.planner_data),
        no_dist=True,
    )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    given = parser.parse_args()
    to_stock(given.source, given.target)


if __name__ == "__main__":
    main()
