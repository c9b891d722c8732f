"""Saving, loading and comparing, as the tests say it."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.tensor import DTensor

import dcp_datastates
from dcp_datastates import DataStatesReader, DataStatesWriter
from dcp_datastates.io.tensor_memory import inner_tensors
from dcp_datastates.storage.decisions import LONGEST_MARK

CACHE = "64MiB"
"""Host cache of most tests: many processes run them at once."""


def writer(path: Path | str | None = None, **options: Any) -> DataStatesWriter:
    return DataStatesWriter(path, **{"host_cache_size": CACHE, **options})


def save(
    state: Mapping[str, Any], path: Path | str, *, planner: Any = None, **options: Any
) -> None:
    """``dcp.save`` with a writer of its own."""
    with _quiet():
        dcp.save(dict(state), storage_writer=writer(path, **options), planner=planner)


def async_save(
    state: Mapping[str, Any],
    path: Path | str | None,
    *,
    by: DataStatesWriter | None = None,
    planner: Any = None,
    group: Any = None,
    checkpoint_id: Any = None,
    **options: Any,
) -> Future[Any]:
    """``dcp.async_save``, by the writer given or one of its own; its future."""
    with _quiet():
        future = dcp.async_save(
            dict(state),
            checkpoint_id=checkpoint_id,
            storage_writer=writer(path, **options) if by is None else by,
            planner=planner,
            process_group=group,
        )
    assert isinstance(future, Future), "async_save must return a plain Future"
    return future


def put(how: str, state: Mapping[str, Any], path: Path | str, **options: Any) -> None:
    """:func:`save`, or :func:`async_save` and its end, as ``how`` says."""
    if how == "save":
        save(state, path, **options)
    else:
        async_save(state, path, **options).result(60)


def load(
    state: dict[str, Any], path: Path | str, *, planner: Any = None, **options: Any
) -> dict[str, Any]:
    """``dcp.load`` into ``state``, and ``state``. Collective only where a default group exists."""
    with _quiet():
        dcp.load(state, storage_reader=DataStatesReader(path, **options), planner=planner)
    return state


def load_by_both(state: dict[str, Any], path: Path | str, **options: Any) -> dict[str, Any]:
    """:func:`load`, after ``dcp_datastates.load``: both give ``state`` the same values, or raise the same error."""
    try:
        dcp_datastates.load(path, state, **options)
    except Exception as error:
        with raises(type(error)):
            load(state, path, **options)
        raise
    tensors = list(_memory_of(state))
    loaded = [bits(each) for each in tensors]
    for each in tensors:
        local(each.detach()).zero_()
    load(state, path, **options)
    assert list(map(bits, _memory_of(state))) == loaded
    return state


def _memory_of(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, ShardedTensor):
        yield from (shard.tensor for shard in value.local_shards())
    elif isinstance(value, torch.Tensor):
        yield from inner_tensors(value)
    elif isinstance(value, (Mapping, list)):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _memory_of(each)


def entries(path: Path | str) -> dict[str, Any]:
    """What the metadata of the checkpoint at ``path`` say of each name."""
    return DataStatesReader(path).read_metadata().state_dict_metadata


def load_everything(path: Path | str, reader: Any = None) -> dict[str, Any]:
    """The whole checkpoint, with no template, in this process alone. It is trusted: a test has saved it."""
    found: dict[str, Any] = {}
    with _quiet():
        _load_state_dict(
            found,
            storage_reader=reader or DataStatesReader(path, allow_objects=True),
            planner=_EmptyStateDictLoadPlanner(),
            no_dist=True,
        )
    return found


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        warnings.filterwarnings("ignore", category=FutureWarning)
        yield


def committed(path: Path | str) -> bool:
    decisions = list(Path(path).glob("????????????????-????????*/decision"))
    if not decisions:  # stock DCP's has no decision
        metadata = Path(path, ".metadata")
        return metadata.is_file() and b"DCPDST" not in metadata.read_bytes()[-24:]
    try:
        return any(decision.stat().st_size > LONGEST_MARK for decision in decisions)
    except (
        FileNotFoundError
    ):  # that of an older attempt, which a newer one has replaced: look again
        return committed(path)


def attempts(path: Path | str) -> list[Path]:
    """The directories of attempts at ``path``, in the order of their names."""
    return sorted(entry for entry in Path(path).iterdir() if entry.is_dir())


# --- errors -------------------------------------------------------------------------------------


def causes(error: BaseException) -> list[BaseException]:
    """The errors that DCP wrapped, of every rank; or just ``error``."""
    if isinstance(error, CheckpointException):
        return [cause for wrapped in error.failures.values() for cause in causes(wrapped[0])]
    return [error]


@contextlib.contextmanager
def raises(
    kind: type[BaseException] | tuple[type[BaseException], ...], *words: str
) -> Iterator[None]:
    """The block raises a ``kind``, bare or wrapped by DCP, whose message has all of ``words``."""
    with pytest.raises((Exception, CheckpointException)) as caught:
        yield
    found = [cause for cause in causes(caught.value) if isinstance(cause, kind)]
    if not found:
        raise AssertionError(
            f"expected {kind}, got {[repr(cause) for cause in causes(caught.value)]}"
        ) from caught.value
    for word in words:
        assert word in str(found[0]), f"{word!r} is not in the message: {found[0]}"


# --- comparing ----------------------------------------------------------------------------------


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Malice:
    """Makes the directory ``victim`` when it is unpickled."""

    def __init__(self, victim: Path | str) -> None:
        self.victim = victim

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.victim),)


def bits(tensor: torch.Tensor) -> bytes:
    """The dense bytes of a tensor (of a DTensor: of the local shard), so that NaNs compare as well."""
    dense = local(tensor.detach()).resolve_conj().resolve_neg().contiguous()
    return bytes(dense.view(-1).view(torch.uint8).numpy()) if dense.numel() else b""


def _mapped(value: Any, function: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return {key: _mapped(element, function) for key, element in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(element, function) for element in value)
    return value


def clone(state: Any) -> Any:
    """A deep copy of all tensors, bit for bit."""
    return _mapped(state, lambda tensor: tensor.detach().clone())


def zeros(state: Any) -> Any:
    """A template to load into: the same shapes and dtypes, contiguous, nothing of the values."""

    def empty(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, DTensor):
            return torch.zeros_like(tensor.detach())
        result = torch.empty(tensor.shape, dtype=tensor.dtype)
        if result.numel():
            result.view(-1).view(torch.uint8).zero_()
        return result

    return _mapped(state, empty)


def assert_same(found: Any, expected: Any, name: str = "state", *, types: bool = False) -> None:
    """The same structure, shapes and dtypes, and the same bits in every tensor; with ``types``, each of the same class,
    and DTensors of the same placements.
    """
    if types:
        assert type(found) is type(expected), f"{name} is a {type(found).__name__}"
        placements = [getattr(each, "placements", None) for each in (found, expected)]
        assert placements[0] == placements[1], f"{name}: {placements}"
    if isinstance(expected, torch.Tensor):
        assert isinstance(found, torch.Tensor), f"{name} is a {type(found).__name__}"
        assert found.dtype == expected.dtype, f"{name}: {found.dtype}, not {expected.dtype}"
        assert found.shape == expected.shape, f"{name}: {found.shape}, not {expected.shape}"
        if bits(found) != bits(expected):
            pairs = zip(bits(found), bits(expected), strict=True)
            wrong = [place for place, (a, b) in enumerate(pairs) if a != b]
            raise AssertionError(
                f"{name}: {len(wrong)} of {len(bits(expected))} bytes differ, first at {wrong[0]}"
            )
    elif isinstance(expected, Mapping):
        assert isinstance(found, Mapping), f"{name} is a {type(found).__name__}"
        assert set(found) == set(expected), f"{name}: keys {set(found) ^ set(expected)} differ"
        for key, value in expected.items():
            assert_same(found[key], value, f"{name}[{key!r}]", types=types)
    elif isinstance(expected, (list, tuple)):
        assert type(found) is type(expected), f"{name} is a {type(found).__name__}"
        assert len(found) == len(expected), f"{name}: length {len(found)}, not {len(expected)}"
        for position, value in enumerate(expected):
            assert_same(found[position], value, f"{name}[{position}]", types=types)
    else:
        assert found == expected, f"{name}: {found!r}, not {expected!r}"
