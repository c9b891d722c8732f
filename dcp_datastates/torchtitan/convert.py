"""Back to stock: writes a checkpoint of this package as torch.distributed.checkpoint's own writer does.

    python -m dcp_datastates.torchtitan.convert ckpt/step-100 elsewhere/step-100

What comes out is what stock torchtitan loads. One process does it, with memory for one whole checkpoint.
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

    Objects are unpickled on the way: for checkpoints from sources you trust. Raises FileExistsError if there is
    something at ``target``, and what loading raises.
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
