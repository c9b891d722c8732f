"""What the documents print is true: programs run as printed, names exist, defaults and links are right."""

import builtins
import inspect
import re
import runpy

import pytest
from support.commands import ROOT, blocks, documents, run_cli, table_cells
from support.jobs.scripts import run_program

import dcp_datastates as ds
from dcp_datastates import results as of_calls

SECURITY = (ROOT / "SECURITY.md").read_text()

MEGATRON = "integration/megatron/README.md"
PAGES = [*documents(), "benchmarks/README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"]
PAGES += [page.relative_to(ROOT).as_posix() for page in ROOT.glob("integration/*/README.md")]


def test_the_program_of_megatron_runs(tmp_path):
    pytest.importorskip("megatron.core")
    (block,) = (block for block in blocks(MEGATRON) if block.language == "python")
    run_program(block.text, tmp_path, timeout=150).assert_clean()


def test_the_first_page_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def test_the_pages_are_few_and_the_first_lists_all():
    index = (ROOT / "docs/index.md").read_text()
    listed = {f"docs/{target}" for target in re.findall(r"\]\(([^)#]+\.md)\)", index)}
    assert set(documents()) - {"README.md", "docs/index.md"} <= listed
    assert len(set(documents()) - {"README.md"}) <= 20


def test_pages_that_the_code_names_are_there():
    sources = [
        each for room in ("dcp_datastates*", "tests") for each in ROOT.glob(f"{room}/**/*.py")
    ]
    named = {
        page for each in sources for page in re.findall(r"\bdocs/[\w/-]+\.md", each.read_text())
    }
    assert len(named) > 5
    assert {page for page in named if not (ROOT / page).is_file()} == set()


def test_figures_are_those_of_the_measurements():
    figures = runpy.run_path(str(ROOT / "docs/figures.py"))["figures"]
    found = [figure for page in PAGES for figure in figures((ROOT / page).read_text())]
    assert len(found) > 80
    assert [printed for printed, measured in found if printed != measured] == []
    source = "benchmarks/results/bench-2026-11-28.json: tables > saves.large > facts > raw"
    assert list(figures(f"2.16 GB/s<!-- from {source} -->")) == [("2.16", "2.15")]


def test_the_picture_is_what_its_script_draws():
    drawn = runpy.run_path(str(ROOT / "docs/design/draw_planning.py"))["picture"]()
    assert (ROOT / "docs/design/planning.svg").read_text() == f"{drawn}\n"


@pytest.mark.parametrize("named", sorted(set(re.findall(r"`(tests/[^`]+)`", SECURITY))))
def test_every_test_that_shows_a_promise_is_there(named):
    file, _, name = named.partition("::")
    assert f"def {name}(" in (ROOT / file).read_text() if name else (ROOT / file).is_file()


def test_the_reference_has_every_public_name():
    pages = (ROOT / "docs/reference").glob("*.md")
    text = "".join(page.read_text() for page in pages)
    found = re.findall(r"^::: dcp_datastates\.((?:errors\.|results\.)?\w+)$", text, re.MULTILINE)
    errors = {
        f"errors.{name}"
        for name, value in vars(ds.errors).items()
        if isinstance(value, type) and issubclass(value, ds.errors.DataStatesError)
    }
    results = {f"results.{name}" for name in of_calls.__all__}
    public = {name for name in dir(ds) if not name.startswith("_")} - {"errors"}
    assert sorted(found) == sorted(public | errors | results)


@pytest.mark.parametrize("document", documents())
def test_names_in_documents_exist(document):
    text = (ROOT / document).read_text()
    called = re.findall(r"\b(?:ds|dcp_datastates)\.([A-Za-z_]+)\b", text)
    errors = re.findall(r"\b((?:[A-Z][a-z]+)+(?:Error|Skipped|Unknown))\b", text)
    ours = [name for name in errors if not hasattr(builtins, name)]
    modules = {path.stem for path in (ROOT / "dcp_datastates").iterdir()}
    known = {*dir(ds), *vars(ds.errors), *modules}
    assert not {*called, *ours} - known


def test_commands_in_documents_exist():
    text = "".join((ROOT / document).read_text() for document in documents())
    commands = set(re.findall(r"\bdcp-datastates ([a-z]+)\b", text))
    assert commands >= {"inspect", "verify", "latest", "retain", "delete"}
    known = run_cli("--help").stdout
    assert not {command for command in commands if not re.search(rf"^ +{command}\b", known, re.M)}


def test_the_table_of_functions_names_what_they_take():
    for name, *_ in table_cells("docs/reference/api.md", "name"):
        for call in re.findall(r"`(\w+(?:\(.*?\))?)`", name):
            function, _, rest = call.partition("(")
            taken = inspect.signature(getattr(ds, function)).parameters
            for argument in filter(None, re.split(r",\s*", rest.rstrip(")"))):
                argument, _, default = argument.partition("=")
                assert argument == "…" or argument in taken, f"{function} takes no {argument}"
                if default not in ("", "…"):
                    assert repr(taken[argument].default) == default.replace('"', "'")


def test_options_and_their_defaults_are_those_of_the_writer():
    taken = inspect.signature(ds.DataStatesWriter).parameters
    for option, default, *_ in table_cells("docs/reference/api.md", "option"):
        name = option.strip("`")
        assert name in taken, f"the writer has no option {name}"
        if default.startswith("`"):
            printed = repr(taken[name].default).replace("'", '"').removesuffix(".0")
            assert default.strip("`").removesuffix(".0") == printed


@pytest.mark.parametrize("document", PAGES)
def test_links_lead_somewhere(document):
    here = (ROOT / document).parent
    for target in re.findall(r"\]\(([^)\s]+)\)", (ROOT / document).read_text()):
        if target.startswith("https://"):
            continue
        file, _, anchor = target.partition("#")
        path = here / file if file else ROOT / document
        assert path.is_file(), f"{document} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", each).lower().replace(" ", "-") for each in headings}
            assert anchor in anchors, f"{document} links to {target}"
