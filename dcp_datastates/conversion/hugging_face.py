"""Folders for the libraries of Hugging Face: a model, what the Trainer resumes from, an adapter of PEFT.

A model's folder has the weights, and small files beside them.

In a checkpoint that the Trainer has saved through this package lie the model under ``model``, the optimizer by names of
parameters under ``optimizer``, and each rank's small files under ``files``. In the Trainer's own folder, the model is a
model's folder, and ``optimizer.pt`` has what the optimizer's ``state_dict()`` gives.

A model with adapters has parameters such as ``base_model.model.layers.0.q_proj.lora_A.default.weight``; ``default`` is
the name of the adapter. PEFT's file has them without it. Modules that are trained whole (``modules_to_save``) lie in
the file under the names of the modules that they stand for. The rest of the model is not in the file.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from dcp_datastates.checkpoints.formats import HUGGING_FACE_INDEX
from dcp_datastates.checkpoints.inventory import is_directory, names_at
from dcp_datastates.conversion.destination import Output, write_small_file
from dcp_datastates.conversion.safetensors_files import safetensors_unit
from dcp_datastates.conversion.source import Selected, Source, read_whole, select
from dcp_datastates.conversion.torch_file import write_torch
from dcp_datastates.errors import ConfigurationError
from dcp_datastates.format.stored_names import is_under
from dcp_datastates.manager.structure import packed_optimizer
from dcp_datastates.storage import local
from dcp_datastates.storage.object_path import Location

logger = logging.getLogger(__name__)

TRAINER_STATE: Final = "trainer_state.json"
"""The Trainer's own file about its progress."""

_FILE: Final = re.compile(r"files\.rank-(\d+)\.(.+)")
"""The name of a file that the Trainer has saved on a rank (``huggingface/files.py``)."""

_COMPANIONS: Final = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".py", ".md")
"""The endings of files that are copied: configuration, tokenizer, code, model card."""


def companions_of(source: Source, folder: Location | None) -> dict[str, bytes]:
    """The files that go with a model, by their relative paths: the configuration and tokenizer files in ``folder``, or
    beside the weights in a Hugging Face folder; or what the Trainer has saved beside its tensors. Of several ranks'
    files of one name, this is the first rank's.
    """
    if folder is None and source.format == "Hugging Face":
        folder = source.path
    if folder is not None:
        names = [name for name in sorted(names_at(folder)) if is_companion(name)]
        return {
            name: read_whole(folder / name) for name in names if not is_directory(folder / name)
        }
    found: dict[str, bytes] = {}
    matches = filter(None, map(_FILE.fullmatch, source.objects))
    for match in sorted(matches, key=lambda match: int(match[1])):
        if match[2] not in found:
            value = source.value(match[0], allow_objects=False)
            if isinstance(value, bytes):
                found[match[2]] = value
    return found


def is_companion(name: str) -> bool:
    """Whether a file of this name belongs to a model's folder."""
    is_other = "/" in name or name.endswith(".index.json") or name == TRAINER_STATE
    return name.endswith(_COMPANIONS) and not is_other


def hf_output(source: Source, folder: Path, shard_bytes: int, files: Mapping[str, bytes]) -> Output:
    """A folder as ``save_pretrained`` writes one: ``model.safetensors``, or shards with an index; with these small
    ``files`` beside them, by their relative paths.
    """
    parts = source.groups(source.tensors, shard_bytes)
    shards = [f"model-{n:05d}-of-{len(parts):05d}.safetensors" for n in range(1, len(parts) + 1)]
    small = dict(files)
    if "config.json" not in small:
        logger.warning(
            "the folder has no config.json, which from_pretrained() needs: copy the model's, or convert with "
            "config_from=FOLDER (--config-from)"
        )
    if len(parts) == 1:
        shards = ["model.safetensors"]
    else:
        parameters = sum(each.numel() for each in source.tensors.values())
        file_of = {name: file for file, names in zip(shards, parts, strict=True) for name in names}
        index = {
            "metadata": {"total_size": source.nbytes, "total_parameters": parameters},
            "weight_map": dict(sorted(file_of.items())),
        }
        text = json.dumps(index, indent=2, ensure_ascii=False) + "\n"
        small[HUGGING_FACE_INDEX] = text.encode()
    units = [
        safetensors_unit(source, names, folder / file)
        for file, names in zip(shards, parts, strict=True)
    ]

    def finish() -> None:
        for name, data in small.items():
            local.make_directories((folder / name).parent, "convert")
            write_small_file(folder / name, data)

    return Output(units, finish)


MODEL: Final = "model"
OPTIMIZER: Final = "optimizer"


def trainer_output(
    source: Source,
    folder: Path,
    shard_bytes: int,
    files: Mapping[str, bytes],
    allow_objects: bool,
) -> Output:
    """The folder of a checkpoint of the Trainer, of a model, an optimizer, and the small ``files`` of all ranks."""
    model = hf_output(select(source, part=MODEL), folder, shard_bytes, files)
    state = select(source, part=OPTIMIZER)

    def nest(values: Mapping[str, Any]) -> dict[str, Any]:
        return packed_optimizer(state.nested(values))

    optimizer = partial(write_torch, state, folder / "optimizer.pt", allow_objects, nest)

    return Output([*model.units, optimizer], model.finish)


ADAPTER_CONFIG: Final = "adapter_config.json"

_ROOT: Final = "base_model.model."
_WHOLE: Final = "modules_to_save"
_MAGNITUDE: Final = "lora_magnitude_vector"


def adapter_of(source: Source, optimizers: frozenset[str]) -> Source:
    """The tensors of the adapter in ``source``, without the states of ``optimizers``.

    Raises :class:`ConfigurationError` if there is none, or if there are several.
    """
    stored: dict[str, str] = {}
    adapters: set[str] = set()
    for name in source.tensors:
        found = _in_file(name)
        if found is None or is_under(name, optimizers):
            continue
        adapter, new = found
        if new in stored and adapter in adapters:
            raise ConfigurationError(
                f"{source.path} has several models with adapters: {stored[new]!r} and {name!r}; choose one with part"
            )
        stored[new] = name
        adapters.add(adapter)
    if not stored:
        raise ConfigurationError(
            f"{source.path} has no parameters of a LoRA adapter of PEFT, such as '{_ROOT}q_proj.lora_A.default.weight'"
        )
    if len(adapters) > 1:
        raise ConfigurationError(
            f"{source.path} has {len(adapters)} adapters: {', '.join(sorted(adapters))}; choose one, such as with "
            f"only='*.{min(adapters)}*'"
        )
    return Selected(source, stored)


def adapter_output(
    adapter: Source, folder: Path, companions: Mapping[str, bytes], given: Location
) -> Output:
    """The files of an ``adapter`` from :func:`adapter_of`, whose configuration is one of the ``companions`` from the
    place that was ``given``.

    Raises :class:`ConfigurationError` without a configuration, or if the adapter has more than its parameters.
    """
    config = companions.get(ADAPTER_CONFIG)
    if config is None:
        raise ConfigurationError(
            f"{str(given)!r} has no {ADAPTER_CONFIG}, without which PEFT loads no adapter: pass the folder of one with "
            f"config_from (--config-from); model.peft_config['default'].save_pretrained(folder) writes it"
        )
    _check_config(config, f"{ADAPTER_CONFIG} of {str(given)!r}")
    weights = safetensors_unit(adapter, adapter.tensors, folder / "adapter_model.safetensors")
    return Output([weights], partial(write_small_file, folder / ADAPTER_CONFIG, config))


def _check_config(config: bytes, where: str) -> None:
    """Raise :class:`ConfigurationError` for an adapter that has more than what :func:`adapter_of` knows."""
    try:
        found = json.loads(config)
        kind, bias = found.get("peft_type", "LORA"), found.get("bias", "none")
        tokens = found.get("trainable_token_indices")
    except (ValueError, AttributeError) as error:
        raise ConfigurationError(f"{where} is no configuration of an adapter: {error}") from error
    for wrong in (
        f"peft_type={kind!r}" if kind != "LORA" else "",
        f"bias={bias!r}" if bias != "none" else "",
        "trainable_token_indices" if tokens else "",
    ):
        if wrong:
            raise ConfigurationError(
                f"{where}: convert knows no adapters with {wrong}; load the checkpoint into the model, and let "
                f"save_pretrained() of PEFT write it"
            )


def _in_file(name: str) -> tuple[str, str] | None:
    """The adapter to which a parameter belongs, and its name in a file; None if it belongs to none."""
    start = name.find(_ROOT)
    if start < 0 or (start and name[start - 1] != "."):
        return None
    parts = name[start:].split(".")
    for number, part in enumerate(parts[:-1]):
        before, adapter, after = parts[:number], parts[number + 1], parts[number + 2 :]
        if part == _WHOLE:
            return adapter, ".".join(before + after)
        if part == _MAGNITUDE:
            return adapter, ".".join([*before, part])
        if part.startswith("lora_"):
            return adapter, ".".join([*before, part, *after])
    return None
