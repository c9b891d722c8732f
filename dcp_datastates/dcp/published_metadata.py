"""The metadata that DCP returns to callers of ``dcp.save``: read from ``.metadata`` at the first access.

DCP broadcasts the ``Metadata`` of a checkpoint to all ranks at the end of every save. Unpickling a large job's metadata
takes every rank seconds, with the GIL held.
"""

from __future__ import annotations

from typing import Any, Final

from torch.distributed.checkpoint.metadata import Metadata

from dcp_datastates.errors import DataStatesError
from dcp_datastates.format.fields import known_fields, unknown_fields
from dcp_datastates.format.metadata_objects import metadata_of
from dcp_datastates.io.committed import open_committed
from dcp_datastates.storage.object_path import Location, locate

__all__ = ["FIELDS", "PublishedMetadata", "publish"]

FIELDS: Final = known_fields(Metadata) | set(unknown_fields(Metadata))


class PublishedMetadata(Metadata):
    """A ``Metadata`` that reads its fields from the file at the first access, which raises :class:`DataStatesError` if
    the save is not committed, or another save has replaced it.
    """

    def __init__(self, directory: str | Location, attempt: str) -> None:
        self.directory = directory
        self.attempt = attempt

    def __getattribute__(self, name: str) -> Any:
        # Fields with a default are also class attributes, so __getattr__ would not be called.
        if name in FIELDS and name not in object.__getattribute__(self, "__dict__"):
            self._load()
        return object.__getattribute__(self, name)

    def _load(self) -> None:
        try:
            table = open_committed(locate(self.directory)).table
        except FileNotFoundError:
            raise DataStatesError(
                f"nothing is committed at {str(self.directory)!r}: wait for the save's future, or writer.committed"
            ) from None
        attempt = table.note.attempt.name
        if attempt != self.attempt:
            raise DataStatesError(
                f"{str(self.directory)!r} holds attempt {attempt}; that of this save, {self.attempt}, is not "
                f"committed, or was replaced"
            )
        found = metadata_of(table)
        vars(self).update({name: getattr(found, name) for name in FIELDS}, **vars(found))

    def __reduce__(self) -> Any:
        if vars(self).keys() >= FIELDS:  # already read, and perhaps changed
            return _plain, ({name: vars(self)[name] for name in FIELDS},)
        # Other processes get no storage_options, which may be secret: theirs come from the environment.
        return PublishedMetadata, (str(self.directory), self.attempt)

    def __repr__(self) -> str:
        return f"PublishedMetadata({str(self.directory)!r}, {self.attempt!r})"


def publish(metadata: Metadata, directory: Location, attempt: str) -> None:
    """Turn ``metadata``, which a planner has made of empty plans, into those of the committed save: DCP returns this
    object. Those of a planner's own class are filled now.
    """
    published = PublishedMetadata(directory, attempt)
    if type(metadata) in (Metadata, PublishedMetadata):
        metadata.__class__ = PublishedMetadata
        vars(metadata).clear()
        vars(metadata).update(vars(published))
    else:
        for name in FIELDS:
            setattr(metadata, name, getattr(published, name))


def _plain(fields: dict[str, Any]) -> Metadata:
    return Metadata(**fields)
