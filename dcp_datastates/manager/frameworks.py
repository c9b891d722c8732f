"""The training frameworks that parts of this package need, and the releases that it was tested with."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator
from typing import Final

from dcp_datastates.process.job_log import once_per_job

logger = logging.getLogger(__name__)

TESTED_FRAMEWORKS: Final = {
    "accelerate": "1.15.0",
    "deepspeed": "0.19.8",
    "lightning": "2.6.6",
    "megatron-core": "0.16.1",
    "torchtitan": "0.3.0",
    "transformers": "5.23.0",
}


@contextlib.contextmanager
def needed(package: str, library: str, install: str) -> Iterator[None]:
    """Say in an ImportError that ``package`` needs ``library``, and what ``pip install`` takes for it."""
    try:
        yield
    except ImportError as error:
        raise ImportError(f"{package} needs {library} ({error}): pip install {install}") from error


def tell_if_untested(name: str, version: str) -> None:
    """Log a warning if the release of a framework differs from the tested one, by major and minor number."""
    tested = TESTED_FRAMEWORKS[name]
    if _minor(version) != _minor(tested):
        logger.log(
            once_per_job(logging.WARNING),
            "%s %s is another release than the one that dcp_datastates was tested with (%s)",
            name,
            version,
            tested,
        )


def _minor(version: str) -> list[str]:
    return re.findall(r"\d+", version)[:2]
