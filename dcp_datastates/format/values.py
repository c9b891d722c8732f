"""Python values as JSON: planners' data, and the fields of DCP's dataclasses that this package carries.

Numbers, strings, None, booleans and lists stand for themselves. Any other value is an object with one key, which names
its type::

    (1, 2)                          {"tuple": [1, 2]}
    torch.Size((1, 2))              {"Size": [1, 2]}
    {"a": 1}                        {"dict": {"a": 1}}
    {"a": (1, 2)}                   {"tuples": {"a": [1, 2]}}, as paths are; also {"dict": {"a": {"tuple": [1, 2]}}}
    b"a"                            {"bytes": "61"}
    torch.float32                   {"dtype": "float32"}
    torch.strided                   {"layout": "strided"}
    torch.channels_last             {"memory_format": "channels_last"}

Keys of dicts are strings: their hashes differ between processes, so a file cannot provoke hash collisions here.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Collection, Mapping
from itertools import chain
from typing import Any, Final

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
)

_MAX_DEPTH: Final = 50
_HEXADECIMAL: Final = re.compile(r"([0-9a-f]{2})*")
_NESTED: Final = frozenset({list, dict})

_MOST_TIMES: Final = 4
_SPARE_BYTES: Final = 128 << 20
"""What is read from a file becomes at most so many times its bytes, and these, which let a small one be dense.

Columns of many ranks become 3 times their bytes, and metadata of names with one chunk 2 to 3 times. JSON alone may
become 30 times its bytes: ``[],`` are a list. The checks of columns take temporary memory besides.
"""
_PYTHON_BYTES: Final[Mapping[bytes, int]] = {b"[": 64, b"{": 184, b'"': 28, b",": 8}
"""Memory for what one of these bytes of JSON may stand for. A string has two quotes."""
_MAX_DIGITS: Final = 100  # parsing time is quadratic in the number of digits

_NAMED: Final[Mapping[str, Mapping[str, Any]]] = {
    kind.__name__: {name: value for name, value in vars(torch).items() if isinstance(value, kind)}
    for kind in (torch.dtype, torch.layout, torch.memory_format)
}


class ValueRefused(ValueError):
    """A value that a checkpoint cannot store, or stored data that no checkpoint has; the message says which."""


def described(value: object) -> str:
    """A short text for ``value`` in a message, for any value from a file, without traversing it."""
    if value is None or isinstance(value, (bool, int, str)):
        text = repr(value)
        return text if len(text) <= 200 else f"{text[:200]}…"
    return f"a {type(value).__name__}"


def to_json(value: Any, depth: int = 0) -> Any:
    """Convert ``value`` to a form that ``json`` can write; raises :class:`ValueRefused` if it cannot be stored."""
    kind = type(value)
    if value is None or kind in (bool, float, str):
        return value
    if kind is int:
        if abs(value) >= 10**_MAX_DIGITS:
            raise ValueRefused(f"an integer of more than {_MAX_DIGITS} digits")
        return value
    if depth > _MAX_DEPTH:
        raise ValueRefused(f"values nested deeper than {_MAX_DEPTH}")
    if kind in (list, tuple, torch.Size):
        items = [to_json(item, depth + 1) for item in value]
        return items if kind is list else {kind.__name__: items}
    if kind is dict:
        for key in value:
            if type(key) is not str:
                raise ValueRefused(f"a dict with a key of type {type(key).__name__}")
        if set(map(type, value.values())) == {tuple}:
            lists = [[to_json(each, depth + 2) for each in items] for items in value.values()]
            return {"tuples": dict(zip(value, lists, strict=True))}
        return {"dict": {key: to_json(item, depth + 1) for key, item in value.items()}}
    if kind is bytes:
        return {"bytes": value.hex()}
    if kind.__name__ in _NAMED:
        name = str(value).removeprefix("torch.")
        if _NAMED[kind.__name__].get(name) is value:
            return {kind.__name__: name}
    raise ValueRefused(f"a value of type {kind.__module__}.{kind.__qualname__}")


def from_json(found: Any, depth: int = 0) -> Any:
    """The value that :func:`to_json` converted; raises :class:`ValueRefused` if ``found`` cannot be its result."""
    kind = type(found)
    if kind not in _NESTED:
        return found
    if depth > _MAX_DEPTH:
        raise ValueRefused(f"values nested deeper than {_MAX_DEPTH}")
    if kind is list:
        return _items(found, depth + 1)
    if len(found) != 1:
        raise ValueRefused(f"an object with {len(found)} keys")
    ((tag, content),) = found.items()
    if type(content) is list:
        if tag == "tuple":
            return tuple(_items(content, depth + 1))
        if tag == "Size" and set(map(type, content)) <= {int}:
            return _size(content)
    elif tag == "dict" and type(content) is dict:
        return {key: from_json(item, depth + 1) for key, item in content.items()}
    elif tag == "tuples" and type(content) is dict:
        lists: Collection[list[Any]] = content.values()
        if not set(map(type, lists)) <= {list}:
            raise ValueRefused("tuples that are no lists")
        if not _NESTED.isdisjoint(map(type, chain.from_iterable(lists))):
            lists = [_items(each, depth + 2) for each in lists]
        return dict(zip(content, map(tuple, lists), strict=True))
    elif type(content) is str:
        if tag in _NAMED and content in _NAMED[tag]:
            return _NAMED[tag][content]
        if tag == "bytes" and _HEXADECIMAL.fullmatch(content):
            return bytes.fromhex(content)
    raise ValueRefused(f"a value of an unknown kind, {str(tag)[:100]!r}")


def _items(found: list[Any], depth: int) -> list[Any]:
    if _NESTED.isdisjoint(map(type, found)):
        return found
    return [from_json(item, depth) for item in found]


def _size(items: list[int]) -> torch.Size:
    if any(abs(item) >> 63 for item in items):
        raise ValueRefused("a torch.Size of what are no sizes")
    return torch.Size(items)


def dump(content: Any) -> bytes:
    """Encode ``content`` as JSON, in ASCII; strings may contain any characters."""
    return json.dumps(content, separators=(",", ":")).encode()


def check_memory(file_bytes: int, document: bytes, numbers: int = 0) -> None:
    """Raise :class:`ValueRefused` if this JSON and as many ``numbers`` of 8 bytes need too much memory for a file of
    ``file_bytes``.
    """
    needed = 8 * numbers + len(document)
    needed += sum(cost * document.count(byte) for byte, cost in _PYTHON_BYTES.items())
    most = _MOST_TIMES * file_bytes + _SPARE_BYTES
    if needed > most:
        raise ValueRefused(
            f"{file_bytes} bytes would become {needed} bytes in memory; those of a checkpoint become {most} at most"
        )


def load(data: bytes, **hooks: Any) -> Any:
    """The content of JSON. :class:`ValueRefused`: not JSON, nested too deeply, or huge numbers.

    Check its size with :func:`check_memory` before. ``hooks``: further arguments of ``json.loads``, which may raise
    :class:`ValueRefused`, too.
    """
    try:
        return json.loads(data.decode(), parse_int=_integer, **hooks)
    except RecursionError:
        raise ValueRefused("JSON that nests too deeply") from None
    except ValueRefused:
        raise
    except ValueError as error:
        raise ValueRefused(f"no JSON: {str(error)[:200]}") from None


def _integer(digits: str) -> int:
    if len(digits) > _MAX_DIGITS + 1:
        raise ValueRefused(f"a number of {len(digits)} digits")
    return int(digits)


# ---- the fields of DCP's dataclasses -------------------------------------------------------------


# Those of torch 2.11 to 2.15. A newer torch may add fields. Checkpoints leave these out, and one line of the log says
# so (``dcp/tested.py``).
_FIELDS: Final[Mapping[Any, tuple[str, ...]]] = {
    TensorProperties: (
        *("dtype", "layout", "requires_grad", "memory_format", "pin_memory"),
        "strides",  # since 2.15
    ),
    ChunkStorageMetadata: ("offsets", "sizes"),
    TensorStorageMetadata: ("properties", "size", "chunks"),
    BytesStorageMetadata: (),
    MetadataIndex: ("fqn", "offset", "index"),
    Metadata: ("state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version"),
    StorageMeta: ("checkpoint_id", "save_id", "load_id", "modules"),
    _StorageInfo: ("relative_path", "offset", "length", "transform_descriptors"),
    TensorWriteData: ("chunk", "properties", "size"),
    WriteItem: ("index", "type", "bytes_io_data", "tensor_data"),
    SavePlan: ("items", "storage_data", "planner_data", "usable"),
    ReadItem: (
        *("type", "dest_index", "dest_offsets", "storage_index", "storage_offsets", "lengths"),
    ),
    LoadPlan: ("items", "storage_data", "planner_data"),
}

PROPERTIES: Final = tuple(
    [name for name in _FIELDS[TensorProperties] if name in TensorProperties.__dataclass_fields__]
)
"""The fields of properties that are carried, and that the installed torch has."""

HAS_STRIDES: Final = "strides" in PROPERTIES
"""Whether the installed torch is 2.15 or newer: properties have the strides of a tensor's memory."""


def new_fields() -> dict[str, bool]:
    """The fields of the installed torch that are not carried, such as ``"WriteItem.type"``; for each, whether an
    instance can be made without it.
    """
    return {
        f"{kind.__name__}.{field.name}": (field.default, field.default_factory)
        != (dataclasses.MISSING, dataclasses.MISSING)
        for kind, known in _FIELDS.items()
        for field in dataclasses.fields(kind)
        if field.name not in known
    }


def properties_to_json(properties: TensorProperties) -> dict[str, Any]:
    """The fields of properties, by name."""
    return {name: to_json(getattr(properties, name)) for name in PROPERTIES}


_PROPERTY_TYPES: Final[Mapping[str, type]] = {
    "dtype": torch.dtype,
    "layout": torch.layout,
    "requires_grad": bool,
    "memory_format": torch.memory_format,
    "pin_memory": bool,
}


def properties_from_json(found: Any) -> TensorProperties:
    """What :func:`properties_to_json` made of properties: the fields that this torch has, too. Raises
    :class:`ValueRefused`.
    """
    if type(found) is not dict:
        raise ValueRefused(f"TensorProperties is {described(found)}")
    fields = {name: from_json(found[name]) for name in PROPERTIES if name in found}
    for name, kind in _PROPERTY_TYPES.items():
        if type(fields.get(name)) is not kind:
            raise ValueRefused(f"{name} of a tensor is {described(fields.get(name))}")
    strides = fields.get("strides")
    if strides is not None and (type(strides) is not tuple or not set(map(type, strides)) <= {int}):
        raise ValueRefused(f"strides of a tensor is {described(strides)}")
    return TensorProperties(**fields)
