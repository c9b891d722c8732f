"""``dcp-datastates convert``, ``copy`` and ``diff``: what reads a checkpoint and another place."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Iterable

from dcp_datastates.checkpoints.copy import copy
from dcp_datastates.conversion.compare import diff
from dcp_datastates.conversion.convert import convert
from dcp_datastates.errors import CheckpointCorruptError, ConfigurationError
from dcp_datastates.process.progress_bar import progress_bar
from dcp_datastates.storage.object_path import locate
from dcp_datastates_cli.output import NO, OK, TROUBLE, answer, complain, say


def run_convert(options: argparse.Namespace) -> int:
    """Convert ``options.source`` to ``options.target``; returns the exit status."""
    options.rename = _prefixes(options.rename)
    given = {name: value for name, value in vars(options).items() if value is not None}
    for name in ("command", "source", "target", "quiet", "json"):
        del given[name]
    with progress_bar("converting", locate(options.source).name, options.quiet) as progress:
        done = convert(options.source, options.target, progress=progress, **given)
    answer(options, dataclasses.asdict(done), done)
    return OK


def run_copy(options: argparse.Namespace) -> int:
    """Copy ``options.source`` to ``options.target``; returns the exit status."""
    source = locate(options.source)
    with progress_bar("copying", source.name, options.quiet) as progress:
        target = copy(source, options.target, threads=options.threads, progress=progress)
    answer(options, {"source": source, "target": target}, f"{source} is copied to {target}")
    return OK


def run_diff(options: argparse.Namespace) -> int:
    """Compare ``options.a`` with ``options.b``; returns the exit status."""
    try:
        with progress_bar("comparing", locate(options.a).name, options.quiet) as progress:
            found = diff(
                options.a,
                options.b,
                only=options.only,
                rename=_prefixes(options.rename),
                allow_objects=options.allow_objects,
                threads=options.threads,
                progress=progress,
            )
    except CheckpointCorruptError as error:  # status 1 says that they differ
        complain(str(error))
        return TROUBLE
    if options.quiet and not options.json:
        for difference in found.differences:
            say(difference)
    document = {**dataclasses.asdict(found), "same": found.same}
    for each in document["differences"]:
        for name in ("largest", "relative"):
            if each[name] == math.inf:
                each[name] = "inf"  # JSON has no such number
    answer(options, document, found)
    return OK if found.same else NO


def _prefixes(given: Iterable[str] | None) -> dict[str, str] | None:
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
