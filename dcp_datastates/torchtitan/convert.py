"""Converts a checkpoint of this package to the format of stock torch.distributed.checkpoint.

    python -m dcp_datastates.torchtitan.convert ckpt/step-100 elsewhere/step-100

Stock torchtitan loads the result. It runs in one process, with memory for one whole checkpoint. ``dcp-datastates
convert --to dcp`` does the same with bounded memory, and unpickles nothing.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from dcp_datastates.dcp.loading import load

__all__ = ["to_stock"]


def to_stock(source: Path, target: Path) -> None:
    """Write the checkpoint at ``source`` to ``target``, in stock DCP's format.

    This unpickles objects: use it only for checkpoints from sources you trust. Raises FileExistsError if ``target``
    exists, and the errors of loading.
    """
    if target.exists():
        raise FileExistsError(f"{target} exists; choose another place, or remove it")
    dcp.save(load(source), storage_writer=FileSystemWriter(str(target)), no_dist=True)  # type: ignore[attr-defined]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    given = parser.parse_args()
    to_stock(given.source, given.target)


if __name__ == "__main__":
    main()
