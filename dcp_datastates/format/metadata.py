"""The ``.metadata`` file: a pickle for DCP's own tools, and a table with the same contents for this package.

The pickle is a ``Metadata`` with names, shapes and dtypes. A table of columns follows it. This package reads
only the table: it never unpickles metadata, and the table names no class or function to call.

Format 2. Integers are little-endian, except for the number of the format:

1. The file consists of a pickle, the columns, the directory, and the end, without gaps.
2. The end is the last 24 bytes of the file:

   ====== ==== ==========================================================
   offset size
   ====== ==== ==========================================================
   0      6    ``DCPDST``
   6      2    the format, big-endian: 2
   8      8    length of the pickle; the columns begin there
   16     4    how many columns there are: 10
   20     4    CRC32C of all bytes of the file before these four
   ====== ==== ==========================================================

3. The directory has nine bytes for each column, in order: the bytes per value (1, 2, 4 or 8), and the number of values
   (8 bytes).
4. The columns follow one another without padding, in the order of the directory. Values of 1, 2 and 4 bytes are
   unsigned, those of 8 bytes are signed. A writer uses the smallest size that fits all values.
5. The first column, ``document``, has values of one byte: JSON in UTF-8. The other columns are those of
   :data:`CATALOG` and :data:`PLACEMENT`, as documented in ``Catalog`` and ``Placement`` of
   :mod:`dcp_datastates.format.metadata_table`.

In every format from 2 on, the end is the last 24 bytes, with the same meaning of its first eight bytes, and with the
checksum in its last four. So a reader can distinguish a file of a later format from a damaged one.

Reading takes time and memory proportional to the file: a count in the file never causes an allocation before the reader
has checked that the counted bytes exist. (Columns are widened, and JSON becomes objects, within the limit of
``values.check_memory``.)

The document has the parts of a table other than chunks and places, as JSON, by these keys. A "value" is encoded by
:mod:`dcp_datastates.format.values`:

- ``attempt``, ``after``: the name of the attempt, and of the newest attempt that was seen when it was claimed, or null
- ``metrics``: numbers by name
- ``published_at``: seconds since the epoch
- ``trace``: what each rank's part of the save cost (:mod:`dcp_datastates.format.save_trace`), or null
- ``files``: a list of ``[path, nbytes, table_offset]``, in the order of ``Placement.paths``
- ``names``: ``Catalog.names``
- ``properties``: ``Catalog.table``; for each entry, its fields by name, as values
- ``planner_data``: a value
"""

from __future__ import annotations

import contextlib
import copyreg
import io
import pickle
import struct
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from dcp_datastates._native import crc32c
from dcp_datastates.errors import (
    CheckpointCorruptError,
    ConfigurationError,
    UnreadableMetadataError,
)
from dcp_datastates.format import values
from dcp_datastates.format.metadata_check import check
from dcp_datastates.format.metadata_table import (
    CATALOG,
    PLACEMENT,
    STORED,
    Catalog,
    Compared,
    FileRecord,
    MetadataTable,
    Note,
    Placement,
    narrowed,
    once,
)
from dcp_datastates.format.ragged import Ints
from dcp_datastates.format.values import (
    ValueRefused,
    described,
    properties_from_json,
    properties_to_json,
)
from dcp_datastates.process.garbage import collection_paused
from dcp_datastates.storage.attempt import Attempt
from dcp_datastates.storage.local import METADATA_NAME
from dcp_datastates.storage.object_path import Location

DCP_VERSION: Final = "1.0.0"
"""The value that stock DCP of torch 2.11 to 2.13 writes as ``Metadata.version``."""

TRANSFORM_DESCRIPTORS: Final = (
    (
        "this is a checkpoint of dcp_datastates: load it with dcp_datastates.load(path), or with "
        "storage_reader=dcp_datastates.DataStatesReader(path); `dcp-datastates convert PATH OUT --to dcp` makes one of "
        "stock DCP"
    ),
)
"""The sentence by which a stock reader refuses a checkpoint of this package. ``FileSystemReader`` expects files of
``torch.save``, and would advise to switch ``weights_only`` off. But first it looks up the extensions that the metadata
name for each piece of data (``_StorageInfo.transform_descriptors``), and raises ``ValueError: Unknown extension
name='...'`` for an unknown one. So the extension's name is this sentence. It contains no slash: text after a slash is a
version, and is not printed. This package's reader ignores it, and reads checkpoints without it.
"""


@contextlib.contextmanager
def refusing() -> Iterator[None]:
    """Raise :class:`ConfigurationError` for metadata that must not be written."""
    try:
        yield
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigurationError(
            f"the checkpoint's metadata could not be opened again: {error}; a planner must keep its planner_data to "
            f"plain dicts with strings as keys, lists, tuples, strings and numbers, and the ranks that hold a tensor "
            f"must save together"
        ) from error


@refusing()
@collection_paused()
def encode(table: MetadataTable) -> bytes:
    """The bytes of a ``.metadata`` file.

    Raises :class:`ConfigurationError` if :func:`decode` would refuse the bytes, or if a planner's data cannot be
    stored: a checkpoint that cannot be opened must not be committed.
    """
    check(table.catalog, table.placement, table.note.files)
    document = _written_document(table)
    columns = [getattr(table.catalog, name) for name in CATALOG]
    columns += [getattr(table.placement, name) for name in PLACEMENT]
    data = _joined(stub_of(table.catalog), document, columns)
    values.check_memory(len(data), document, sum(map(len, columns)))
    return data


@collection_paused()
def decode(data: bytes, path: Location) -> MetadataTable:
    """The table in the bytes of the ``.metadata`` file at ``path``, checked for everything that DCP and this package
    rely on.

    Raises :class:`CheckpointCorruptError` if the bytes are damaged, :class:`UnreadableMetadataError` if they are not
    metadata of a format that this release knows. Time and memory are linear in the length.
    """
    try:
        document, columns = parse(data, path)
        values.check_memory(len(data), document, sum(map(len, columns.values())))
        widened = {name: column.astype(np.int64) for name, column in columns.items()}
        table = _table_of(document, widened)
        check(table.catalog, table.placement, table.note.files)
    except ValueRefused as error:
        raise UnreadableMetadataError(f"{path}: not checkpoint metadata: {error}") from error
    return table


# ---- the pickle for DCP's own tools --------------------------------------------------------------


_PROTOCOL: Final = 4

_NOWHERE: Final = _StorageInfo(METADATA_NAME, 0, 0, TRANSFORM_DESCRIPTORS)
"""A file that exists: stock DCP opens it before it refuses the entry."""


@once
def stub_of(catalog: Catalog) -> bytes:
    """The pickle for a catalog that ``metadata_check`` has accepted. The same torch gives the same bytes."""
    return _pickled(_stub(catalog))


def _stub(catalog: Catalog) -> Metadata:
    entries: dict[str, STORAGE_TYPES] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    # Few are different, and the pickle has each once. An entry is its tensor's own: programs change its size.
    alike: dict[torch.Size, ChunkStorageMetadata] = {}
    for number, (name, kind) in enumerate(
        zip(catalog.names, catalog.properties.tolist(), strict=True)
    ):
        if kind < 0:
            entries[name] = BytesStorageMetadata()
            places[MetadataIndex(name)] = _NOWHERE
            continue
        size = catalog.shape(number)
        if size not in alike:
            alike[size] = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
        chunk = alike[size]
        entries[name] = TensorStorageMetadata(catalog.table[kind], chunk.sizes, [chunk])
        places[MetadataIndex(name, chunk.offsets)] = _NOWHERE
    return Metadata(entries, storage_data=places, version=DCP_VERSION)


def _pickled(metadata: Metadata) -> bytes:
    written = io.BytesIO()
    pickler = pickle.Pickler(written, _PROTOCOL)
    pickler.dispatch_table = copyreg.dispatch_table | {TensorProperties: _for_every_torch}
    pickler.dump(metadata)
    return written.getvalue()


def _for_every_torch(properties: TensorProperties) -> tuple[Any, ...]:
    """Releases before 2.15 read a tuple of five fields only, later ones read it, too."""
    own = properties.__getstate__()  # type: ignore[no-untyped-call]
    return copyreg.__newobj__, (TensorProperties,), own[:5] if type(own) is tuple else own  # type: ignore[attr-defined]


# ---- the document --------------------------------------------------------------------------------


_LAST_DAY: Final = 253_402_128_000.0
"""In the year 9999: Python has dates until then, in any time zone."""


def _written_document(table: MetadataTable) -> bytes:
    """The document of ``table``. Raises :class:`ValueRefused` for a planner's data that cannot be stored."""
    note = table.note
    of_save = values.dump(
        {
            "metrics": dict(note.metrics),
            "attempt": note.attempt.name,
            "after": None if note.after is None else note.after.name,
            "published_at": note.published_at,
            "trace": note.trace,
            "compared": note.compared,
            "files": [
                [each.relative_path, each.nbytes, each.table_offset] for each in note.files.values()
            ],
        }
    )
    return b"%b,%b}" % (of_save[:-1], _members_of(table.catalog))


@once
def _members_of(catalog: Catalog) -> bytes:
    """What the document has of the catalog, without braces."""
    try:
        planner_data = values.to_json(catalog.mappings)
    except ValueRefused as error:
        raise ValueRefused(f"planner_data holds {error}") from None
    properties = [properties_to_json(each) for each in catalog.table]
    content = {"names": catalog.names, "properties": properties, "planner_data": planner_data}
    return values.dump(content)[1:-1]


def _table_of(data: bytes, columns: Mapping[str, Ints]) -> MetadataTable:
    """The table of this document and these columns. Does not check the columns' values.

    Raises :class:`ValueRefused` for data that a save never writes.
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
        _compared(found.get("compared")),
    )
    if len(note.files) != len(files):
        raise ValueRefused("a data file is named twice")
    return MetadataTable(
        Catalog(
            names=tuple(names),
            table=properties,
            mappings=values.from_json(found.get("planner_data")),
            **{key: columns[key] for key in CATALOG},
        ),
        Placement(paths=tuple(note.files), **{key: columns[key] for key in PLACEMENT}),
        note,
    )


def _compared(value: object) -> Compared | None:
    if value is None:
        return None
    if type(value) is not list or list(map(type, value)) != [int, int, str]:
        raise ValueRefused(f"compared is {described(value)}")
    if not 0 <= value[0] < value[1]:
        raise ValueRefused(f"compared is part {value[0]} of {value[1]}")
    return Compared(*value)


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


# ---- the columns and the end ---------------------------------------------------------------------


FORMAT: Final = 2

_COLUMNS: Final = CATALOG + PLACEMENT
"""The columns after the document, in order."""

_MAGIC: Final = b"DCPDST"
_END: Final = struct.Struct("<6s2sQII")
_CHECKSUM: Final = struct.Struct("<I")
_ENTRY: Final = struct.Struct("<BQ")


def _joined(pickled: bytes, document: bytes, columns: Iterable[Ints]) -> bytes:
    """The bytes of a whole file: ``pickled``, followed by the table."""
    packed = [np.frombuffer(document, np.uint8), *map(narrowed, columns)]
    parts: list[bytes | memoryview] = [pickled, *(column.data for column in packed)]
    parts += [_ENTRY.pack(column.itemsize, len(column)) for column in packed]
    number = FORMAT.to_bytes(2, "big")
    parts.append(_END.pack(_MAGIC, number, len(pickled), len(packed), 0)[: -_CHECKSUM.size])
    checksum = 0
    for part in parts:
        checksum = crc32c(part, checksum)
    return b"".join((*parts, _CHECKSUM.pack(checksum)))


def is_ours(data: bytes) -> bool:
    """Whether a file with these bytes, or a file that ends with them, ends as those of this package do."""
    return data[-_END.size :].startswith(_MAGIC) and len(data) >= _END.size


def parse(data: bytes, path: Location) -> tuple[bytes, dict[str, npt.NDArray[Any]]]:
    """The document and the columns in ``data``, the bytes of the file at ``path``; the columns as they are stored.

    Does not check the columns' values. Raises :class:`CheckpointCorruptError` if the bytes are damaged,
    :class:`UnreadableMetadataError` if they are intact but of another format, and :class:`ValueRefused` if they are no
    table.
    """
    pickle_bytes, count = _end(data, path)
    directory = len(data) - _END.size - count * _ENTRY.size
    if count != 1 + len(_COLUMNS) or directory < pickle_bytes:
        raise ValueRefused(f"it has {count} columns")
    entries = list(_ENTRY.iter_unpack(data[directory : len(data) - _END.size]))
    if {width for width, _ in entries} - STORED.keys() or entries[0][0] != 1:
        raise ValueRefused("a column has no type")
    if sum(width * length for width, length in entries) != directory - pickle_bytes:
        raise ValueRefused("its columns do not fill the table")
    at = pickle_bytes
    found = []
    for width, length in entries:
        found.append(np.frombuffer(data, STORED[width], length, at))
        at += width * length
    return found[0].tobytes(), dict(zip(_COLUMNS, found[1:], strict=True))


def _end(data: bytes, path: Location) -> tuple[int, int]:
    """The length of the pickle and the number of columns, from the end of an intact file of this format."""
    if not is_ours(data):
        raise CheckpointCorruptError(
            f"{path}: no checksums at its end; the file is cut short, damaged, or was not written by "
            f"dcp_datastates (torch.distributed.checkpoint.FileSystemReader loads stock checkpoints)"
        )
    _, number, pickle_bytes, count, checksum = _END.unpack(data[-_END.size :])
    if crc32c(memoryview(data)[: -_CHECKSUM.size]) != checksum:
        raise CheckpointCorruptError(f"{path}: checksum mismatch; the metadata file is damaged")
    version = int.from_bytes(number, "big")
    if version != FORMAT:
        raise UnreadableMetadataError(
            f"{path} has format {version}, which another version of dcp_datastates has written; this one reads "
            f"format {FORMAT}: upgrade dcp_datastates"
        )
    return pickle_bytes, count
