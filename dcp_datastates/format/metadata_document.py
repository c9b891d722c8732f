"""The document of a ``.metadata`` file: the parts of a table other than chunks and places, as JSON.

It has these keys; a "value" is encoded by :mod:`dcp_datastates.format.values`:

- ``attempt``, ``after``: the name of the attempt, and of the newest attempt that was seen when it was claimed, or null
- ``metrics``: numbers by name; left out if there are none
- ``published_at``: seconds since the epoch; older versions left it out
- ``trace``: what each rank's part of the save cost (:mod:`dcp_datastates.format.save_trace`); may be left out
- ``files``: a list of ``[path, nbytes, table_offset]``, in the order of ``Placement.paths``
- ``names``: ``Catalog.names``
- ``properties``: ``Catalog.table``; for each entry, its fields by name, as values
- ``planner_data``: a value
- ``version``, ``storage_meta``: of DCP's ``Metadata``; the latter's fields by name, as values, or null
- ``further``: ``[class, field, values, rows]`` for each field of ``MetadataTable.further``: its distinct values, and
  for each instance the index of its value, or -1
"""

from __future__ import annotations

import json
import logging
import math
import weakref
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Final

import torch
from torch.distributed.checkpoint.metadata import StorageMeta, TensorProperties

from dcp_datastates.format import trailer, values
from dcp_datastates.format.chunk_table import Catalog, FileRecord, Ints, Placement
from dcp_datastates.format.fields import IN_COLUMNS, is_field_name, known_fields, set_unknown_values
from dcp_datastates.format.metadata_check import MetadataError, described
from dcp_datastates.format.metadata_table import MISSING, MetadataTable, Note
from dcp_datastates.process.job_log import once_per_job
from dcp_datastates.storage.attempt import Attempt

__all__ = ["fields_to_json", "properties_of", "read_document", "warn_of_loss", "write_document"]

logger = logging.getLogger(__name__)


def write_document(table: MetadataTable) -> bytes:
    """The document of ``table``. Raises :class:`ValueRefused` for a planner's data that cannot be stored.

    A field of another torch whose values cannot be stored is left out with a warning: this package does not need it,
    and a job that has moved to that torch must be able to save.
    """
    note, meta = table.note, table.storage_meta
    of_save = values.dump(
        {
            **({"metrics": dict(note.metrics)} if note.metrics else {}),
            "attempt": note.attempt.name,
            "after": None if note.after is None else note.after.name,
            **({} if note.published_at is None else {"published_at": note.published_at}),
            **({} if note.trace is None else {"trace": note.trace}),
            "files": [
                [each.relative_path, each.nbytes, each.table_offset] for each in note.files.values()
            ],
        }
    )
    of_torch = values.dump(
        {
            "version": table.version,
            "storage_meta": None if meta is None else fields_to_json(meta),
            "further": [_column_to_json(*key, column) for key, column in table.further.items()],
        }
    )
    return b",".join((of_save[:-1], _members_of(table.catalog), of_torch[1:]))


_members: weakref.WeakKeyDictionary[Catalog, bytes] = weakref.WeakKeyDictionary()


def _members_of(catalog: Catalog) -> bytes:
    """What the document has of the catalog, without braces: made once, for saves whose structure is unchanged."""
    known = _members.get(catalog)
    if known is None:
        try:
            planner_data = values.to_json(catalog.mappings)
        except values.ValueRefused as error:
            raise values.ValueRefused(f"planner_data holds {error}") from None
        properties = [fields_to_json(each) for each in catalog.table]
        content = {"names": catalog.names, "properties": properties, "planner_data": planner_data}
        known = _members[catalog] = values.dump(content)[1:-1]
    return known


def fields_to_json(instance: Any) -> dict[str, Any]:
    """An instance's fields, by name, without fields of another torch that cannot be stored."""
    found = {}
    kind: Any = type(instance)
    for name in kind.__dataclass_fields__:
        if not hasattr(instance, name):  # from an older torch, and the field has a default factory
            continue
        try:
            found[name] = values.to_json(getattr(instance, name))
        except values.ValueRefused as error:
            if name in known_fields(kind):
                raise
            warn_of_loss(kind.__name__, name, str(error))
    return found


@cache
def warn_of_loss(kind: str, name: str, why: str) -> None:
    """Warn, once per process, that a field of another torch is left out of checkpoints."""
    logger.log(
        once_per_job(logging.WARNING),
        "%s.%s of this torch is left out of checkpoints: it has %s",
        kind,
        name,
        why,
    )


def read_document(data: bytes, columns: Mapping[str, Ints]) -> MetadataTable:
    """The table of this document and these columns. Does not check the columns' values.

    Raises :class:`MetadataError` or :class:`ValueRefused` for data that :func:`write_document` never writes.
    """
    found = values.load(data)
    if type(found) is not dict:
        raise MetadataError(f"the document is {described(found)}")
    names = _list(found, "names")
    if not set(map(type, names)) <= {str}:
        raise MetadataError("a name is no string")
    properties = tuple([properties_of(each) for each in _list(found, "properties")])
    files = [_record(each) for each in _list(found, "files")]
    note = Note(
        _attempt(found.get("attempt"), "attempt"),
        {each.relative_path: each for each in files},
        None if found.get("after") is None else _attempt(found["after"], "after"),
        _metrics(found.get("metrics", {})),
        _time(found.get("published_at")),
        found.get("trace"),
    )
    if len(note.files) != len(files):
        raise MetadataError("a data file is named twice")
    version, meta = found.get("version"), found.get("storage_meta")
    if version is not None and type(version) is not str:
        raise MetadataError(f"version is {described(version)}")
    chunks, objects = len(columns["chunk_files"]), len(columns["object_files"])
    lengths = {
        "Metadata": 1,
        "TensorStorageMetadata": len(names),
        "BytesStorageMetadata": len(names),
        "ChunkStorageMetadata": chunks,
        "MetadataIndex": chunks + objects,
        "_StorageInfo": chunks + objects,
    }
    return MetadataTable(
        Catalog(
            names=tuple(names),
            table=properties,
            mappings=values.from_json(found.get("planner_data")),
            **{key: columns[key] for key in trailer.CATALOG},
        ),
        Placement(paths=tuple(note.files), **{key: columns[key] for key in trailer.PLACEMENT}),
        note,
        None if meta is None else _storage_meta(meta),
        version,
        dict([_further(each, lengths) for each in _list(found, "further")]),
    )


def _list(found: dict[str, Any], key: str) -> list[Any]:
    value = found.get(key)
    if type(value) is not list:
        raise MetadataError(f"{key} is {described(value)}, not a list")
    return value


def _attempt(name: Any, what: str) -> Attempt:
    attempt = Attempt.parse(name) if type(name) is str else None
    if attempt is None:
        raise MetadataError(f"{what} is {described(name)}")
    return attempt


def _metrics(found: Any) -> dict[str, float]:
    if type(found) is not dict or not set(map(type, found.values())) <= {float}:
        raise MetadataError("the metrics are no numbers by name")
    return found


def _time(found: Any) -> float | None:
    if found is not None and (type(found) is not float or not math.isfinite(found)):
        raise MetadataError(f"the time of publication is {described(found)}")
    return found


def _record(found: Any) -> FileRecord:
    if type(found) is not list or list(map(type, found)) != [str, int, int]:
        raise MetadataError(
            "a data file is described by something else than its path and two sizes"
        )
    return FileRecord(*found)


def _fields(found: Any, kind: type) -> dict[str, Any]:
    """The fields of an instance of one of DCP's classes, without those that this torch cannot construct."""
    if type(found) is not dict:
        raise MetadataError(f"{kind.__name__} is {described(found)}")
    fields = {}
    for name, value in found.items():
        if not is_field_name(kind, name):
            raise MetadataError(f"{kind.__name__} has {described(name)}, no field of DCP's")
        try:
            fields[name] = values.from_json(value)
        except values.ValueRefused as error:
            if name in known_fields(kind):
                raise
            logger.info("%s.%s cannot be opened, and is left out: %s", kind.__name__, name, error)
    return fields


_PROPERTY_TYPES: Final[Mapping[str, type]] = {
    "dtype": torch.dtype,
    "layout": torch.layout,
    "requires_grad": bool,
    "memory_format": torch.memory_format,
    "pin_memory": bool,
}


def properties_of(found: Any) -> TensorProperties:
    """What :func:`fields_to_json` made of them. Raises :class:`MetadataError` or :class:`ValueRefused`."""
    fields = _fields(found, TensorProperties)
    for name, kind in _PROPERTY_TYPES.items():
        if type(fields.get(name)) is not kind:
            raise MetadataError(f"{name} of a tensor is {described(fields.get(name))}")
    properties = TensorProperties()
    set_unknown_values(properties, fields)
    return properties


def _storage_meta(found: Any) -> StorageMeta:
    meta = StorageMeta()
    set_unknown_values(meta, _fields(found, StorageMeta))
    return meta


def _column_to_json(kind: str, field: str, column: Sequence[Any]) -> list[Any]:
    numbers: dict[str, int] = {}
    rows = []
    for value in column:
        try:
            content = None if value is MISSING else json.dumps(values.to_json(value))
        except values.ValueRefused as error:
            warn_of_loss(kind, field, str(error))
            content = None
        rows.append(-1 if content is None else numbers.setdefault(content, len(numbers)))
    return [kind, field, list(map(json.loads, numbers)), rows]


def _further(found: Any, lengths: Mapping[str, int]) -> tuple[tuple[str, str], list[Any]]:
    """``lengths``: the number of instances of each class."""
    if type(found) is not list or list(map(type, found)) != [str, str, list, list]:
        raise MetadataError("a field of another torch is malformed")
    kind, name, packed, rows = found
    known = IN_COLUMNS.get(kind)
    if known is None or not is_field_name(known, name) or name in known_fields(known):
        raise MetadataError(f"{described(kind)} has {described(name)}, no field of DCP's")
    if (
        len(rows) != lengths[kind]
        or not set(map(type, rows)) <= {int}
        or any(not -1 <= row < len(packed) for row in rows)
    ):
        raise MetadataError(f"the values of {described(name)} are not there")
    opened: list[Any] = []
    for value in packed:
        try:
            opened.append(values.from_json(value))
        except values.ValueRefused as error:
            opened.append(MISSING)
            logger.info("a value of %s.%s is left out: %s", kind, name, error)
    opened.append(MISSING)  # for -1
    return (kind, name), [opened[row] for row in rows]
