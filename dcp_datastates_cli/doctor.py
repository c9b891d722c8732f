"""``dcp-datastates doctor``: what storage can do at a root, and what it means for saves there."""

from __future__ import annotations

import argparse
import errno
from typing import Final

from dcp_datastates.errors import ConfigurationError, StorageError
from dcp_datastates.storage import presence
from dcp_datastates.storage.bounded import bounded
from dcp_datastates.storage.object_path import Location, ObjectPath, locate
from dcp_datastates.storage.self_test import Findings, examine
from dcp_datastates.text import columns, duration
from dcp_datastates_cli.output import NO, OK, answer

_SECONDS: Final = 90.0
"""How long storage may make no progress. A store repeats a request for a minute."""

_WAYS_OUT: Final = {
    errno.ENOSPC: "no save works there: delete checkpoints (dcp-datastates retain, or delete)",
    errno.EDQUOT: "no save works there: delete checkpoints (dcp-datastates retain, or delete), or raise the quota",
    errno.EROFS: "no save works there: it is mounted read-only, perhaps after an error of the disk (see dmesg)",
}


def run(options: argparse.Namespace) -> int:
    """Try what storage at ``options.root`` can do; returns the exit status."""
    root = locate(options.root)
    try:
        found = bounded("trying what storage can do", root, _SECONDS, lambda: _tried(root))
    except StorageError as error:
        if (way_out := _WAYS_OUT.get(error.errno or 0)) is None:
            raise
        raise StorageError(error.errno, f"{error.strerror}; {way_out}", error.filename) from None
    answer(options, _document(found), _text(found))
    return OK if found.missing is None else NO


def _tried(root: Location) -> Findings:
    if not isinstance(root, ObjectPath) and not presence.is_directory(root):
        nearest = next(filter(presence.is_directory, root.parents), "/")
        raise ConfigurationError(
            f"there is no directory {str(root)!r}: make it, or name {str(nearest)!r}, which is there"
        )
    return examine(root)


def _text(found: Findings) -> str:
    rows = [
        (each.operation.value, "yes" if each.works else "no", each.cause) for each in found.answers
    ]
    meanings = [
        f"{each.operation.value}: {each.meaning}" for each in found.answers if not each.works
    ]
    end = "saves work" if found.missing is None else "no save works"
    return "\n".join(
        [
            *columns(("operation", "works", "what storage said"), rows),
            *meanings,
            f"{found.root}: {end} there (tried in {duration(found.seconds)})",
        ]
    )


def _document(found: Findings) -> dict[str, object]:
    operations = [
        {
            **vars(each),
            "operation": each.operation.value,
            "cause": each.cause or None,
            "meaning": each.meaning or None,
        }
        for each in found.answers
    ]
    works, seconds = found.missing is None, found.seconds
    return {"root": found.root, "saves_work": works, "seconds": seconds, "operations": operations}
