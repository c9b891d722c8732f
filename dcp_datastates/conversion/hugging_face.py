"""A Hugging Face folder beyond its weights: the small files that a Trainer has saved, and whether it can be opened."""

from __future__ import annotations

import importlib.util
import json
import logging
import re
from pathlib import Path
from typing import Any, Final

from dcp_datastates.conversion.source import Source, value_of
from dcp_datastates.errors import ConfigurationError
from dcp_datastates.format.contents import some_of

__all__ = ["CONFIG", "TRAINER_STATE", "check_opens", "small_files"]

logger = logging.getLogger(__name__)

CONFIG: Final = "config.json"

TRAINER_STATE: Final = "trainer_state.json"
"""The Trainer's own file about its progress."""

_FILE: Final = re.compile(r"files\.rank-(\d+)\.(.+)")
"""The name of a file that the Trainer has saved on a rank (``huggingface/files.py``)."""


def small_files(source: Source) -> dict[str, bytes]:
    """The files that a checkpoint of the Trainer has beside its tensors, by their relative paths; none of another. Of
    several ranks' files of one name, this is the first rank's.
    """
    found: dict[str, bytes] = {}
    matches = filter(None, map(_FILE.fullmatch, source.objects))
    for match in sorted(matches, key=lambda match: int(match[1])):
        if match[2] not in found:
            value = value_of(source, match[0], allow_objects=False)
            if isinstance(value, bytes):
                found[match[2]] = value
    return found


def check_opens(folder: Path, given: str) -> None:
    """Open the model in ``folder`` with transformers, without memory for its weights (on the meta device).

    Logs a warning if it cannot be tried: without transformers, or for a class that transformers does not have.

    Args:
        given: where its configuration comes from, for messages.

    Raises:
        ConfigurationError: names or shapes of the weights are not those of the configuration.
    """
    try:
        config = json.loads((folder / CONFIG).read_bytes())
        names = config.get("architectures") or []
    except (FileNotFoundError, ValueError, AttributeError):
        names = []
    model = _class(names[0]) if names and isinstance(names[0], str) else None
    if model is None:
        logger.warning(
            "it was not tried whether from_pretrained() opens the folder: %s",
            f"transformers has no {names[0]!r} here"
            if names
            else "its configuration names no model",
        )
        return
    try:
        _, report = model.from_pretrained(
            str(folder), device_map="meta", output_loading_info=True, local_files_only=True
        )
    except Exception as error:
        raise _refused(given, f"{type(error).__name__}: {error}") from error
    for problem in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        if wrong := sorted(map(str, report.get(problem, ()))):
            raise _refused(given, f"{problem.replace('_', ' ')}: {some_of(wrong)}")


def _class(name: str) -> Any:
    if importlib.util.find_spec("transformers") is None:
        return None
    import transformers

    return getattr(transformers, name, None)


def _refused(given: str, problem: str) -> ConfigurationError:
    return ConfigurationError(
        f"the weights are not those of the model that {given} describes, so from_pretrained() would not load them "
        f"({problem}). Pass the folder of the model that was trained with config_from (--config-from); or leave "
        f"config_from out if the checkpoint has its own; or write to='safetensors', which needs no configuration"
    )
