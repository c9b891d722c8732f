"""``dcp-datastates convert``: from one format to another."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterable
from typing import Any

from dcp_datastates.conversion.convert import ConvertOptions, convert
from dcp_datastates.errors import ConfigurationError
from dcp_datastates.storage.object_path import locate
from dcp_datastates_cli.output import OK, print_json, say
from dcp_datastates_cli.progress_bar import progress_bar

__all__ = ["prefixes", "run"]


def run(options: argparse.Namespace) -> int:
    """Convert ``options.source`` to ``options.target``; returns the exit status."""
    options.rename = prefixes(options.rename)
    given: dict[str, Any] = {
        name: value
        for name in ConvertOptions.__annotations__
        if (value := getattr(options, name)) is not None
    }
    with progress_bar("converting", locate(options.source), options.quiet) as progress:
        done = convert(options.source, options.target, options.to, progress=progress, **given)
    if options.json:
        print_json(dataclasses.asdict(done))
    elif not options.quiet:
        say(done)
    return OK


def prefixes(given: Iterable[str] | None) -> dict[str, str] | None:
    """``OLD=NEW`` of each argument. Raises :class:`ConfigurationError` for one without ``=``."""
    if not given:
        return None
    found: dict[str, str] = {}
    for each in given:
        old, equals, new = each.partition("=")
        if not equals:
            raise ConfigurationError(f"--rename {each!r} must be OLD=NEW, such as model.=")
        if old in found:
            raise ConfigurationError(f"--rename gives {old!r} twice")
        found[old] = new
    return found
