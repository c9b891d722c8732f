"""Writes safetensors files: one alone, or a Hugging Face folder of shards with an index."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from dcp_datastates.checkpoints.formats import HUGGING_FACE_INDEX
from dcp_datastates.checkpoints.inventory import is_directory, names_at
from dcp_datastates.conversion.adapters import ADAPTER_CONFIG
from dcp_datastates.conversion.files import read_whole
from dcp_datastates.conversion.hugging_face import CONFIG, TRAINER_STATE, check_opens
from dcp_datastates.conversion.output_file import Output, OutputFile, Placed, write_small_file
from dcp_datastates.conversion.read_safetensors import NAME_OF
from dcp_datastates.conversion.source import Source, shards
from dcp_datastates.errors import ConfigurationError
from dcp_datastates.format.layout import MAX_HEADER_BYTES
from dcp_datastates.storage.object_path import Location

__all__ = ["companions_in", "hf_output", "peft_output", "safetensors_output"]

logger = logging.getLogger(__name__)

_ALIGNMENT: Final = 64
"""Tensors begin at a multiple of this, the larger elements first: each is aligned to its element."""

_COMPANIONS: Final = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".py", ".md")
"""The endings of files that are copied: configuration, tokenizer, code, model card."""


def safetensors_output(source: Source, target: Path) -> Output:
    """One file with all tensors. Raises :class:`ConfigurationError` for a tensor that it cannot hold."""
    output = _output_file(target, source, list(source.tensors))
    return Output([output])


def hf_output(
    source: Source,
    folder: Path,
    shard_bytes: int,
    companions: Mapping[str, bytes],
    given: str = "the checkpoint",
) -> Output:
    """A folder as ``save_pretrained`` writes one: ``model.safetensors``, or shards with an index.

    ``companions``: files, of which the configuration and the tokenizer belong to the folder; ``given`` says where they
    come from. At its end, the output raises :class:`ConfigurationError` if transformers cannot open the model.
    """
    parts = shards(source, shard_bytes)
    files = {"model.safetensors": parts[0]}
    if len(parts) > 1:
        files = {
            f"model-{number:05d}-of-{len(parts):05d}.safetensors": names
            for number, names in enumerate(parts, start=1)
        }
    outputs = [_output_file(folder / file, source, names) for file, names in files.items()]

    def finish() -> None:
        for name, data in companions.items():
            if _is_companion(name):
                write_small_file(folder / name, data)
        if len(files) > 1:
            _write_index(source, folder, files)
        if CONFIG in names_at(folder):
            check_opens(folder, given)
        else:
            logger.warning(
                "the folder has no %s, which from_pretrained() needs: copy the model's, or convert with "
                "config_from=FOLDER (--config-from)",
                CONFIG,
            )

    return Output(outputs, finish)


def peft_output(source: Source, folder: Path, config: bytes) -> Output:
    """A folder as PEFT's ``save_pretrained`` writes one. ``config``: the contents of ``adapter_config.json``."""
    output = _output_file(folder / "adapter_model.safetensors", source, list(source.tensors))
    finish = partial(write_small_file, folder / ADAPTER_CONFIG, config)
    return Output([output], finish)


def _output_file(path: Path, source: Source, names: Sequence[str]) -> OutputFile:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    places = []
    end = 0
    for name in sorted(names, key=lambda name: -source.tensors[name].dtype.itemsize):
        info = source.tensors[name]
        if info.dtype not in NAME_OF:
            raise ConfigurationError(
                f"{name!r} is {info.dtype}, which safetensors does not have; exclude it, or choose another dtype"
            )
        _check_name(name)
        header[name] = {
            "dtype": NAME_OF[info.dtype],
            "shape": info.shape,
            "data_offsets": [end, end + info.nbytes],
        }
        places.append((name, end))
        end += info.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    if len(text) > MAX_HEADER_BYTES:
        raise ConfigurationError(
            f"{len(names)} tensors need a header of {len(text)} bytes; safetensors allows {MAX_HEADER_BYTES}: choose "
            f"a smaller shard_size"
        )
    first = len(text).to_bytes(8, "little") + text
    return OutputFile(
        path,
        len(first) + end,
        [(0, first)],
        [Placed(name, len(first) + at, 0, source.tensors[name].numel) for name, at in places],
    )


def _check_name(name: str) -> None:
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ConfigurationError(f"the name {name!r} is no Unicode; rename it") from None
    if name == "__metadata__":
        raise ConfigurationError(f"safetensors reserves the name {name!r}; rename it")


def _write_index(source: Source, folder: Path, files: Mapping[str, Sequence[str]]) -> None:
    weights = {name: file for file, names in files.items() for name in names}
    infos = source.tensors.values()
    document = {
        "metadata": {
            "total_size": sum(info.nbytes for info in infos),
            "total_parameters": sum(info.numel for info in infos),
        },
        "weight_map": dict(sorted(weights.items())),
    }
    text = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
    write_small_file(folder / HUGGING_FACE_INDEX, text.encode())


def _is_companion(name: str) -> bool:
    """Whether a file of this name belongs to a model's folder."""
    is_index = name.endswith(".index.json")
    return name.endswith(_COMPANIONS) and "/" not in name and not is_index and name != TRAINER_STATE


def companions_in(folder: Location) -> dict[str, bytes]:
    """The configuration and tokenizer files in a folder of a model."""
    names = filter(_is_companion, sorted(names_at(folder)))
    return {name: read_whole(folder / name) for name in names if not is_directory(folder / name)}
