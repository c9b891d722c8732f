"""PEFT's layout: the parameters of one LoRA adapter, under the names that its files have.

A model with adapters has parameters such as ``base_model.model.layers.0.q_proj.lora_A.default.weight``; ``default`` is
the name of the adapter. A file has them without it. Modules that are trained whole (``modules_to_save``) lie in the
file under the names of the modules that they stand for. The rest of the model is not in the file.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Final

from dcp_datastates.conversion.files import read_whole
from dcp_datastates.conversion.output_file import Output, write_small_file
from dcp_datastates.conversion.safetensors_files import safetensors_unit
from dcp_datastates.conversion.source import Selected, Source
from dcp_datastates.errors import CheckpointNotFoundError, ConfigurationError
from dcp_datastates.format.stored_names import is_under
from dcp_datastates.storage.object_path import Location

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


def adapter_output(source: Source, adapter: Source, folder: Path, given: Location | None) -> Output:
    """The files of ``adapter``, which :func:`adapter_of` has found in ``source``.

    Raises :class:`ConfigurationError` without a configuration: see :func:`_config`.
    """
    config = _config(source, given)
    weights = safetensors_unit(adapter, adapter.tensors, folder / "adapter_model.safetensors")
    return Output([weights], partial(write_small_file, folder / ADAPTER_CONFIG, config))


def _config(source: Source, given: Location | None) -> bytes:
    """The contents of ``adapter_config.json``: from the folder ``given``, or the one that the checkpoint has.

    Raises :class:`ConfigurationError` if there is none.
    """
    if given is not None:
        path = given / ADAPTER_CONFIG
        try:
            return _checked(read_whole(path), str(path))
        except CheckpointNotFoundError:
            raise ConfigurationError(
                f"config_from={str(given)!r} has no {ADAPTER_CONFIG}"
            ) from None
    for name in source.objects:
        if name.endswith(f".{ADAPTER_CONFIG}"):
            value = source.value(name, allow_objects=False)
            if isinstance(value, bytes):
                return _checked(value, f"{source.path}: {name}")
    raise ConfigurationError(
        f"{source.path} has no {ADAPTER_CONFIG}, without which PEFT loads no adapter: pass the folder of one with "
        f"config_from (--config-from); model.peft_config['default'].save_pretrained(folder) writes it"
    )


def _checked(config: bytes, where: str) -> bytes:
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
    return config


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
