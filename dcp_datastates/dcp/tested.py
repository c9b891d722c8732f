"""The releases of torch that this package was tested with, and what a newer one has that this package does not know."""

from __future__ import annotations

import logging
import re
from typing import Final

from dcp_datastates.errors import ConfigurationError
from dcp_datastates.format.values import new_fields
from dcp_datastates.process.job_log import once_per_job

logger = logging.getLogger("dcp_datastates")

# The Makefile reads these lines; `make newest-test` takes the last one.
TESTED: Final = (
    "2.11.0",
    "2.13.0",
    "2.15.0",
)
"""Oldest first. docs/limits.md#tested-versions lists what was run with each, and when."""


def tell_if_untested(version: str) -> None:
    """Log a warning if torch ``version`` is newer than all tested releases, by its major and minor numbers."""
    if minor(version) > minor(TESTED[-1]):
        text = (
            "torch %s is newer than those that dcp_datastates was tested with (%s): it should work, but look for a "
            "newer dcp_datastates"
        )
        logger.log(once_per_job(logging.WARNING), text, version, ", ".join(TESTED))


def tell_of_new_fields(version: str) -> None:
    """Log a warning if torch ``version`` has fields in DCP's dataclasses that this package does not know.

    Raises :class:`ConfigurationError` if one has no default: then no instance can be made without it.
    """
    new = new_fields()
    required = [name for name, has_default in new.items() if not has_default]
    if required:
        raise ConfigurationError(
            f"torch {version} needs values for {', '.join(required)}, which this dcp_datastates does not know; install "
            f"a torch that it was tested with ({', '.join(TESTED)}), or a newer dcp_datastates"
        )
    if new:
        text = (
            "torch %s has fields in DCP's dataclasses that this dcp_datastates does not know, and leaves out of "
            "checkpoints: %s; look for a newer dcp_datastates"
        )
        logger.log(once_per_job(logging.WARNING), text, version, ", ".join(new))


def minor(version: str) -> tuple[int, ...]:
    """Major and minor number; empty if ``version`` is not a version, which compares as old."""
    return tuple(map(int, re.findall(r"\d+", version)[:2]))
