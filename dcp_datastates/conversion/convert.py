"""``convert``: from any format to any other, tensor by tensor."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, TypedDict, get_args

import torch
from typing_extensions import Unpack

from dcp_datastates.checkpoints.inventory import is_directory
from dcp_datastates.config import check_options, parse_flag, parse_host_cache_size, parse_size
from dcp_datastates.conversion.adapters import ADAPTER_CONFIG, adapter_config, adapter_of
from dcp_datastates.conversion.datastates import datastates_output, write_to_store
from dcp_datastates.conversion.destination import atomic_output, check_destination
from dcp_datastates.conversion.hugging_face import (
    TRAINER_STATE,
    companions_in,
    hf_output,
    small_files,
)
from dcp_datastates.conversion.lightning_file import LightningFile, is_of_lightning
from dcp_datastates.conversion.open import open_source
from dcp_datastates.conversion.output_file import Output, write_small_file
from dcp_datastates.conversion.safetensors_files import safetensors_unit
from dcp_datastates.conversion.selection import Selection, optimizers_in, select
from dcp_datastates.conversion.source import PIECE_BYTES, Source
from dcp_datastates.conversion.stock import stock_output
from dcp_datastates.conversion.torch_file import write_torch
from dcp_datastates.conversion.trainer_folder import OPTIMIZER, trainer_output, trainer_source
from dcp_datastates.errors import (
    CheckpointCorruptError,
    ConfigurationError,
    IncompatibleStateError,
)
from dcp_datastates.format.contents import some_of
from dcp_datastates.format.key_paths import nested
from dcp_datastates.format.stored_names import Rename
from dcp_datastates.process.forks import enter
from dcp_datastates.process.work import Progress, thread_count, work
from dcp_datastates.storage import local, operations
from dcp_datastates.storage.object_path import Location, ObjectPath, locate
from dcp_datastates.text import count, size

logger = logging.getLogger(__name__)

Target = Literal["datastates", "hf", "peft", "safetensors", "dcp", "torch"]

_TRAINER: Final = "trainer"
"""The folder from which the Trainer of transformers resumes, within the format "hf"."""

_FILES: Final = ("safetensors", "torch")
_HOLD_OBJECTS: Final = ("datastates", "dcp", "torch")

_DEFAULT_MEMORY: Final = "256MiB"
_BYTES_OF_A_THREAD: Final = 4 * PIECE_BYTES
"""A piece as it is read, as it is cast (to twice its size, perhaps), and what is made of it."""

_CHOICES: Final = ("only", "exclude", "part", "rename", "dtype")
_FLAGS: Final = ("overwrite", "strict", "allow_objects")


class ConvertOptions(TypedDict, total=False):
    """The options of :func:`convert`, which documents them."""

    only: str | Iterable[str]
    exclude: str | Iterable[str]
    part: str
    rename: Rename
    dtype: str | torch.dtype
    shard_size: int | str
    config_from: str | os.PathLike[str]
    overwrite: bool
    strict: bool
    allow_objects: bool
    threads: int
    host_cache_size: int | str


@dataclass(frozen=True)
class Conversion:
    """The result of :func:`convert`. Sizes are bytes."""

    path: Location
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


@dataclass(frozen=True)
class _Options:
    """Checked options."""

    selection: Selection
    shard_bytes: int
    config_from: Location | None
    overwrite: bool
    strict: bool
    allow_objects: bool
    threads: int
    """How many files are written at a time."""


_FLAT: Final = ("hf", "peft", "safetensors")
"""Formats without nested states."""


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


def convert(
    source: str | os.PathLike[str] | ObjectPath,
    target: str | os.PathLike[str] | ObjectPath,
    to: Target | None = None,
    *,
    progress: Progress | None = None,
    **options: Unpack[ConvertOptions],
) -> Conversion:
    """Convert the checkpoint at ``source`` into a new one at ``target``; returns when that is complete and durable.

    The source is recognized by its content: a checkpoint of this package or of stock DCP, a Hugging Face folder, a
    safetensors file, or a file of ``torch.save``. A thread holds one tensor at a time; for "torch", all are in memory,
    or mapped. The call is not collective and needs no process group. Of a checkpoint of this package, every byte is
    verified before it is used; the other formats have no checksums. ``target`` appears at once: if the call fails or
    the process is killed, there is nothing at it, or what was there before.

    Args:
        source: A file or directory, or its URL.
        target: A directory for "hf", "peft", "dcp" and "datastates"; a file for "safetensors" and "torch". For
            "datastates", also a URL.
        to: "datastates": this package's format. "hf": a folder with ``model.safetensors``, or shards and an index; of
            what the Trainer has saved, without a choice of values, the folder from which the Trainer itself resumes.
            "peft": a LoRA adapter as PEFT saves it, without the model. "safetensors": one file. "dcp": for stock
            ``FileSystemReader``. "torch": one file of ``torch.save``, nested as the state was saved; of what Lightning
            has saved, the file from which its own strategies resume. None: "datastates", if the source has another
            format.
        progress: Called in the calling thread, about ten times per second and at the end, with the bytes done and the
            total bytes.
        options: These keywords:

            - ``only``: take only the values under these names: full names, or prefixes that end before a dot.
            - ``exclude``: leave out the values under these names.
            - ``part``: take only the values under this one name, and remove it from theirs: with ``part="model"``,
              ``model.layers.0.weight`` becomes ``layers.0.weight``.
            - ``rename``: a dict from old prefixes to new ones, the first that fits is replaced; or a function from a
              name to a name. It sees names without ``part``.
            - ``dtype``: the dtype of all floating-point tensors, such as "bfloat16" or "bf16". Others stay as they are.
            - ``shard_size``: the most bytes of tensors in one file of "hf", "datastates" and "dcp"; default: "5GB".
            - ``config_from``: for "hf", a folder whose configuration and tokenizer files are copied; default: the
              source, if it is a Hugging Face folder, or what the Trainer has saved. For "peft", one with
              ``adapter_config.json``; default: the one that the Trainer has saved.
            - ``overwrite``: whether a checkpoint or file at ``target`` is replaced; default: False.
            - ``strict``: whether an object that the format cannot hold is an error, rather than a warning.
            - ``allow_objects``: whether Python objects may be unpickled that may run code; only for sources you trust.
            - ``threads``: how many read and write, each a file; default: one per core, at most 8.
            - ``host_cache_size``: memory for tensors that are being converted, bytes or a string; default: "256MiB".
              Each 16 MiB of it are a thread's, which exceeds them for a tensor that is larger than 4 MiB. Reading this
              package's format takes 64 MiB more.

    Raises:
        ConfigurationError: an option cannot work, names collide, the format cannot hold a name or dtype, or it is one
            for models, "hf" or "safetensors", and there is the state of an optimizer, without a choice; or transformers
            cannot open the folder ("hf"), since names or shapes are not those of its configuration.
        CheckpointExistsError: something is at ``target``, and ``overwrite`` is False.
        CheckpointNotFoundError: there is nothing to convert at ``source``.
        CheckpointCorruptError: the source is damaged.
        IncompatibleStateError: a key fits nothing, or ``strict`` and there are objects.
        UnsafeObjectError: a value cannot be read without running code from it.
        UnsupportedTensorError, UnsupportedStateError: a value cannot be converted.
        StorageError: the system refused to read or to write.
    """
    enter("convert()")
    began = time.monotonic()
    given, there = locate(source), locate(target)
    checked = _checked(options)
    if to is not None and to not in get_args(Target):
        raise ConfigurationError(
            f"to={to!r} is not a format; choose one of {', '.join(map(repr, get_args(Target)))}"
        )
    if isinstance(there, ObjectPath) and to not in (None, "datastates"):
        raise ConfigurationError(
            f"target={str(there)!r} is in an object store, where the files of to={to!r} could not appear at once; "
            f"convert to a local path, and upload that with the store's own tool"
        )
    opened = open_source(given, checked.allow_objects)
    chosen_format = _target_format(opened, to, checked)
    check_destination(given, there, chosen_format not in _FILES, checked.overwrite)
    small = small_files(opened) if chosen_format == "hf" and checked.config_from is None else {}
    is_training = (
        checked.selection.takes_all
        and TRAINER_STATE in small
        and OPTIMIZER in optimizers_in(opened)
    )
    selected = trainer_source(opened) if is_training else select(opened, checked.selection)
    if chosen_format == "peft":
        small = {ADAPTER_CONFIG: adapter_config(opened, checked.config_from)}
        selected = adapter_of(selected, frozenset(optimizers_in(opened)))
    skipped: tuple[str, ...] = ()
    if not is_training:
        if chosen_format in ("hf", "safetensors") and not checked.selection.chooses:
            _refuse_optimizers(selected, chosen_format)
        skipped = _without_objects(selected, chosen_format, checked.strict)
    if chosen_format not in _FLAT:
        _check_nesting(selected)
    if chosen_format == "torch" and is_of_lightning(selected):
        selected = LightningFile(selected, checked.allow_objects)
    nbytes = selected.nbytes
    if isinstance(there, ObjectPath):
        limits = checked.shard_bytes, checked.threads
        files = write_to_store(selected, there, *limits, checked.overwrite, progress)
    else:
        with atomic_output(there, checked.overwrite) as path:
            if chosen_format not in _FILES:
                with local.explained("creating directory", path):
                    operations.make_directory(path, "convert")
            kind = _TRAINER if is_training else chosen_format
            output = _output(selected, path, there, kind, checked, small)
            work(output.units, nbytes, checked.threads, progress)
            output.finish()
        files = len(output.units)
    return Conversion(
        path=there,
        source_format=opened.format,
        target_format=chosen_format,
        files=files,
        tensors=len(selected.tensors),
        objects=len(selected.objects),
        nbytes=nbytes,
        skipped=skipped,
        seconds=time.monotonic() - began,
    )


def _output(
    source: Source,
    path: Path,
    target: Path,
    to: Target | Literal["trainer"],
    options: _Options,
    small: Mapping[str, bytes],
) -> Output:
    """``path`` is where ``target`` is written before it appears; a directory is there. ``small``: the files of the
    checkpoint that go with a model or an adapter.
    """
    if to == "peft":
        weights = path / "adapter_model.safetensors"
        finish = partial(write_small_file, path / ADAPTER_CONFIG, small[ADAPTER_CONFIG])
        return Output([safetensors_unit(source, source.tensors, weights)], finish)
    if to == _TRAINER:
        return trainer_output(source, path, options.shard_bytes, small, options.allow_objects)
    if to == "hf":
        folder = options.config_from or (source.path if source.format == "Hugging Face" else None)
        if folder is None:
            return hf_output(source, path, options.shard_bytes, small)
        return hf_output(
            source, path, options.shard_bytes, companions_in(folder), repr(str(folder))
        )
    if to == "safetensors":
        return Output([safetensors_unit(source, source.tensors, path)])
    if to == "torch":
        return Output([partial(write_torch, source, path, options.allow_objects)])
    if to == "dcp":
        return stock_output(source, path, options.shard_bytes)
    return datastates_output(source, path, target.parent, options.shard_bytes)


def _checked(options: ConvertOptions) -> _Options:
    check_options("convert", options, ConvertOptions)
    given: dict[str, Any] = {**options}
    selection = Selection.checked(**{name: given[name] for name in _CHOICES if name in given})
    flags = {name: parse_flag(name, given.get(name, False)) for name in _FLAGS}
    shard_bytes = parse_size(given.get("shard_size", "5GB"), name="shard_size")
    if not shard_bytes:
        raise ConfigurationError("shard_size=0 leaves no room for a tensor; give more")
    config_from = given.get("config_from")
    if config_from is not None:
        config_from = locate(config_from)
        if not is_directory(config_from):
            raise ConfigurationError(f"config_from={str(config_from)!r} is no directory")
    memory = parse_host_cache_size(given.get("host_cache_size", _DEFAULT_MEMORY))
    threads = min(thread_count(given.get("threads")), memory // _BYTES_OF_A_THREAD)
    return _Options(
        selection,
        shard_bytes,
        config_from,
        **flags,
        threads=threads,
    )


def _target_format(source: Source, to: Target | None, options: _Options) -> Target:
    if to is None:
        if source.format == "dcp_datastates":
            raise ConfigurationError(
                f"{source.path} has this package's format already; say which to convert it to, with to= (--to)"
            )
        to = "datastates"
    if options.config_from is not None and to not in ("hf", "peft"):
        raise ConfigurationError(f"config_from is only for to='hf' and 'peft', not for to={to!r}")
    return to


def _without_objects(source: Source, to: Target, strict: bool) -> tuple[str, ...]:
    """Leave out the objects that the format cannot hold; returns their names."""
    skipped = tuple(source.objects)
    if to in _HOLD_OBJECTS or not skipped:
        return ()
    said = (
        f"{source.path}: {count(len(skipped), 'Python object')} cannot be stored in safetensors: {some_of(skipped)}; "
        f"choose the tensors with only, exclude or part (such as --part model), or a format that holds objects"
    )
    if strict:
        raise IncompatibleStateError(said)
    logger.warning("%s. Converted without them", said)
    source.objects = ()
    return skipped
