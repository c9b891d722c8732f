"""Every way in which a program writes to a tensor in place: found by asking torch, not listed by hand.

A *write* is a function of one tensor. :func:`writes` finds those that torch can carry out on a given tensor, by trying
arguments until a call of each function succeeds on a copy.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import dcp_datastates
from dcp_datastates.errors import SnapshotTornError
from dcp_datastates.io.tensor_memory import inner_tensors, layers
from support.state.wrapped import Blocks

Write = Callable[[torch.Tensor], object]

NOT_WRITES = {
    "requires_grad_",  # no bytes
    "share_memory_",
    "detach_",  # refused for leaves or views
}

CRASHES_ON_WRAPPERS = {"apply_", "map_", "map2_"}
"""Torch itself writes to memory that a tensor subclass does not have."""


def held_bytes(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Copies of the bytes of a tensor's local and inner tensors."""
    return [
        inner.detach().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)
        for inner in inner_tensors(tensor)
    ]


def _arguments(tensor: torch.Tensor) -> Iterator[tuple[Any, ...]]:
    """Arguments to try for a function of this tensor, simplest first."""
    detached = tensor.detach()
    other = detached + 1
    mask = other > 0
    yield ()
    yield (0.25,)
    yield (other,)
    yield (0, 1)
    yield (other, 0.5)
    yield (other, other)
    yield (mask, 0.25)
    if isinstance(tensor, DTensor):  # it refuses the rest with pages of log, or worse
        return
    yield (mask, other)
    rows = torch.arange(2)
    yield (0, rows, 0.25)
    yield (0, rows, other[:2])
    index = torch.zeros_like(other, dtype=torch.int64)
    yield (0, index, other)
    yield (0, index, other, "sum")
    yield (0, rows, other[:2], "prod")
    yield ((rows,), other[:2])
    yield (rows, other.reshape(-1)[:2])
    yield (2, 0, 0.5)
    yield (lambda value: value + 1,)
    yield (other, lambda value, _: value + 1)
    yield (other, other, lambda value, *_: value + 1)


def _tries(function: Callable[..., Any], make: Callable[[], torch.Tensor]) -> Write | None:
    """The function with the first arguments with which it changes the bytes of what ``make`` returns."""
    try:
        arguments = list(_arguments(make()))
    except Exception:
        arguments = [(), (0.25,), (torch.rand(make().shape),)]
    for given in arguments:
        trial = make()
        before = held_bytes(trial)
        try:
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                function(trial, *given)
                after = held_bytes(trial)
        except Exception:
            continue
        if len(before) == len(after) and all(map(torch.equal, before, after)):
            continue
        return lambda target, given=given: function(target, *given)
    return None


def _out(function: Callable[..., Any]) -> Callable[..., Any]:
    def write(target: torch.Tensor, *arguments: Any) -> None:
        function(target.detach().clone(), *arguments, out=target)

    return write


def _foreach(function: Callable[..., Any]) -> Callable[..., Any]:
    def write(target: torch.Tensor, *arguments: Any) -> None:
        several = [[one] if isinstance(one, torch.Tensor) else one for one in arguments]
        function([target], *several)

    return write


def _replace(target: torch.Tensor) -> None:
    target.set_(torch.zeros_like(target))


def _assign(target: torch.Tensor) -> None:
    target[:2] = 0.25


def _load_state_dict(target: torch.Tensor) -> None:
    module = torch.nn.Module()
    module.w = target if isinstance(target, torch.nn.Parameter) else torch.nn.Parameter(target)
    module.load_state_dict({"w": target.detach() + 1})


def _functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    for name in sorted(vars(torch._C.TensorBase).keys() | vars(torch.Tensor).keys()):
        if name.endswith("_") and not name.startswith("_") and name not in NOT_WRITES:
            yield name, getattr(torch.Tensor, name)
    for name in ("__iadd__", "__imul__", "__isub__", "__itruediv__", "__ipow__"):
        yield name, getattr(torch.Tensor, name)
    for name in dir(torch):
        function = getattr(torch, name)
        if name.startswith("_foreach_") and name.endswith("_"):
            yield name, _foreach(function)
        elif not name.startswith("_") and "out=None" in str(getattr(function, "__doc__", "")):
            yield f"{name}(out=)", _out(function)
    yield "[:2] =", _assign
    yield "set_ (another storage)", _replace
    yield "load_state_dict", _load_state_dict


_known: dict[tuple[str, bool], dict[str, Write]] = {}


def writes(kind: str, make: Callable[[], torch.Tensor], every: bool) -> dict[str, Write]:
    """The writes that torch can carry out on what ``make`` returns, by name; if not ``every`` one, those of
    :data:`FEW`. Found once for each ``kind``.
    """
    if (kind, every) not in _known:
        torch.manual_seed(0)
        like = make()
        logging.disable(logging.CRITICAL)  # DTensor logs what it cannot do
        try:
            found = {
                name: _tries(function, make)
                for name, function in _functions()
                if (every or name in FEW)
                and (len(layers(like)) == 1 or name not in CRASHES_ON_WRAPPERS)
            }
        finally:
            logging.disable(logging.NOTSET)
        _known[kind, every] = {name: write for name, write in found.items() if write is not None}
    return _known[kind, every]


ROWS, COLUMNS = 160, 128  # 80 KiB: deferred
FEW = ("add_", "copy_", "index_put_", "_foreach_mul_", "set_")


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


def writes_to(name: str, every: bool = False) -> dict[str, Write]:
    kind = KINDS[name]
    make = plain if kind.local else kind.make
    found = writes(make.__name__, make, every)
    assert found
    return found


def _some_word_is_left(before: bytes, after: bytes) -> bool:
    """Whether some word of the memory has not changed."""
    words = (np.frombuffer(held, np.uint64) for held in (before, after))
    return bool(np.equal(*words).any())


def may_escape(kind: str, write: str, before: bytes, after: bytes) -> bool:
    """Whether a write may be committed, because torch does not count it and it has left some word as it was."""
    counted = KINDS[kind].known and not (write.startswith("_foreach") and "DTensor" in kind)
    return not counted and _some_word_is_left(before, after)
