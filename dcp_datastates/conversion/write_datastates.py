"""Writes checkpoints of this package, with checksums, as one rank or several would have saved them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from dcp_datastates.conversion.output_file import Output, OutputFile, Placed, write_small_file
from dcp_datastates.conversion.source import Source, TensorInfo, metadata_of_source, shards
from dcp_datastates.errors import ConfigurationError
from dcp_datastates.format.layout import FileLayout, LayoutItem, SealedFile, lay_out
from dcp_datastates.format.metadata import FileRecord, Note, encode
from dcp_datastates.format.metadata_columns import table_of
from dcp_datastates.planning.part_files import report_of
from dcp_datastates.saving.document import write_results
from dcp_datastates.storage import local, operations, readme
from dcp_datastates.storage.attempt import Attempt, next_attempt
from dcp_datastates.storage.claims import Neighbours
from dcp_datastates.storage.decisions import DECISION_NAME
from dcp_datastates.storage.object_path import Location, stored

__all__ = ["datastates_files", "datastates_output"]


def datastates_output(source: Source, folder: Path, beside: Path, shard_bytes: int) -> Output:
    """A checkpoint in the directory ``folder``, newer than those in the directory ``beside``.

    Raises :class:`ConfigurationError` for names that the format cannot store.
    """
    neighbours = Neighbours()
    neighbours.look(stored(beside))
    after = neighbours.newest
    attempt = next_attempt(after)
    with local.explained("creating directory", folder):
        operations.make_directory(folder / attempt.name, "convert")
    outputs, document = datastates_files(source, folder, attempt, after, shard_bytes)

    def finish() -> None:
        write_small_file(folder / attempt.name / DECISION_NAME, document)
        write_small_file(folder / local.METADATA_NAME, document)
        readme.write(folder)

    return Output(outputs, finish)


def datastates_files(
    source: Source, folder: Location, attempt: Attempt, after: Attempt | None, shard_bytes: int
) -> tuple[list[OutputFile], bytes]:
    """The data files of a checkpoint at ``folder``, and the bytes of its ``.metadata``. Objects are copied, not
    unpickled.

    Raises :class:`ConfigurationError` for names that the format cannot store.
    """
    outputs: list[OutputFile] = []
    files: dict[str, FileRecord] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for number, names in enumerate(shards(source, shard_bytes)):
        objects = [] if number else source.objects
        items = [WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO) for name in objects]
        items += [_tensor_item(name, source.tensors[name]) for name in names]
        try:
            layouts = lay_out(list(map(LayoutItem.of, items)), number)
        except ValueError as error:
            raise ConfigurationError(f"this cannot be stored: {error}") from error
        made = [_output_file(source, folder / attempt.name, layout, items) for layout in layouts]
        outputs += [output for output, _ in made]
        report = report_of(layouts, [sealed for _, sealed in made], len(items))
        for result in write_results(items, report, attempt):
            if isinstance(result.storage_data, FileRecord):
                files[result.storage_data.relative_path] = result.storage_data
            else:
                places[result.index] = result.storage_data
    chunks = {name: [info.whole] for name, info in source.tensors.items()}
    metadata = metadata_of_source(source, chunks, places, save_id=attempt.name)
    note = Note(attempt, files, after, {}, time.time(), None)
    return outputs, encode(table_of(metadata, note))


def _tensor_item(name: str, info: TensorInfo) -> WriteItem:
    chunk = info.whole
    return WriteItem(
        MetadataIndex(name, chunk.offsets, 0),
        WriteItemType.TENSOR,
        tensor_data=TensorWriteData(chunk, TensorProperties(dtype=info.dtype), chunk.sizes),
    )


def _output_file(
    source: Source, folder: Location, layout: FileLayout, items: Sequence[WriteItem]
) -> tuple[OutputFile, SealedFile]:
    objects = [source.object_bytes(items[entry.item].index.fqn) for entry in layout.objects]
    sealed = layout.seal([len(data) for data in objects])
    output = OutputFile(
        folder / layout.name,
        sealed.nbytes,
        [(0, sealed.header), *zip(sealed.object_offsets, objects, strict=True)],
        [
            Placed(name, entry.offset, 0, source.tensors[name].numel)
            for entry in layout.tensors
            if (name := items[entry.item].index.fqn)
        ],
        sealed.table_offset,
    )
    return output, sealed
