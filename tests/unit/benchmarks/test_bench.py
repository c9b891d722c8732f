"""The report of ``make bench``, of tiny states: all parts and rows, those that fail, and the arithmetic."""

import json
import math
import re
from pathlib import Path

import pytest

from bench import __main__ as runner
from bench import loads, memory, parts, saves, training
from bench.failures import expected, reckon
from bench.loaders import LOADERS
from bench.report import draw, markdown
from bench.samples import Column, Row, Table, interleave, summary
from bench.savers import SAVERS, Saver, Started
from bench.states import CASES
from bench.training import shortest
from disk import raw_read_rate, raw_write_rate


def fails_at_once(state):
    raise ImportError("no module of that name")


def fails_when_committed(state):
    def save(path):
        def commit():
            raise OSError("the disk is full")

        path.mkdir()
        return Started(commit)

    return save


FAILING = (Saver("missing", fails_at_once), Saver("full", fails_when_committed))
QUICK_ONES = tuple(
    saver for saver in SAVERS if saver.name in ("ours", "safetensors", "`torch.save`")
)


@pytest.fixture(scope="module")
def document(tmp_path_factory):
    """What the parts give, with a few of those that save and load."""
    directory = tmp_path_factory.mktemp("bench")
    savers = (*QUICK_ONES, *FAILING)
    loaders = [each for each in LOADERS if each.saver in {saver.name for saver in QUICK_ONES}]
    sizes = parts.SIZES["tiny"]
    tables = [saves.measure(case, sizes.scales[case], 2, directory, savers) for case in CASES]
    tables += [
        loads.measure(case, sizes.scales[case], 1, directory, loaders, one=one)
        for case, one in (("large", False), ("many64k", False), ("many64k", True))
    ]
    tables.append(memory.measure("llm", sizes.scales["llm"], directory, QUICK_ONES[:1]))
    names = ("ours", "safetensors")
    tables.append(training.measure_intervals(sizes.train_scale, 1, directory, 0.0, names))
    tables.append(training.measure_shortest(sizes.train_scale, 1, directory, 0.01, names))
    found = [summary(table) for table in tables]
    found.append(summary(reckon(found[0], found[4], 2.0)))
    return {
        "quick": True,
        "seconds": 60.0,
        "load": 1.0,
        **runner.describe(directory),
        "tables": json.loads(json.dumps(found)),
    }


def rows(document):
    return ((table, row) for table in document["tables"] for row in table["rows"])


def test_every_part_has_its_rows_and_a_row_has_figures_or_an_error(document):
    keys = [table["key"] for table in document["tables"]]
    assert keys == [
        *(f"saves.{case}" for case in CASES),
        *("loads.large", "loads.many64k", "loads.one.many64k", "memory.llm"),
        *("training", "shortest", "failures"),
    ]
    for _, row in rows(document):
        assert bool(row["figures"]) != bool(row["error"]), row
        for figure in row["figures"].values():
            assert figure["low"] <= figure["median"] <= figure["high"]
            assert all(map(math.isfinite, figure.values()))
    for table, row in rows(document):
        if row["name"] == "ours" and table["key"] != "shortest":
            assert row["figures"], row["error"]


def test_those_that_fail_are_listed_with_their_errors(document):
    for table in document["tables"][: len(CASES)]:
        errors = {row["name"]: row["error"] for row in table["rows"]}
        assert errors["missing"] == "ImportError: no module of that name"
        assert errors["full"] == "OSError: the disk is full"
    text = markdown(document)
    assert text.count("- missing: `ImportError: no module of that name`") == len(CASES)


def test_the_text_has_every_row_of_the_document(document, tmp_path):
    sections = markdown(document).split("\n## ")[1:]
    assert len(sections) == len(document["tables"]) + 1
    for table, section in zip(document["tables"], sections, strict=False):
        assert section.startswith(table["title"])
        for row in table["rows"]:
            assert row["name"] in section
    assert re.search(r"\| `dcp_datastates` \|.* \d+(\.\d+)? MiB \|", sections[-1])
    pytest.importorskip("matplotlib")
    assert draw(document, tmp_path / "bench.png")


def table_of(**samples):
    columns = [Column("seconds", "time", "s", compared=True)]
    found = [
        Row(name, own=name == "ours", samples=[{"seconds": each} for each in values])
        for name, values in samples.items()
    ]
    return Table("Times", "", columns, found)


def test_medians_spreads_and_ratios_are_those_of_the_samples():
    found = summary(table_of(ours=[1.0, 3.0, 2.0], slow=[9.0, 8.0, 7.0], best=[4.0, 4.0, 6.0]))
    ours, slow, best = (row["figures"]["seconds"] for row in found["rows"])
    assert ours == {"median": 2.0, "low": 1.0, "high": 3.0, "n": 3, "of_best": 2.0}
    assert slow["of_best"] == 0.5
    assert best["of_best"] == 1.0  # the best peer is never this package's


def test_all_take_turns_and_one_that_fails_leaves_the_others():
    turns = []

    def measure(row, number):
        turns.append((number, row.name))
        if row.name == "b" and number == 1:
            raise ValueError("once")
        return {"seconds": 1.0}

    found = [Row("a"), Row("b"), Row("c")]
    interleave(found, 3, measure)
    assert [number for number, _ in turns] == [0, 0, 0, 1, 1, 1, 2, 2]
    assert [len(row.samples) for row in found] == [3, 0, 3]
    assert found[1].error == "ValueError: once"


def test_what_failures_cost():
    interval, lost, ratio = expected(stall=0.5, durable=3.0, restart=7.0, mtbf=3600.0)
    assert (interval, lost) == (60.0, 40.0)  # sqrt(2 * 0.5 * 3600); 60 / 2 + 3 + 7
    assert ratio == pytest.approx((1 - 40 / 3600) / (1 + 0.5 / 60))
    assert expected(0.0, 3.0, 7.0, 3600.0)[0] == 3.0  # not before the former save is durable
    assert expected(1.0, 50.0, 50.0, 60.0)[2] == 0.0


def test_the_shortest_iteration_is_found_by_halving():
    found, longer = shortest(lambda seconds: 0.0 if seconds >= 0.1 else 1.0, 0.01, 1.0)
    assert 0.1 <= found < 0.12
    assert longer == 0.0
    assert shortest(lambda seconds: 0.3, 0.01, 1.0) == (math.inf, 0.3)


def test_a_part_that_dies_says_so(tmp_path, monkeypatch):
    monkeypatch.setitem(runner.MOST_SECONDS, "tiny", 0.1)
    (table,) = runner.run("saves", "tiny", tmp_path, str(tmp_path))
    assert table["rows"][0]["error"] == "not done after 0.1 s"
    assert "not done after 0.1 s" in "\n".join(markdown(document_of(table)).splitlines())


def document_of(*tables):
    return {
        "quick": False,
        "seconds": 1.0,
        "load": 0.0,
        **runner.describe(Path()),
        "tables": tables,
    }


def test_the_raw_disk_moves_all_bytes(tmp_path):
    try:
        assert raw_write_rate(tmp_path, 100_000) > 0
    except OSError as error:
        pytest.skip(f"no O_DIRECT here: {error}")
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").write_bytes(bytes(40_960))
    assert raw_read_rate(tmp_path / "file") > 0
