"""A small stand-in for the metadata that DCP broadcasts: it names the file with the real ones.

DCP broadcasts the ``Metadata`` of a checkpoint to all ranks at the end of every save, for callers of ``dcp.save`` that
read the result. Unpickling a large job's metadata takes every rank seconds, with the GIL held. The stand-in reads the
``.metadata`` file at the first access.
"""

from __future__ import annotations

from typing import Any, Final

from torch.distributed.checkpoint.metadata import Metadata

from dcp_datastates.errors import ConfigurationError, DataStatesError
from dcp_datastates.format.fields import known_fields, unknown_fields
from dcp_datastates.format.metadata_objects import metadata_of
from dcp_datastates.io.committed import open_committed
from dcp_datastates.storage.object_path import Location, locate

__all__ = ["FIELDS", "PublishedMetadata"]

FIELDS: Final = known_fields(Metadata) | set(unknown_fields(Metadata))


class PublishedMetadata(Metadata):
    """A ``Metadata`` that reads its fields from the file at the first access.

    The planner returns it empty, and the writer's ``finish`` sets ``directory`` and ``attempt``; before that, a field
    cannot be changed. Access raises :class:`DataStatesError` if the save is not committed, or another save has replaced
    it.
    """

    def __init__(self, directory: str | Location = "", attempt: str = "") -> None:
        self.directory = directory
        self.attempt = attempt

    def __getattribute__(self, name: str) -> Any:
        # Fields with a default are also class attributes, so __getattr__ would not be called.
        if name in FIELDS and name not in object.__getattribute__(self, "__dict__"):
            self._load()
        return object.__getattribute__(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in FIELDS and not self.directory:
            raise ConfigurationError(
                f"{name} cannot be assigned to: the metadata of this save are made of its plan when all ranks have "
                f"written; change them in create_global_plan() of a class derived from DataStatesSavePlanner"
            )
        super().__setattr__(name, value)

    def _load(self) -> None:
        if not self.directory:
            raise DataStatesError("this save has not been written yet; its metadata cannot be read")
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


def _plain(fields: dict[str, Any]) -> Metadata:
    return Metadata(**fields)
