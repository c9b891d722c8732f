"""``reuse="unchanged"``: a save that writes only what has changed since the last committed one, and links the rest.

In these steps, on each rank by itself, after the ranks have agreed on the plan:

1. the engine reads all tensors of this rank's share, and digests every byte of them. The step gate holds meanwhile;
2. chunks that a committed save of this process has, by ``planning/reuse.py``, are *unchanged*;
3. each file with unchanged chunks, if it is worth it, gets a hard link in this save's directory. If that fails, for
   whatever reason, its chunks count as changed;
4. the other chunks are laid out and written as in any save. They are read once more, behind the same gate.

So a checkpoint never refers to another one: its directory has all its files, the file system counts their links, and
whatever deletes, copies, moves or verifies checkpoints need not know. The engine syncs the directory before the vote,
and a link's bytes are those of a committed checkpoint, which are durable.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from torch.distributed.checkpoint.planner import WriteItem

from dcp_datastates._native import (
    DIGEST_BLOCK_BYTES,
    DeviceEvent,
    SaveFile,
    SaveJob,
    Transfer,
    Window,
)
from dcp_datastates.format.layout import FileLayout, SealedFile, TensorEntry, lay_out, linked_name
from dcp_datastates.io.devices import fences
from dcp_datastates.io.tensor_memory import add_region
from dcp_datastates.planning.reuse import (
    ChunkKey,
    CommittedChunks,
    LinkedFile,
    StoredChunk,
    StoredFile,
    worth_linking,
)
from dcp_datastates.planning.write_job import WriteJob
from dcp_datastates.process.futures import when_done
from dcp_datastates.process.waiting import Stall
from dcp_datastates.saving.operation import SaveOperation
from dcp_datastates.saving.output import cancel, error_of
from dcp_datastates.saving.sources import Sources, files_to_write
from dcp_datastates.staging.deferred_reads import await_end
from dcp_datastates.storage import operations

__all__ = ["changed_content", "remember"]

logger = logging.getLogger(__name__)

_STREAM: Final = "the tensors of a save"
"""In the engine's messages, in place of a path."""

_committed: Final = CommittedChunks()


def remember(save: SaveOperation, chunks: Mapping[ChunkKey, StoredChunk]) -> None:
    """Let later saves link the ``chunks`` of ``save``, if and when it is known to be committed."""

    def decided(_: object) -> None:
        if save.committed.peek() is None:
            _committed.add(chunks)

    when_done(save.committed, decided)


def changed_content(
    save: SaveOperation, items: Sequence[WriteItem], sources: Sources, folder: Path
) -> WriteJob:
    """What is to be written of ``items``; all else is linked in ``folder`` when this returns.

    Raises what ``files_to_write`` raises, the errors of reading (``Writing.finish``), and :class:`StorageError` if the
    file system hangs. Then no read is in progress, but for one that storage holds up.
    """
    rank, reads = save.group.rank_set.rank, save.reads
    entries = [entry for layout in lay_out(items, rank) for entry in layout.tensors]
    sources.resolve_for_two_reads(items, entries)
    readers = fences(sources.engine, sources.devices)
    after = [*(reads.fences if reads is not None else ()), *readers]
    digests = _digests(save, sources, entries, after)
    keys = {
        entry.item: (items[entry.item].index.fqn, entry.offsets, entry.sizes, entry.dtype, digest)
        for entry, digest in zip(entries, digests, strict=True)
    }
    found = worth_linking(_committed.find(keys))
    linked = save.on_storage("linking unchanged files", lambda: _link(found, folder, rank))
    unchanged = {item: chunk for file in linked for item, chunk in file.chunks.items()}
    layouts = lay_out(items, rank, unchanged.keys())
    paths = [folder / layout.name for layout in layouts]
    files, sealed = files_to_write(items, sources, layouts, paths)
    save.stats.bytes_linked = sum(chunk.nbytes for chunk in unchanged.values())
    stored = {**_stored(layouts, sealed, folder), **_as_linked(linked, folder)}
    return WriteJob(
        files,
        sealed,
        layouts,
        after,
        sources.keep,
        readers=readers,
        linked=linked,
        chunks={key: stored[item] for item, key in keys.items()},
    )


def _digests(
    save: SaveOperation,
    sources: Sources,
    entries: Sequence[TensorEntry],
    after: Sequence[DeviceEvent],
) -> list[bytes]:
    """The digest of each entry's bytes, read by the engine as in a save."""
    content, offsets, offset = Transfer(), [], 0
    for entry in entries:
        offsets.append(offset)
        if entry.nbytes:
            tensor, device, group = sources.resolved[entry.item]
            add_region(content, offset, tensor, entry.nbytes, group, device)
        offset += entry.nbytes + -entry.nbytes % DIGEST_BLOCK_BYTES
    stream, sizes, reads = (
        SaveFile(_STREAM, offset, content),
        [e.nbytes for e in entries],
        save.reads,
    )
    expected = None if reads is None else reads.staged.expected

    def start(window: Window) -> SaveJob:
        job = sources.engine.digest(
            stream, offsets, sizes, save.call.order, window, sources.keep, after, expected
        )
        save.progress.follow(job)
        return job

    if reads is not None:
        job = reads.read_ahead(start, save.call.config.read_deadline)
    else:
        job = start(Window(0.0))
        try:
            await_end(
                job, Stall(logger, f"save {save.call.order}", save.call.config.commit_timeout)
            )
        except BaseException:
            cancel(job)
            raise
    if job.fault is not None:
        raise error_of(job.fault, 0)
    return job.digests()


def _link(
    found: Mapping[StoredFile, Mapping[int, StoredChunk]], folder: Path, rank: int
) -> list[LinkedFile]:
    """Link the files in ``folder``, as far as possible."""
    linked = []
    for file, chunks in found.items():
        name = linked_name(rank, file.number, file.attempt)
        try:
            operations.link(file.path, folder / name, "reuse")
            if os.stat(folder / name).st_size != file.nbytes:  # another program has replaced it
                operations.unlink(folder / name, "reuse")
                continue
        except OSError as error:
            level = logging.DEBUG if isinstance(error, FileNotFoundError) else logging.INFO
            logger.log(level, "%s is written again: it cannot be linked: %s", file.path, error)
            continue
        linked.append(LinkedFile(name, file.nbytes, file.table_offset, chunks))
    return linked


def _stored(
    layouts: Sequence[FileLayout], sealed: Sequence[SealedFile], folder: Path
) -> dict[int, StoredChunk]:
    """The places of what is written, by item."""
    found = {}
    for number, (layout, file) in enumerate(zip(layouts, sealed, strict=True)):
        path = folder / layout.name
        stored = StoredFile(folder.name, number, file.nbytes, file.table_offset, path)
        for entry in layout.tensors:
            found[entry.item] = StoredChunk(stored, entry.offset, entry.nbytes)
    return found


def _as_linked(linked: Sequence[LinkedFile], folder: Path) -> dict[int, StoredChunk]:
    """The places of what is linked, in this checkpoint: the earlier one may be deleted."""
    found = {}
    for file in linked:
        path = folder / file.name
        for item, chunk in file.chunks.items():
            found[item] = replace(chunk, file=replace(chunk.file, path=path))
    return found
