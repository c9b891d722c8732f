"""The bytes of .metadata, from DCP's metadata and the results of all ranks."""

import time
from pathlib import Path

import torch
from support.state.chunks import Box
from support.state.plans import item, thing
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.planner import SavePlan

from dcp_datastates.dcp.object_planning import document
from dcp_datastates.format.layout import LayoutItem, lay_out
from dcp_datastates.format.metadata import decode
from dcp_datastates.planning.part_files import report_of
from dcp_datastates.storage.attempt import Attempt
from dcp_datastates.storage.claims import Claim

ATTEMPT, BEFORE = Attempt(1 << 60, 3), Attempt(1 << 60, 2)
CLAIM = Claim(ATTEMPT, BEFORE)
RANKS = [
    [item("w", (4, 3), Box((0, 0), (2, 3))), thing("o"), item("v", (5,), dtype=torch.int8)],
    [item("w", (4, 3), Box((2, 0), (2, 3)))],
]
SIZES = [[77], []]
"""Of each rank's objects, in bytes."""


def _laid_out(items, rank, sizes):
    layouts = lay_out(list(map(LayoutItem.of, items)), rank)
    return layouts, [layout.seal(sizes) for layout in layouts]


def _reports(plans):
    laid_out = [_laid_out(plan.items, rank, SIZES[rank]) for rank, plan in enumerate(plans)]
    reports = [
        ([each.index for each in plan.items], report_of(*each, len(plan.items)))
        for plan, each in zip(plans, laid_out, strict=True)
    ]
    return reports, laid_out


def _document(metadata, reports, metrics=None):
    return document(CLAIM, metadata, reports, metrics or {})


def test_the_document_has_all_ranks_places_and_tells_of_the_attempt():
    plans, metadata = create_default_global_save_plan([SavePlan(items) for items in RANKS])
    reports, laid_out = _reports(plans)
    began = time.time()
    table = decode(_document(metadata, reports, {"loss": 0.5}), Path("m"))
    assert (table.note.attempt, table.note.after) == (ATTEMPT, BEFORE)
    assert table.note.metrics == {"loss": 0.5}
    assert began - 1 <= table.note.published_at <= time.time() + 1
    assert {path: file.nbytes for path, file in table.note.files.items()} == {
        f"{ATTEMPT.name}/{layout.name}": sealed.nbytes
        for layouts, files in laid_out
        for layout, sealed in zip(layouts, files, strict=True)
    }
    placement = table.placement
    columns = (placement.files, placement.begins, placement.lengths)
    files, offsets, lengths = (column.tolist() for column in columns)
    found = {
        (table.catalog.names[name], table.placement.paths[file], offset, length)
        for name, file, offset, length in zip(
            table.catalog.owners().tolist(), files, offsets, lengths, strict=True
        )
    }
    assert found == {
        (items[entry.item].index.fqn, f"{ATTEMPT.name}/{layout.name}", offset, length)
        for items, (layouts, files) in zip(RANKS, laid_out, strict=True)
        for layout, sealed in zip(layouts, files, strict=True)
        for entry, offset, length in (
            *((entry, entry.offset, entry.nbytes) for entry in layout.tensors),
            *zip(layout.objects, sealed.object_offsets, sealed.object_sizes, strict=True),
        )
    }
