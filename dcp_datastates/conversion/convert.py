"""``convert``: from any format to any other, tensor by tensor."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, Literal, get_args

import torch
from typing_extensions import Never

from dcp_datastates.checkpoints.inventory import Format, format_of, is_directory, names_at
from dcp_datastates.checkpoints.listing import committed_among, directories
from dcp_datastates.config import check_names, parse_flag, parse_size
from dcp_datastates.conversion import dcp_checkpoints, hugging_face, torch_file
from dcp_datastates.conversion.destination import atomic_output, check_destination
from dcp_datastates.conversion.source import Source, optimizers_in, read_part, select
from dcp_datastates.errors import (
    CheckpointCorruptError,
    CheckpointNotFoundError,
    ConfigurationError,
    ForeignCheckpointError,
    IncompatibleStateError,
)
from dcp_datastates.format.contents import some_of
from dcp_datastates.format.key_paths import nested
from dcp_datastates.format.stored_names import Rename
from dcp_datastates.process.forks import public
from dcp_datastates.process.garbage import collection_paused
from dcp_datastates.process.work import Progress, Unit, thread_count, work
from dcp_datastates.storage.object_path import Location, ObjectPath, locate
from dcp_datastates.text import count, size

logger = logging.getLogger(__name__)

Target = Literal["datastates", "hf", "peft", "safetensors", "dcp", "torch"]

_TRAINER: Final = "trainer"
"""The folder from which the Trainer of transformers resumes, within the format "hf"."""

_FILES: Final = ("safetensors", "torch")
_FLAT: Final = ("hf", "safetensors")
"""Formats without nested states and objects, beside "peft"."""
_WITH_FILES: Final = ("hf", "peft")
"""Formats with small files beside the tensors."""


@dataclass(frozen=True)
class Conversion:
    """The result of :func:`convert`. Sizes are bytes."""

    path: Path
    source_format: str
    target_format: str
    files: int
    """Files with tensors."""
    tensors: int
    objects: int
    nbytes: int
    """Bytes of tensors that were written."""
    skipped: tuple[str, ...]
    """The names of objects that the target's format cannot hold."""
    seconds: float

    def __str__(self) -> str:
        """One line: the path, and what was written there."""
        speed = f" ({size(self.nbytes / self.seconds)}/s)" if self.seconds > 0 else ""
        return (
            f"{self.path}: {count(self.tensors, 'tensor')} and {count(self.objects, 'object')} from "
            f"{self.source_format}, {size(self.nbytes)} in {count(self.files, 'file')} in {self.seconds:.1f} s{speed}"
        )


@public("convert()")
def convert(
    source: str | os.PathLike[str] | ObjectPath,
    target: str | os.PathLike[str],
    to: Target | None = None,
    *,
    only: str | Iterable[str] | None = None,
    exclude: str | Iterable[str] = (),
    part: str | None = None,
    rename: Rename | None = None,
    dtype: str | torch.dtype | None = None,
    shard_size: int | str = "5GB",
    config_from: str | os.PathLike[str] | ObjectPath | None = None,
    overwrite: bool = False,
    strict: bool = False,
    allow_objects: bool = False,
    threads: int | None = None,
    progress: Progress | None = None,
    **misspelled: Never,
) -> Conversion:
    """Convert the checkpoint at ``source`` into a new one at ``target``; returns when that is complete and durable.

    The source is recognized by its content: a checkpoint of this package or of stock DCP, a Hugging Face folder, a
    safetensors file, or a file of ``torch.save``. A thread holds one tensor at a time; for "torch", all are in memory,
    or mapped. The call is not collective and needs no process group. Of a checkpoint of this package, every byte is
    verified before it is used; the other formats have no checksums. ``target`` appears whole: if the call fails or
    the process is killed, there is nothing at it, or what was there before.

    Args:
        source: A file or directory, or its URL.
        target: A local path: a directory for "hf", "peft", "dcp" and "datastates"; a file for "safetensors" and
            "torch". :func:`~dcp_datastates.copy` takes a checkpoint from there to a store.
        to: "datastates": this package's format. "hf": a folder with ``model.safetensors``, or shards and an index; of
            what the Trainer has saved, without a choice of values, the folder from which the Trainer itself resumes.
            "peft": a LoRA adapter as PEFT saves it, without the model. "safetensors": one file. "dcp": for stock
            ``FileSystemReader``. "torch": one file of ``torch.save``, nested as the state was saved. None:
            "datastates", if the source has another format.
        only: Take only the values under these names: full names, or prefixes that end before a dot.
        exclude: Leave out the values under these names.
        part: Take only the values under this one name, and remove it from theirs: with ``part="model"``,
            ``model.layers.0.weight`` becomes ``layers.0.weight``.
        rename: A dict from old prefixes to new ones, the first that fits is replaced; or a function from a
            name to a name. It sees names without ``part``.
        dtype: The dtype of all floating-point tensors, such as "bfloat16" or "bf16". Others stay as they are.
        shard_size: The most bytes of tensors in one file of "hf", "datastates" and "dcp"; default: "5GB".
        config_from: For "hf", a folder whose configuration and tokenizer files are copied; default: the
            source, if it is a Hugging Face folder, or what the Trainer has saved. For "peft", one with
            ``adapter_config.json``; default: the one that the Trainer has saved.
        overwrite: Whether a checkpoint or file at ``target`` is replaced; default: False.
        strict: Whether an object that the format cannot hold is an error, rather than a warning.
        allow_objects: Whether Python objects may be unpickled that may run code; only for sources you trust.
        threads: How many read and write, each a file; default: one per core, at most 8.
        progress: Called in the calling thread, about ten times per second and at the end, with the bytes done and the
            total bytes.

    Raises:
        ConfigurationError: an option cannot work, names collide, the format cannot hold a name or dtype, or it is one
            for models, "hf" or "safetensors", and there is the state of an optimizer, without a choice.
        CheckpointExistsError: something is at ``target``, and ``overwrite`` is False.
        CheckpointNotFoundError: there is nothing to convert at ``source``.
        CheckpointCorruptError: the source is damaged.
        IncompatibleStateError: a key fits nothing, or ``strict`` and there are objects.
        UnsafeObjectError: a value cannot be read without running code from it.
        UnsupportedTensorError, UnsupportedStateError: a value cannot be converted.
        StorageError: the system refused to read or to write.
    """
    check_names("convert()", misspelled, convert.__annotations__)
    began = time.monotonic()
    given, there = locate(source), locate(target)
    parse_flag("strict", strict)
    parse_flag("overwrite", overwrite)
    parse_flag("allow_objects", allow_objects)
    shard_bytes = parse_size(shard_size, name="shard_size")
    if not shard_bytes:
        raise ConfigurationError("shard_size=0 leaves no room for a tensor; give more")
    folder = None if config_from is None else locate(config_from)
    if folder is not None and not is_directory(folder):
        raise ConfigurationError(f"config_from={str(folder)!r} is no directory")
    threads = thread_count(threads)
    if to is not None and to not in get_args(Target):
        raise ConfigurationError(
            f"to={to!r} is not a format; choose one of {', '.join(map(repr, get_args(Target)))}"
        )
    if isinstance(there, ObjectPath):
        way = "dcp_datastates.copy()" if to in (None, "datastates") else "the store's own tool"
        raise ConfigurationError(
            f"target={str(there)!r} is in an object store; convert to a local path, and copy that there with {way}"
        )
    opened = open_source(given, allow_objects)
    if to is None:
        if opened.format == dcp_checkpoints.OURS:
            raise ConfigurationError(
                f"{given} has this package's format already; say which to convert it to, with to= (--to)"
            )
        to = "datastates"
    if folder is not None and to not in _WITH_FILES:
        raise ConfigurationError(f"config_from is only for to='hf' and 'peft', not for to={to!r}")
    check_destination(given, there, to not in _FILES, overwrite)
    small = hugging_face.companions_of(opened, folder) if to in _WITH_FILES else {}
    chosen = select(opened, only, exclude, part, rename, dtype)
    takes_all = all(each is None for each in (only, part, rename, dtype)) and not exclude
    kind: str = to
    skipped: tuple[str, ...] = ()
    if to == "peft":
        chosen = hugging_face.adapter_of(chosen, frozenset(optimizers_in(opened)))
    elif (
        takes_all
        and hugging_face.TRAINER_STATE in small
        and hugging_face.OPTIMIZER in optimizers_in(opened)
    ):
        kind, chosen = _TRAINER, select(opened, only=(hugging_face.MODEL, hugging_face.OPTIMIZER))
    elif to in _FLAT:
        if only is None and part is None:
            _refuse_optimizers(chosen, to)
        skipped = _without_objects(chosen, strict)
    else:
        _check_nesting(chosen)
    files = 0

    def run(units: Sequence[Unit]) -> None:
        nonlocal files
        files = len(units)
        work(units, chosen.nbytes, threads, progress)

    with atomic_output(there, to not in _FILES, overwrite) as path:
        if kind == "datastates":
            dcp_checkpoints.write_datastates(chosen, path, there.parent, shard_bytes, run)
        elif kind == "hf":
            of_the_model = {
                name: data for name, data in small.items() if hugging_face.is_companion(name)
            }
            hugging_face.write_model(chosen, path, shard_bytes, of_the_model, run)
        elif kind == _TRAINER:
            hugging_face.write_trainer(chosen, path, shard_bytes, small, allow_objects, run)
        elif kind == "peft":
            hugging_face.write_adapter(chosen, path, small, folder or given, run)
        elif kind == "safetensors":
            run([hugging_face.safetensors_unit(chosen, chosen.tensors, path)])
        elif kind == "dcp":
            dcp_checkpoints.write_stock(chosen, path, shard_bytes, run)
        else:
            run([partial(torch_file.write_torch, chosen, path, allow_objects)])
    return Conversion(
        path=there,
        source_format=opened.format,
        target_format=to,
        files=files,
        tensors=len(chosen.tensors),
        objects=len(chosen.objects),
        nbytes=chosen.nbytes,
        skipped=skipped,
        seconds=time.monotonic() - began,
    )


def _check_nesting(source: Source) -> None:
    """Refuse names of which one would lie within another's value: a load would lose one of them."""
    try:
        nested(dict.fromkeys(source.names(), True), source.paths)
    except CheckpointCorruptError as error:
        raise ConfigurationError(
            f"the selected values cannot be in one nested state; rename or exclude some: {error}"
        ) from None


def _refuse_optimizers(source: Source, to: Target) -> None:
    """Refuse the state of an optimizer in a format for models: no program reads it there."""
    for found in optimizers_in(source):
        raise ConfigurationError(
            f"{source.path} holds the state of an optimizer, {found!r}, which no program looks for in the format "
            f"{to!r}: choose the model, with part='model' (--part model) or what its name is; or exclude={found!r}"
        )


def _without_objects(source: Source, strict: bool) -> tuple[str, ...]:
    """Leave out the objects, which the format cannot hold; returns their names."""
    skipped = tuple(source.objects)
    if skipped:
        said = (
            f"{source.path}: {count(len(skipped), 'Python object')} cannot be stored in safetensors: "
            f"{some_of(skipped)}; choose the tensors with only, exclude or part (such as --part model), or a format "
            f"that holds objects"
        )
        if strict:
            raise IncompatibleStateError(said)
        logger.warning("%s. Converted without them", said)
        source.objects = {}
    return skipped


@collection_paused()
def open_source(path: str | os.PathLike[str] | ObjectPath, allow_objects: bool = False) -> Source:
    """Open what is at ``path``: a checkpoint of this package or of stock DCP, a Hugging Face folder, a safetensors
    file or a file of ``torch.save``.

    Reads names, shapes and dtypes, not the tensors' bytes. Runs no code from the checkpoint, unless ``allow_objects``.

    Raises as :func:`convert` for its source; :class:`CheckpointNotFoundError` says what is there instead.
    """
    found = locate(path)
    if is_directory(found):
        return _open_directory(found, allow_objects)
    first = bytes(read_part(found, 0, 9))
    if first.startswith(torch_file.BEGINNINGS):
        return torch_file.torch_source(found, allow_objects)
    if hugging_face.is_safetensors(first):
        return hugging_face.safetensors_source(found, [found], None)
    raise ForeignCheckpointError(
        f"{str(found)!r} is neither a safetensors file nor a file of torch.save"
    )


def _open_directory(path: Location, allow_objects: bool) -> Source:
    found = format_of(path)
    if found is Format.DATASTATES:
        return dcp_checkpoints.DataStatesSource(path)
    if found in (Format.STOCK, Format.UNKNOWN):
        return dcp_checkpoints.StockSource(path, allow_objects)
    if (weights := hugging_face.weights_in(path)) is not None:
        return weights
    others = sorted(names_at(path))
    there = "the directory is empty"
    if below := committed_among(directories(path)):
        there = f"there are checkpoints below it, such as {below[-1].name!r}; pass the path of one"
    elif others:
        there = f"the directory holds {len(others)} other entries, such as {others[0]!r}"
    raise CheckpointNotFoundError(f"no checkpoint of a known format at {str(path)!r}: {there}")
