"""``dcp-datastates doctor``: what storage can do at a root, and what it means for saves there."""

from __future__ import annotations

import argparse
from pathlib import Path

from dcp_datastates.errors import ConfigurationError
from dcp_datastates.storage import presence
from dcp_datastates.storage.object_path import ObjectPath, locate
from dcp_datastates.storage.self_test import Findings, examine
from dcp_datastates.text import columns, duration
from dcp_datastates_cli.output import NO, OK, answer


def run(options: argparse.Namespace) -> int:
    """Try what storage at ``options.root`` can do; returns the exit status."""
    root = locate(options.root)
    if not isinstance(root, ObjectPath) and not presence.is_directory(root):
        raise ConfigurationError(
            f"there is no directory {str(root)!r}: make it, or name {str(_nearest(root))!r}, which is there"
        )
    found = examine(root)
    answer(options, _document(found), _text(found))
    return OK if found.missing is None else NO


def _nearest(path: Path) -> Path:
    return next((each for each in path.parents if presence.is_directory(each)), Path("/"))


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
    return {
        "root": found.root,
        "saves_work": found.missing is None,
        "seconds": found.seconds,
        "operations": [
            {
                "operation": each.operation.value,
                "works": each.works,
                "needed": each.needed,
                "cause": each.cause or None,
                "meaning": each.meaning or None,
            }
            for each in found.answers
        ],
    }
