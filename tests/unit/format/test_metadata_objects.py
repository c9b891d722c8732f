"""DCP's Metadata made of columns, entry by entry: the same as if it had been made at once."""

import copy
import dataclasses
import pickle
from pathlib import Path

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.state.metadata_examples import (
    assert_identical,
    examples,
    packed_example,
    sharded,
    storable,
)

from dcp_datastates.format.metadata import decode, encode
from dcp_datastates.format.metadata_objects import (
    metadata_of,
    table_of,
)
from dcp_datastates.format.metadata_table import CATALOG, PLACEMENT, MetadataTable


@settings(max_examples=150)
@given(examples().filter(storable))
@example(sharded(1001, 2))
def test_file_is_accepted_as_one_made_of_objects(case):
    packed, note = packed_example(case)
    table = MetadataTable(*packed.columns(), note)
    found = decode(encode(table), Path("c"))
    objects = packed.metadata(), packed.places()
    same = decode(encode(table_of(*objects, note)), Path("c"))
    for each in (found, same):
        assert each.note == note
        assert each.catalog.names == table.catalog.names
        assert each.placement.paths == table.placement.paths
        assert each.catalog.mappings == packed.mappings
        for name in CATALOG[1:]:
            assert np.array_equal(getattr(each.catalog, name), getattr(table.catalog, name))
        for name in PLACEMENT:
            assert np.array_equal(getattr(each.placement, name), getattr(table.placement, name))
        assert_identical(metadata_of(each), packed.metadata())


def test_each_catalog_has_its_own_part_of_the_document_however_often_it_is_written():
    packed = map(packed_example, (sharded(2, 3), sharded(2, 5)))
    tables = [MetadataTable(*each.columns(), note) for each, note in packed]
    for table in (*tables, *tables):
        found = decode(encode(table), Path("c")).catalog
        assert (found.names, found.table) == (table.catalog.names, table.catalog.table)
        assert found.mappings == table.catalog.mappings


@settings(max_examples=100)
@given(examples().filter(storable), st.randoms())
def test_entries_that_are_made_when_they_are_looked_up_are_a_dict_to_all_who_look(case, chance):
    packed, note = packed_example(case)
    table = MetadataTable(*packed.columns(), note)
    expected = packed.metadata()
    for look in (
        metadata_of,
        lambda table: pickle.loads(pickle.dumps(metadata_of(table))),
        lambda table: copy.deepcopy(metadata_of(table)),
        lambda table: dataclasses.replace(metadata_of(table)),
    ):
        found = look(table)
        mine, theirs = found.state_dict_metadata, expected.state_dict_metadata
        keys = list(theirs)
        chance.shuffle(keys)
        assert [mine[key] for key in keys] == [theirs[key] for key in keys]
        assert all(key in mine for key in keys)
        assert len(mine) == len(theirs)
        assert list(mine) == list(theirs)
        assert mine.get("not there") is None


def test_entries_can_be_changed():
    packed, note = packed_example(sharded(3, 2))
    found = metadata_of(MetadataTable(*packed.columns(), note))
    kept = found.state_dict_metadata["w1"]
    found.state_dict_metadata["more"] = kept
    assert found.state_dict_metadata.pop("w0").chunks
    assert list(found.state_dict_metadata) == ["w1", "more"]
    assert found.state_dict_metadata["w1"] is kept
