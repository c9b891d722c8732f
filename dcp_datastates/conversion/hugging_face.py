"""A Hugging Face folder: the weights, the small files beside them, and whether transformers can open it."""

from __future__ import annotations

import importlib.util
import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from dcp_datastates.checkpoints.inventory import is_directory, names_at
from dcp_datastates.conversion.files import read_whole
from dcp_datastates.conversion.output_file import Output, write_small_file
from dcp_datastates.conversion.safetensors_files import shards_output
from dcp_datastates.conversion.source import Source
from dcp_datastates.errors import ConfigurationError
from dcp_datastates.format.contents import some_of
from dcp_datastates.storage.object_path import Location

logger = logging.getLogger(__name__)

_CONFIG: Final = "config.json"

TRAINER_STATE: Final = "trainer_state.json"
"""The Trainer's own file about its progress."""

_FILE: Final = re.compile(r"files\.rank-(\d+)\.(.+)")
"""The name of a file that the Trainer has saved on a rank (``huggingface/files.py``)."""

_COMPANIONS: Final = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".py", ".md")
"""The endings of files that are copied: configuration, tokenizer, code, model card."""


def companions_of(source: Source, folder: Location | None) -> tuple[dict[str, bytes], str]:
    """The files that go with a model, by their relative paths, and what describes it, in words: the configuration and
    tokenizer files in ``folder``, or beside the weights in a Hugging Face folder; or what the Trainer has saved beside
    its tensors. Of several ranks' files of one name, this is the first rank's.
    """
    if folder is None and source.format == "Hugging Face":
        folder = source.path
    if folder is not None:
        names = [name for name in sorted(names_at(folder)) if _is_companion(name)]
        found = {
            name: read_whole(folder / name) for name in names if not is_directory(folder / name)
        }
        return found, repr(str(folder))
    found = {}
    matches = filter(None, map(_FILE.fullmatch, source.objects))
    for match in sorted(matches, key=lambda match: int(match[1])):
        if match[2] not in found:
            value = source.value(match[0], allow_objects=False)
            if isinstance(value, bytes):
                found[match[2]] = value
    return found, "the checkpoint"


def _is_companion(name: str) -> bool:
    """Whether a file of this name belongs to a model's folder."""
    is_index = name.endswith(".index.json")
    return name.endswith(_COMPANIONS) and "/" not in name and not is_index and name != TRAINER_STATE


def hf_output(
    source: Source,
    folder: Path,
    shard_bytes: int,
    companions: Mapping[str, bytes],
    described: str = "the checkpoint",
) -> Output:
    """A folder as ``save_pretrained`` writes one: ``model.safetensors``, or shards with an index.

    ``companions``: files, of which the configuration and the tokenizer belong to the folder; ``described`` says by
    what they are. At its end, the output raises :class:`ConfigurationError` if transformers cannot open the model.
    """
    weights = shards_output(source, folder, shard_bytes)

    def finish() -> None:
        weights.finish()
        for name in filter(_is_companion, companions):
            write_small_file(folder / name, companions[name])
        if _CONFIG in names_at(folder):
            _check_opens(folder, described)
        else:
            logger.warning(
                "the folder has no %s, which from_pretrained() needs: copy the model's, or convert with "
                "config_from=FOLDER (--config-from)",
                _CONFIG,
            )

    return Output(weights.units, finish)


def _check_opens(folder: Path, given: str) -> None:
    """Open the model in ``folder`` with transformers, without memory for its weights (on the meta device).

    Logs a warning if it cannot be tried: without transformers, or for a class that transformers does not have.

    Args:
        given: where its configuration comes from, for messages.

    Raises:
        ConfigurationError: names or shapes of the weights are not those of the configuration.
    """
    try:
        config = json.loads((folder / _CONFIG).read_bytes())
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
