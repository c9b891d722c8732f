"""Writes one file of ``torch.save``, piece by piece.

torch first writes the file without the tensors' bytes, as a file with holes; then they are put where a reader will look
for them. The archive's CRC-32 of the tensors are not those of their bytes then, which ``torch.load`` does not check.
"""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dcp_datastates.conversion.output_file import Output, OutputFile, Placed
from dcp_datastates.conversion.read_torch import array_of, leaves, load_fake
from dcp_datastates.conversion.source import Source, value_of
from dcp_datastates.errors import UnsupportedStateError
from dcp_datastates.storage.local import explained

__all__ = ["save_without_data", "torch_output"]


def torch_output(source: Source, target: Path, allow_objects: bool) -> Output:
    """One file with all tensors and objects, nested as the state was.

    Raises :class:`UnsafeObjectError` for an object that only an unpickler of anything can read, unless
    ``allow_objects``; :class:`UnsupportedStateError` for an object that holds tensors.
    """
    with FakeTensorMode():
        fakes = {
            name: torch.empty(info.shape, dtype=info.dtype, device="cpu")
            for name, info in source.tensors.items()
        }
    values: dict[str, Any] = dict(fakes)
    for name in source.objects:
        _check_without_tensors(source, name)
        values[name] = value_of(source, name, allow_objects)
    state = source.nested(values)
    with explained("writing", target), target.open("xb") as stream:
        save_without_data(state, stream)
    name_of = {id(fake): name for name, fake in fakes.items()}
    names = [name_of[id(fake)] for fake in _tensors(state)]
    with target.open("rb") as file:
        loaded, records = load_fake(file, str(target), allow_objects)
    placed = [
        Placed(name, array_of(fake, records, target, 0, name).offset, 0, fake.numel())
        for name, fake in zip(names, _tensors(loaded), strict=True)
    ]
    output = OutputFile(target, os.stat(target).st_size, (), placed)
    return Output([output])


def save_without_data(value: Any, stream: IO[bytes]) -> None:
    """``torch.save`` of a value whose tensors may be fake: their bytes become holes, and are not looked at.

    Raises OSError if a write fails.
    """
    try:
        with torch.serialization.skip_data(materialize_fake_tensors=True):
            torch.save(value, stream)
    except RuntimeError as error:  # torch's own words for a full disk do not name it
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def _tensors(state: Any) -> Iterator[torch.Tensor]:
    return (value for _, value in leaves(state) if isinstance(value, torch.Tensor))


def _check_without_tensors(source: Source, name: str) -> None:
    """The bytes of tensors in an object would be left out, like those of all tensors."""
    data = io.BytesIO(source.object_bytes(name))
    if zipfile.is_zipfile(data):
        with zipfile.ZipFile(data) as archive:
            if any("/data/" in each for each in archive.namelist()):
                raise UnsupportedStateError(
                    f"{source.path}: object {name!r} has tensors in it, which cannot be streamed into a file of "
                    f"torch.save; exclude it, or use torch.save(dcp_datastates.load(path), file)"
                )
