"""Safetensors files: one alone, a model's folder for the libraries of Hugging Face, an adapter of PEFT.

They are mapped, and written as a stream: memory does not depend on them. A model's folder has the weights, and small
files beside them.

In a checkpoint that the Trainer has saved through this package lie the model under ``model``, the optimizer by names of
parameters under ``optimizer``, and each rank's small files under ``files``. In the Trainer's own folder, the model is a
model's folder, and ``optimizer.pt`` has what the optimizer's ``state_dict()`` gives.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Final

import torch

from dcp_datastates.checkpoints.inventory import HUGGING_FACE_INDEX, is_directory, names_at
from dcp_datastates.conversion.destination import Run, contents, write_file
from dcp_datastates.conversion.source import Selected, Source, as_bytes, mapped, read_whole, select
from dcp_datastates.conversion.torch_file import write_torch
from dcp_datastates.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    ConfigurationError,
    IncompatibleStateError,
)
from dcp_datastates.format import values
from dcp_datastates.format.contents import some_of
from dcp_datastates.format.layout import MAX_HEADER_BYTES, SAFETENSORS_NAME
from dcp_datastates.format.optimizer_state import packed_optimizer
from dcp_datastates.format.safetensors_header import Header, read_header
from dcp_datastates.format.stored_names import is_under
from dcp_datastates.process.work import Done, Unit
from dcp_datastates.storage import local
from dcp_datastates.storage.object_path import Location

logger = logging.getLogger(__name__)

_NAME_OF: Final[Mapping[torch.dtype, str]] = {
    **SAFETENSORS_NAME,
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
}
"""The names of safetensors 0.8, also of those dtypes that the data files of this package store as bytes."""

_DTYPE_OF: Final = {name: dtype for dtype, name in _NAME_OF.items()}

_INDEX: Final = ".safetensors.index.json"
_METADATA: Final[Mapping[str, str]] = {"format": "pt"}
"""Of a file that transformers loads."""
_ALIGNMENT: Final = 64
"""Tensors begin at a multiple of this, the larger elements first: each is aligned to its element."""


# ---- files and folders that are read -------------------------------------------------------------


def is_safetensors(first: bytes) -> bool:
    """Whether a file with these ``first`` 9 bytes begins like one of safetensors."""
    return first[8:] == b"{" and int.from_bytes(first[:8], "little") <= MAX_HEADER_BYTES


def safetensors_source(
    path: Location, files: Sequence[Location], only: Mapping[str, Location] | None
) -> Source:
    """The tensors in safetensors ``files``.

    ``only``: the names that count, and the file of each; None: all names. Raises :class:`IncompatibleStateError` for a
    dtype that torch does not have, :class:`CheckpointCorruptError` and :class:`StorageError`.
    """
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        data = mapped(file)
        header = _header(file, data)
        storage = data.untyped_storage()
        for entry in header.entries:
            if only is not None and only.get(entry.name) != file:
                continue
            if (dtype := _DTYPE_OF.get(entry.dtype)) is None:
                raise IncompatibleStateError(
                    f"{file}: {entry.name!r} has the dtype {entry.dtype}, which torch does not have"
                )
            begin, end = (header.data_start + each for each in entry.data_offsets)
            flat = torch.empty(0, dtype=dtype, device="cpu").set_(storage[begin:end])
            tensors[entry.name] = flat.view(entry.shape)
    names = tensors if only is None else only
    if missing := [name for name in names if name not in tensors]:
        raise CheckpointCorruptError(
            f"{path}: the index has {some_of(missing)}, and the file that it names has not"
        )
    kind = "safetensors" if files == [path] else "Hugging Face"
    return Source(
        path, kind, {name: tensors[name] for name in names}, {}, {name: (name,) for name in names}
    )


def _header(file: Location, data: torch.Tensor) -> Header:
    """The header of a file; raises if the file holds shards of tensors, of which the header alone has the shapes."""
    first = as_bytes(data)
    length = min(int.from_bytes(first[:8], "little"), MAX_HEADER_BYTES)
    try:
        header = read_header(bytes(first[: 8 + length]), len(first))
    except CheckpointCorruptError as error:
        raise CheckpointCorruptError(f"{file}: {error}") from None
    if "dcp_datastates" in header.metadata:
        raise ConfigurationError(
            f"{file} is a data file of a checkpoint of dcp_datastates; pass the checkpoint's directory"
        )
    try:
        shards = json.loads(header.metadata.get("DCP_SHARDING_INFO", "{}"))
        # The first rank's shards begin at zero, too: only the name of the file tells them from whole tensors.
        of_one_rank = file.name.startswith("shard-")
        cut = [name for name, each in shards.items() if any(each["saved_offsets"]) or of_one_rank]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CheckpointCorruptError(f"{file}: its DCP_SHARDING_INFO are malformed") from None
    if cut:
        raise ConfigurationError(
            f"{file} has shards of {some_of(cut)}; consolidate the files first, with "
            f"torch.distributed.checkpoint.HuggingFaceStorageWriter"
        )
    return header


def weights_in(folder: Location) -> Source | None:
    """The weights in a Hugging Face folder: by its index, or in its only safetensors file. None: there are none.

    Raises :class:`CheckpointCorruptError`, :class:`CheckpointNotFoundError` or :class:`ConfigurationError`.
    """
    names = sorted(names_at(folder))
    indexes = [name for name in names if name.endswith(_INDEX)]
    files = [name for name in names if name.endswith(".safetensors")]
    if "model.safetensors" in files:  # as transformers does
        files, indexes = ["model.safetensors"], []
    elif HUGGING_FACE_INDEX in indexes:
        indexes = [HUGGING_FACE_INDEX]
    if len(indexes) == 1:
        file_of = _read_index(folder / indexes[0], names)
        return safetensors_source(folder, sorted(set(file_of.values())), file_of)
    if len(indexes) + len(files) > 1:
        raise ConfigurationError(
            f"{folder} has several files that may be meant, such as {(indexes or files)[0]!r}, and no "
            f"{HUGGING_FACE_INDEX!r}; pass the path of one file"
        )
    return safetensors_source(folder, [folder / files[0]], None) if files else None


def _read_index(path: Location, beside: Collection[str]) -> dict[str, Location]:
    """The file of each name. ``beside``: the names of the files beside the index."""
    _, weights = parsed_index(path, read_whole(path))
    if missing := set(weights.values()).difference(beside):
        raise CheckpointNotFoundError(
            f"{path.parent}: {min(missing)!r}, which the index names, is missing"
        )
    return {name: path.parent / file for name, file in weights.items()}


def parsed_index(path: Location, data: bytes) -> tuple[dict[str, Any], dict[str, str]]:
    """The content of the index at ``path``, which has this ``data``; and the name of the file of each tensor.

    Raises :class:`CheckpointCorruptError` if it is none, or names a file that is not beside it.
    """
    try:
        values.check_memory(len(data), data)
        content = values.load(data)
    except values.ValueRefused as error:
        raise CheckpointCorruptError(f"{path} is no index: {error}") from None
    weights = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weights, dict) or not set(map(type, weights.values())) <= {str}:
        raise CheckpointCorruptError(f"{path} has no weight_map from names to files")
    for file in set(weights.values()):
        if file != Path(file).name or file in ("", ".", ".."):
            raise CheckpointCorruptError(f"{path} names {file!r}, which is no file beside it")
    return content, weights


# ---- small files beside the weights --------------------------------------------------------------

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


# ---- files and folders that are written ----------------------------------------------------------


def safetensors_unit(source: Source, names: Iterable[str], path: Path) -> Unit:
    """What writes one file with the tensors of these names.

    Raises :class:`ConfigurationError` for a tensor that the format cannot hold.
    """
    header, ordered = safetensors_header(source, names)

    def write(done: Done) -> None:
        write_file(path, chain([header], contents(source, ordered, done)), source.nbytes)

    return write


def safetensors_header(
    source: Source, names: Iterable[str], metadata: Mapping[str, str] = _METADATA
) -> tuple[bytes, list[str]]:
    """The beginning of a file with the tensors of these names, and their order in the file. Raises as
    :func:`safetensors_unit`.
    """
    ordered = sorted(names, key=lambda name: -source.tensors[name].dtype.itemsize)
    header: dict[str, object] = {"__metadata__": metadata}
    end = 0
    for name in ordered:
        shaped = source.tensors[name]
        _check_name(name)
        if shaped.dtype not in _NAME_OF:
            raise ConfigurationError(
                f"{name!r} is {shaped.dtype}, which safetensors does not have; exclude it, or choose another dtype"
            )
        begin, end = end, end + shaped.nbytes
        header[name] = {
            "dtype": _NAME_OF[shaped.dtype],
            "shape": list(shaped.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    if len(text) > MAX_HEADER_BYTES:
        raise ConfigurationError(
            f"{len(ordered)} tensors need a header of {len(text)} bytes; safetensors allows {MAX_HEADER_BYTES}: choose "
            f"a smaller shard_size"
        )
    return len(text).to_bytes(8, "little") + text, ordered


def _check_name(name: str) -> None:
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ConfigurationError(f"the name {name!r} is no Unicode; rename it") from None
    if name == "__metadata__":
        raise ConfigurationError(f"safetensors reserves the name {name!r}; rename it")


def write_model(
    source: Source, folder: Path, shard_bytes: int, files: Mapping[str, bytes], run: Run
) -> None:
    """Write a folder as ``save_pretrained`` does: ``model.safetensors``, or shards with an index; with these small
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
    pairs = zip(shards, parts, strict=True)
    run([safetensors_unit(source, names, folder / file) for file, names in pairs])
    for name, data in small.items():
        local.make_directories((folder / name).parent, "convert")
        write_file(folder / name, [data])


MODEL: Final = "model"
OPTIMIZER: Final = "optimizer"


def write_trainer(
    source: Source,
    folder: Path,
    shard_bytes: int,
    files: Mapping[str, bytes],
    allow_objects: bool,
    run: Run,
) -> None:
    """Write the folder of a checkpoint of the Trainer, of a model, an optimizer, and the small ``files`` of all
    ranks.
    """
    state = select(source, part=OPTIMIZER)
    file = folder / "optimizer.pt"
    optimizer = partial(write_torch, state, file, allow_objects, make=packed_optimizer)
    model = select(source, part=MODEL)
    write_model(model, folder, shard_bytes, files, lambda units: run([*units, optimizer]))


# ---- adapters ------------------------------------------------------------------------------------
# A model with adapters has parameters such as ``base_model.model.layers.0.q_proj.lora_A.default.weight``; ``default``
# is the name of the adapter. PEFT's file has them without it. Modules that are trained whole (``modules_to_save``) lie
# in the file under the names of the modules that they stand for. The rest of the model is not in the file.

_ADAPTER_CONFIG: Final = "adapter_config.json"

_PARAMETER: Final = re.compile(
    r"(?:.+\.)??(base_model\.model\.(?:[^.]+\.)*?)(modules_to_save|lora_[^.]*)\.([^.]+)(.*)"
)
"""What is before the kind of a parameter of an adapter, the kind, the adapter, and what is after it."""


def adapter_of(source: Source, optimizers: frozenset[str]) -> Source:
    """The tensors of the adapter in ``source``, without the states of ``optimizers``.

    Raises :class:`ConfigurationError` if there is none, or if there are several.
    """
    stored: dict[str, str] = {}
    adapters: set[str] = set()
    for name in source.tensors:
        found = _PARAMETER.fullmatch(name)
        if found is None or is_under(name, optimizers):
            continue
        before, kind, adapter, after = found.groups()
        if kind == "modules_to_save":
            new = before.removesuffix(".") + after
        else:
            new = before + kind + ("" if kind == "lora_magnitude_vector" else after)
        if new in stored and adapter in adapters:
            raise ConfigurationError(
                f"{source.path} has several models with adapters: {stored[new]!r} and {name!r}; choose one with part"
            )
        stored[new] = name
        adapters.add(adapter)
    if not stored:
        raise ConfigurationError(
            f"{source.path} has no parameters of a LoRA adapter of PEFT, such as "
            f"'base_model.model.q_proj.lora_A.default.weight'"
        )
    if len(adapters) > 1:
        raise ConfigurationError(
            f"{source.path} has {len(adapters)} adapters: {', '.join(sorted(adapters))}; choose one, such as with "
            f"only='*.{min(adapters)}*'"
        )
    return Selected(source, stored)


def write_adapter(
    adapter: Source, folder: Path, companions: Mapping[str, bytes], given: Location, run: Run
) -> None:
    """Write the files of an ``adapter`` from :func:`adapter_of`, whose configuration is one of the ``companions`` from
    the place that was ``given``.

    Raises :class:`ConfigurationError` without a configuration, or if the adapter has more than its parameters.
    """
    config = companions.get(_ADAPTER_CONFIG)
    if config is None:
        raise ConfigurationError(
            f"{str(given)!r} has no {_ADAPTER_CONFIG}, without which PEFT loads no adapter: pass the folder of one "
            f"with config_from (--config-from); model.peft_config['default'].save_pretrained(folder) writes it"
        )
    _check_config(config, f"{_ADAPTER_CONFIG} of {str(given)!r}")
    run([safetensors_unit(adapter, adapter.tensors, folder / "adapter_model.safetensors")])
    write_file(folder / _ADAPTER_CONFIG, [config])


def _check_config(config: bytes, where: str) -> None:
    """Raise :class:`ConfigurationError` for an adapter that has more than what :func:`adapter_of` knows."""
    try:
        found = json.loads(config)
        kind, bias = found.get("peft_type", "LORA"), found.get("bias", "none")
        tokens = found.get("trainable_token_indices")
    except (ValueError, AttributeError) as error:
        raise ConfigurationError(f"{where} is no configuration of an adapter: {error}") from error
    more = {f"peft_type={kind!r}": kind != "LORA", f"bias={bias!r}": bias != "none"}
    more["trainable_token_indices"] = bool(tokens)
    for wrong in (each for each, is_there in more.items() if is_there):
        raise ConfigurationError(
            f"{where}: convert knows no adapters with {wrong}; load the checkpoint into the model, and let "
            f"save_pretrained() of PEFT write it"
        )
