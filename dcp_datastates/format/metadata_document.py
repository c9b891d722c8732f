"""The document of a ``.metadata`` file: the parts of a table other than chunks and places, as JSON.

It has these keys; a "value" is encoded by :mod:`dcp_datastates.format.values`:

- ``attempt``, ``after``: the name of the attempt, and of the newest attempt that was seen when it was claimed, or null
- ``metrics``: numbers by name
- ``published_at``: seconds since the epoch
- ``trace``: what each rank's part of the save cost (:mod:`dcp_datastates.format.save_trace`), or null
- ``files``: a list of ``[path, nbytes, table_offset]``, in the order of ``Placement.paths``
- ``names``: ``Catalog.names``
- ``properties``: ``Catalog.table``; for each entry, its fields by name, as values
- ``planner_data``: a value
- ``storage_meta``: of DCP's ``Metadata``; its fields by name, as values, or null
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from torch.distributed.checkpoint.metadata import StorageMeta

from dcp_datastates.format import trailer, values
from dcp_datastates.format.fields import fields_from_json, fields_to_json, properties_from_json
from dcp_datastates.format.metadata_table import (
    Catalog,
    FileRecord,
    Ints,
    MetadataTable,
    Note,
    Placement,
    once,
)
from dcp_datastates.format.values import ValueRefused, described
from dcp_datastates.storage.attempt import Attempt

_LAST_DAY: Final = 253_402_128_000.0
"""In the year 9999: Python has dates until then, in any time zone."""


def write_document(table: MetadataTable) -> bytes:
    """The document of ``table``. Raises :class:`ValueRefused` for a planner's data that cannot be stored."""
    note, meta = table.note, table.storage_meta
    of_save = values.dump(
        {
            "metrics": dict(note.metrics),
            "attempt": note.attempt.name,
            "after": None if note.after is None else note.after.name,
            "published_at": note.published_at,
            "trace": note.trace,
            "files": [
                [each.relative_path, each.nbytes, each.table_offset] for each in note.files.values()
            ],
        }
    )
    of_torch = values.dump({"storage_meta": None if meta is None else fields_to_json(meta)})
    return b",".join((of_save[:-1], _members_of(table.catalog), of_torch[1:]))


@once
def _members_of(catalog: Catalog) -> bytes:
    """What the document has of the catalog, without braces."""
    try:
        planner_data = values.to_json(catalog.mappings)
    except ValueRefused as error:
        raise ValueRefused(f"planner_data holds {error}") from None
    properties = [fields_to_json(each) for each in catalog.table]
    content = {"names": catalog.names, "properties": properties, "planner_data": planner_data}
    return values.dump(content)[1:-1]


def read_document(data: bytes, columns: Mapping[str, Ints]) -> MetadataTable:
    """The table of this document and these columns. Does not check the columns' values.

    Raises :class:`ValueRefused` for data that :func:`write_document` never writes.
    """
    found = values.load(data)
    if type(found) is not dict:
        raise ValueRefused(f"the document is {described(found)}")
    names = _typed(found, "names", list, str)
    properties = tuple([properties_from_json(each) for each in _typed(found, "properties", list)])
    files = [_record(each) for each in _typed(found, "files", list)]
    published_at = _typed(found, "published_at", float)
    if not 0 <= published_at < _LAST_DAY:
        raise ValueRefused(f"published_at is {published_at}, which is no time of a save")
    note = Note(
        _attempt(found.get("attempt"), "attempt"),
        {each.relative_path: each for each in files},
        None if found.get("after") is None else _attempt(found["after"], "after"),
        _typed(found, "metrics", dict, float),
        published_at,
        found.get("trace"),
    )
    if len(note.files) != len(files):
        raise ValueRefused("a data file is named twice")
    meta = found.get("storage_meta")
    return MetadataTable(
        Catalog(
            names=tuple(names),
            table=properties,
            mappings=values.from_json(found.get("planner_data")),
            **{key: columns[key] for key in trailer.CATALOG},
        ),
        Placement(paths=tuple(note.files), **{key: columns[key] for key in trailer.PLACEMENT}),
        note,
        None if meta is None else StorageMeta(**fields_from_json(meta, StorageMeta)),
    )


def _typed(found: dict[str, Any], key: str, kind: Any, of: type | None = None) -> Any:
    """The value at ``key``, if it is of this type, and all in it of the type ``of``."""
    value: Any = found.get(key)
    if type(value) is not kind:
        raise ValueRefused(f"{key} is {described(value)}, not a {kind.__name__}")
    inner = value.values() if kind is dict else value
    if of is not None and not set(map(type, inner)) <= {of}:
        raise ValueRefused(f"what is in {key} is not all of type {of.__name__}")
    return value


def _attempt(name: Any, what: str) -> Attempt:
    attempt = Attempt.parse(name) if type(name) is str else None
    if attempt is None:
        raise ValueRefused(f"{what} is {described(name)}")
    return attempt


def _record(found: Any) -> FileRecord:
    if type(found) is not list or list(map(type, found)) != [str, int, int]:
        raise ValueRefused("a data file is described by something else than its path and two sizes")
    return FileRecord(*found)
