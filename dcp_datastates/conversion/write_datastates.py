"""Writes checkpoints of this package, with checksums, as one rank or several would have saved them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from dcp_datastates.conversion.job import Job, Limits
from dcp_datastates.conversion.output_file import OutputFile, Placed, file_job, write_small_file
from dcp_datastates.conversion.source import Source, metadata_of_source
from dcp_datastates.errors import ConfigurationError
from dcp_datastates.format.layout import FileLayout, SealedFile, lay_out
from dcp_datastates.format.metadata import FileRecord, Note, encode
from dcp_datastates.format.metadata_columns import table_of
from dcp_datastates.format.refusal import TRANSFORM_DESCRIPTORS
from dcp_datastates.storage import local, operations, readme
from dcp_datastates.storage.attempt import Attempt, next_attempt
from dcp_datastates.storage.claims import Neighbours

__all__ = ["datastates_job"]


def datastates_job(source: Source, folder: Path, beside: Path, limits: Limits) -> Job:
    """A checkpoint at ``folder``, newer than those in the directory ``beside``. Objects are copied, not unpickled.

    Raises :class:`ConfigurationError` for names that the format cannot store.
    """
    after = Neighbours().newest(beside)
    attempt = next_attempt(after)
    with local.explained("creating directory", folder):
        operations.make_directory(folder, "convert")
        operations.make_directory(folder / attempt.name, "convert")
    writing = _Writing(source, folder, attempt, after)
    outputs = list(writing.output_files(limits.shard_bytes))
    document = writing.document()  # before the data: it says whether the names can be stored

    def finish() -> None:
        write_small_file(folder / local.METADATA_NAME, document)
        readme.write(folder)

    return file_job(outputs, source, limits.piece_bytes, finish)


class _Writing:
    def __init__(
        self, source: Source, folder: Path, attempt: Attempt, after: Attempt | None
    ) -> None:
        self._source = source
        self._folder = folder
        self._attempt = attempt
        self._after = after
        self._files: dict[str, FileRecord] = {}
        self._places: dict[MetadataIndex, _StorageInfo] = {}

    def output_files(self, shard_bytes: int) -> Iterator[OutputFile]:
        """The data files: each holds as many tensors as fit, in the order of the source; the first, all objects."""
        items = [self._object_item(name) for name in self._source.objects]
        size = number = 0
        for name, info in self._source.tensors.items():
            if size and size + info.nbytes > shard_bytes:
                yield from self._files_of(items, number)
                items, size, number = [], 0, number + 1
            items.append(self._tensor_item(name))
            size += info.nbytes
        yield from self._files_of(items, number)

    def _files_of(self, items: list[WriteItem], number: int) -> Iterator[OutputFile]:
        try:
            layouts = lay_out(items, number)
        except ValueError as error:
            raise ConfigurationError(f"this cannot be stored: {error}") from error
        for layout in layouts:
            objects = [
                self._source.object_bytes(items[entry.item].index.fqn) for entry in layout.objects
            ]
            sealed = layout.seal([len(data) for data in objects])
            relative = f"{self._attempt.name}/{layout.name}"
            self._files[relative] = FileRecord(relative, sealed.nbytes, sealed.table_offset)
            self._note_places(relative, layout, sealed, items)
            known = [(0, sealed.header), *zip(sealed.object_offsets, objects, strict=True)]
            yield OutputFile(
                self._folder / relative,
                sealed.nbytes,
                known,
                [Placed(items[entry.item].index.fqn, entry.offset) for entry in layout.tensors],
                sealed.table_offset,
            )

    def _note_places(
        self, relative: str, layout: FileLayout, sealed: SealedFile, items: list[WriteItem]
    ) -> None:
        for tensor in layout.tensors:
            self._places[items[tensor.item].index] = _StorageInfo(
                relative, tensor.offset, tensor.nbytes, TRANSFORM_DESCRIPTORS
            )
        for entry, offset, size in zip(
            layout.objects, sealed.object_offsets, sealed.object_sizes, strict=True
        ):
            self._places[items[entry.item].index] = _StorageInfo(
                relative, offset, size, TRANSFORM_DESCRIPTORS
            )

    def document(self) -> bytes:
        """The bytes of ``.metadata``; call it after :meth:`output_files`."""
        tensors = self._source.tensors
        metadata = metadata_of_source(
            self._source,
            lambda name: [_whole(tensors[name].shape)],
            self._places,
            save_id=self._attempt.name,
        )
        note = Note(self._attempt, self._files, self._after, published_at=time.time())
        return encode(table_of(metadata, note))

    def _tensor_item(self, name: str) -> WriteItem:
        info = self._source.tensors[name]
        chunk = _whole(info.shape)
        return WriteItem(
            MetadataIndex(name, chunk.offsets, 0),
            WriteItemType.TENSOR,
            tensor_data=TensorWriteData(chunk, TensorProperties(dtype=info.dtype), chunk.sizes),
        )

    def _object_item(self, name: str) -> WriteItem:
        return WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO)


def _whole(shape: tuple[int, ...]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size([0] * len(shape)), torch.Size(shape))
