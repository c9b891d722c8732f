"""Tensors that a program saves and writes to, of every type, and what becomes of a save."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import dcp_datastates
from dcp_datastates import SnapshotTornError
from support.devices.writes import Write, held_bytes, writes
from support.state.wrapped import Blocks

__all__ = [
    "COLUMNS",
    "FEW",
    "KINDS",
    "ROWS",
    "Kind",
    "Owner",
    "bytes_of",
    "may_escape",
    "outcome",
    "plain",
    "writes_to",
]

ROWS, COLUMNS = 160, 128  # 80 KiB: deferred
FEW = ("add_", "index_put_", "_foreach_mul_", "set_")


class Kind(NamedTuple):
    """One parameter, how it comes into the state, and through what it is written."""

    make: Callable[[], torch.Tensor]
    given: Callable[[torch.Tensor], Any] = torch.Tensor.detach
    """What the state has."""
    target: Callable[[torch.Tensor], torch.Tensor] = lambda parameter: parameter
    """What the program writes to."""
    local: bool = False
    """Whether that is a plain tensor within ``make``'s."""
    known: bool = True
    """Whether torch moves a counter of the parameter's. If not, a write to a part of the tensor may escape."""


def plain() -> torch.Tensor:
    return torch.nn.Parameter(torch.rand(ROWS, COLUMNS))


def _sharded() -> torch.Tensor:
    mesh = init_device_mesh("cpu", (1,))
    return torch.nn.Parameter(distribute_tensor(torch.rand(ROWS, COLUMNS), mesh, [Shard(0)]))


def _wrapped() -> torch.Tensor:
    return Blocks(torch.rand(ROWS, COLUMNS), torch.rand(ROWS // 2))


def _quantized() -> torch.Tensor:
    subclass = pytest.importorskip("torchao.optim.subclass_8bit")
    state = subclass.OptimState8bit.zeros((4 * ROWS, COLUMNS * 2), signed=True, block_size=256)
    state.codes.random_()
    return state


KINDS = {
    "plain": Kind(plain),
    "plain, itself in the state": Kind(plain, given=lambda p: p),
    "plain, its .data in the state": Kind(plain, given=lambda p: p.data),
    "plain, by a view": Kind(plain, target=lambda p: p.view_as(p)),
    "plain, by .data": Kind(plain, target=lambda p: p.data, known=False),
    "DTensor": Kind(_sharded),
    "DTensor, itself in the state": Kind(_sharded, given=lambda p: p),
    "DTensor, its .data in the state": Kind(_sharded, given=lambda p: p.data),
    "DTensor, by to_local()": Kind(_sharded, target=lambda p: p.to_local(), local=True),
    "DTensor, by .data": Kind(_sharded, target=lambda p: p.data, known=False),
    "wrapper": Kind(_wrapped),
    "wrapper, by a part": Kind(_wrapped, target=lambda p: p.codes, local=True),
    "torchao's 8-bit state": Kind(_quantized),
}


class Owner(torch.optim.Optimizer):
    """Owns one tensor, and never steps."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__([torch.nn.Parameter(torch.zeros(1))], {})
        self.state[self.param_groups[0]["params"][0]] = {"tensor": tensor}
        dcp_datastates.track(self)

    def step(self, closure: Any = None) -> None:
        pass


def bytes_of(state: Any) -> dict[str, bytes]:
    """All bytes of a nested state by name; a DTensor's local ones."""
    if isinstance(state, dict):
        return {f"{k}.{n}": b for k, v in state.items() for n, b in bytes_of(v).items()}
    return {"": b"".join(held.numpy().tobytes() for held in held_bytes(state))}


def _stored(like: torch.Tensor, path: Path) -> bytes:
    """The tensor's bytes in the checkpoint: read into a fresh one, or its parts one by one."""
    found = dcp_datastates.load(path)["w"]
    if not isinstance(found, dict):
        return bytes_of(found)[""]
    parts = found
    while "__wrapper__" not in parts:
        parts = next(iter(parts.values()))
    names, _ = like.__tensor_flatten__()  # type: ignore[attr-defined]
    return b"".join(bytes_of(parts[name])[""] for name in names)


def outcome(handle: Any, tensor: torch.Tensor, expected: bytes, path: Path) -> str:
    try:
        handle.result()
    except SnapshotTornError:
        assert not (path / ".metadata").exists()
        return "torn"
    return "right" if _stored(tensor, path) == expected else "WRONG"


def writes_to(name: str) -> dict[str, Write]:
    kind = KINDS[name]
    return writes("plain", plain) if kind.local else writes(kind.make.__name__, kind.make)


def _some_word_is_left(before: bytes, after: bytes) -> bool:
    """Whether some word of the memory has not changed."""
    words = (np.frombuffer(held, np.uint64) for held in (before, after))
    return bool(np.equal(*words).any())


def may_escape(kind: str, write: str, before: bytes, after: bytes) -> bool:
    """Whether a write may be committed, because torch does not count it and it has left some word as it was."""
    counted = KINDS[kind].known and not (write.startswith("_foreach") and "DTensor" in kind)
    return not counted and _some_word_is_left(before, after)
