"""What the documents print is true: programs run as printed, names exist, defaults and links are right."""

from __future__ import annotations

import builtins
import inspect
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.commands import (
    ROOT,
    blocks,
    documents,
    program,
    run,
    run_cli,
    started,
    table_cells,
    torchrun,
)
from support.jobs.scripts import Ended, ranks_of_torchrun, run_program, run_script
from support.state.checkpoints import assert_same, attempts, committed, load_everything
from support.waiting import await_that

import dcp_datastates as ds

RECIPES = "docs/recipes.md"
SECURITY = (ROOT / "SECURITY.md").read_text()
QUICK_START = "Quick start"
ONE_PROCESS = "One process"
DDP = "DDP"
FSDP2 = "FSDP2, resumed at another size"
NOTEBOOK = "Notebook"
FSDP1 = "FSDP1"
RAY, VERL = "Ray Train", "verl"

DDP_LINE = "    model = torch.nn.parallel.DistributedDataParallel(model)\n"
"""The line of the quick start that the recipes for FSDP replace."""
SPARSELY = "if step % 20 == 0 and rank == 0:"
ROUNDED = "{loss.item():.3f}"


def write(directory: Path, text: str) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "train.py").write_text(text)
    return directory


def python(*arguments: str | int) -> list[str]:
    return [sys.executable, "train.py", *map(str, arguments)]


def train(
    directory: Path, *arguments: int, world: int = 0, expect: int = 0, **environment: str
) -> Ended:
    """Run the program in ``directory`` to its end: by itself, or by as many ranks as torchrun would start."""
    text = (directory / "train.py").read_text()
    preface = ranks_of_torchrun(world) if world else ""
    ended = run_program(preface + text, directory, [*map(str, arguments)], 150, **environment)
    assert ended.returncode == expect, f"{ended.returncode}\n{ended.stdout}\n{ended.stderr}"
    assert ended.stdout.count("ended with 0\n") == world, ended.stderr
    return ended


def begin_from(checkpoint: Path, root: Path) -> None:
    """Make a copy of ``checkpoint`` the only one in ``root``."""
    shutil.copytree(checkpoint, root / checkpoint.name)


def await_commit(checkpoint: Path, process: subprocess.Popen[str]) -> None:
    """Return when ``process`` has committed ``checkpoint``."""
    await_that(lambda: committed(checkpoint) or process.poll() is not None, 120)
    assert committed(checkpoint), process.communicate()


def children(process: int) -> list[int]:
    return [
        int(child)
        for task in Path(f"/proc/{process}/task").iterdir()
        for child in (task / "children").read_text().split()
    ]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quick start, run for 13 steps in one process."""
    directory = write(tmp_path_factory.mktemp("uninterrupted"), program(QUICK_START))
    train(directory, 13)
    return directory


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The last checkpoint of the quick start, run for 9 steps in one process."""
    directory = write(tmp_path_factory.mktemp("begun"), program(QUICK_START))
    train(directory, 9)
    return directory / "ckpt" / "step-8"


# --- the quick start ------------------------------------------------------------------------------


def test_the_quick_start_deletes_old_checkpoints_and_awaits_its_last_save(uninterrupted):
    left = {path.name for path in (uninterrupted / "ckpt").iterdir()}
    assert left == {f"step-{step}" for step in (10, 11, 12)}
    assert all(committed(uninterrupted / "ckpt" / name) for name in left)


def test_the_quick_start_goes_on_after_a_kill_as_if_nothing_had_happened(
    uninterrupted, begun, tmp_path
):
    directory = write(tmp_path, program(QUICK_START))
    begin_from(begun, directory / "ckpt")
    killed = {"DCP_DATASTATES_FAILPOINTS": "publish.link.before@3=kill"}
    train(directory, 13, expect=-signal.SIGKILL, **killed)
    assert ds.latest(directory / "ckpt") == directory / "ckpt" / "step-10"
    ended = train(directory, 13)
    assert re.search(r"going on from .*step-10\b", ended.stdout)
    assert_same_checkpoint(directory, uninterrupted)


def test_the_quick_start_under_torchrun_goes_on_as_if_it_had_not_ended(begun, tmp_path):
    long, resumed = (write(tmp_path / name, program(QUICK_START)) for name in ("long", "resumed"))
    begin_from(begun, long / "ckpt")  # by one process
    train(long, 13, world=2)
    begin_from(long / "ckpt" / "step-10", resumed / "ckpt")
    ended = run(torchrun(2, "train.py", 13), resumed)
    assert {f"rank {rank}: going on from" in ended.stdout for rank in (0, 1)} == {True}
    assert not committed(resumed / "ckpt" / "step-9")
    (attempt,) = attempts(resumed / "ckpt" / "step-12")
    assert {path.name[:6] for path in attempt.glob("r*")} == {"r00000", "r00001"}
    assert_same_checkpoint(resumed, long)


def assert_same_checkpoint(found: Path, expected: Path) -> None:
    """The last checkpoint of the quick start is the same, bit for bit, in both folders."""
    states = [load_everything(directory / "ckpt" / "step-12") for directory in (found, expected)]
    assert_same(*states)


# --- the recipes ----------------------------------------------------------------------------------


def test_one_process_takes_a_last_save_when_it_is_told_to_stop(tmp_path):
    directory = write(tmp_path, program(ONE_PROCESS, RECIPES))
    slowly = {"DCP_DATASTATES_FAILPOINTS": "read.before=sleep:0.1"}  # and the gate waits for reads
    with started(python(), directory, **slowly) as process:
        await_commit(directory / "one" / "step-1", process)
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=120)
    assert process.returncode == 0, log
    end = directory / "one" / "end"
    stopped = ds.load(end)["step"]
    assert 1 <= stopped < 99
    assert str(end) in log, "the log tells of the last save"

    train(directory)
    assert ds.latest(directory / "one") == end
    last = ds.load(end)
    assert last["step"] == 99
    assert last["optimizer"]["state"]["weight"]["step"] == 100, "the optimizer was not resumed"
    train(directory)  # there is nothing left to do
    assert ds.load(end)["step"] == 99


def test_ddp_stops_on_all_ranks_when_one_is_told_to(tmp_path):
    directory = write(tmp_path, program(DDP, RECIPES))
    begun = 1
    for _ in range(2):  # and the second run goes on from the last save of the first
        with started(torchrun(2, "train.py"), directory) as process:
            await_commit(directory / "ddp" / f"step-{begun}", process)
            os.kill(children(process.pid)[0], signal.SIGTERM)
            _, log = process.communicate(timeout=120)
        assert process.returncode == 0, log
        begun = len(list((directory / "ddp").iterdir())) + 1
    saves = list((directory / "ddp").iterdir())
    assert all(map(committed, saves)), "a save was lost"
    last = load_everything(ds.latest(directory / "ddp"))
    assert last["step"] == len(saves) - 1
    assert last["optimizer"]["state"]["weight"]["step"] == len(saves), (
        "the optimizer was not resumed"
    )
    assert {"rng-0", "rng-1"} <= set(last)


def test_fsdp2_goes_on_at_another_size(tmp_path):
    quick_start = program(QUICK_START)
    assert DDP_LINE in quick_start
    directory = write(tmp_path, quick_start.replace(DDP_LINE, program(FSDP2, RECIPES)))
    train(directory, 3, world=2)
    ended = train(directory, 5, world=1)
    assert re.search(r"going on from .*step-2\b", ended.stdout)
    state = load_everything(directory / "ckpt" / "step-4")
    assert state["step"] == 4
    assert state["optimizer"]["state"]["0.weight"]["step"] == 5, "the optimizer was not resumed"


def test_fsdp1_goes_on_with_equal_losses_after_a_kill_and_without_fsdp(tmp_path):
    quick_start = program(QUICK_START)
    for line in (DDP_LINE, SPARSELY, ROUNDED):
        assert line in quick_start
    exact = quick_start.replace(SPARSELY, "if True:").replace(ROUNDED, "{loss.item()}")
    fsdp1 = exact.replace(DDP_LINE, program(FSDP1, RECIPES))

    def train(name, text, steps, world):
        """Run the program to ``steps`` in a directory of this name."""
        (tmp_path / name).mkdir(exist_ok=True)
        first = f"torch.manual_seed(0)\nos.chdir(path)\nsys.argv[1] = '{steps}'\n"
        return run_script(first + text, tmp_path / name, preface=ranks_of_torchrun(world))

    expected = losses(train("whole", fsdp1, 9, 2))
    assert [len(of_ranks) for of_ranks in expected.values()] == [2] * 9
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DCP_DATASTATES_FAILPOINTS", "vote.before@4=kill")  # the bytes are written
        killed = train("killed", fsdp1, 9, 2)
    assert killed.stdout.count("ended with -9") == 2, killed.stderr
    assert ds.latest(tmp_path / "killed" / "ckpt").name == "step-2"
    for name in ("fewer", "plain"):
        shutil.copytree(tmp_path / "killed", tmp_path / name)
    resumed = losses(train("killed", fsdp1, 9, 2))
    assert resumed == {step: expected[step] for step in range(3, 9)}

    fewer, plain = losses(train("fewer", fsdp1, 5, 1)), losses(train("plain", exact, 5, 1))
    assert list(fewer) == [3, 4]
    assert fewer == plain


def losses(ended: Ended) -> dict[int, set[str]]:
    """The losses that the ranks have printed, by step."""
    found: dict[int, set[str]] = {}
    for step, loss in re.findall(r"step (\d+): loss ([\d.e-]+),", ended.stdout):
        found.setdefault(int(step), set()).add(loss)
    return found


def test_the_notebook_looks_into_a_checkpoint(uninterrupted):
    pytest.importorskip("safetensors")
    ended = run_program(program(NOTEBOOK, RECIPES), uninterrupted)
    ended.assert_clean()
    assert "step-12" in ended.stdout
    assert "tensor(" in ended.stdout
    assert "'model.0.weight'" in ended.stdout, "the names in rank 0's file"


# --- all documents --------------------------------------------------------------------------------


RUN_ABOVE = {
    ("README.md", QUICK_START),
    *((RECIPES, heading) for heading in (ONE_PROCESS, DDP, FSDP2, NOTEBOOK, FSDP1)),
    # in integration/recipes:
    *((RECIPES, heading) for heading in (RAY, VERL)),
}
PROGRAMS = {
    (block.document, block.heading)
    for document in documents()
    for block in blocks(document)
    if block.language == "python"
}


def test_the_programs_that_are_run_above_are_printed():
    assert RUN_ABOVE <= PROGRAMS


@pytest.mark.parametrize(("document", "heading"), sorted(PROGRAMS - RUN_ABOVE))
def test_all_other_programs_run(document, heading, tmp_path):
    if document == "docs/megatron.md":
        pytest.importorskip("megatron.core")
    train(write(tmp_path, program(heading, document)))


def test_the_first_page_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_the_index_lists_every_page():
    index = (ROOT / "docs/index.md").read_text()
    listed = {f"docs/{target}" for target in re.findall(r"\]\(([^)#]+\.md)\)", index)}
    assert set(documents()) - {"README.md", "docs/index.md"} <= listed


@pytest.mark.parametrize("named", sorted(set(re.findall(r"`(tests/[^`]+)`", SECURITY))))
def test_every_test_that_shows_a_promise_is_there(named):
    file, _, name = named.partition("::")
    assert f"def {name}(" in (ROOT / file).read_text() if name else (ROOT / file).is_file()


def test_the_reference_has_every_public_name():
    pages = (ROOT / "docs/reference").glob("*.md")
    text = "".join(page.read_text() for page in pages)
    found = re.findall(r"^::: dcp_datastates\.(\w+)$", text, re.MULTILINE)
    assert sorted(found) == sorted(ds.__all__)


@pytest.mark.parametrize("document", documents())
def test_names_in_documents_exist(document):
    text = (ROOT / document).read_text()
    called = re.findall(r"\b(?:ds|dcp_datastates)\.([A-Za-z_]+)\b", text)
    errors = re.findall(r"\b((?:[A-Z][a-z]+)+(?:Error|Skipped|Unknown))\b", text)
    ours = [name for name in errors if not hasattr(builtins, name)]
    modules = {path.stem for path in (ROOT / "dcp_datastates").iterdir()}
    missing = {name for name in [*called, *ours] if not hasattr(ds, name) and name not in modules}
    assert not missing


def test_commands_in_documents_exist():
    text = "".join((ROOT / document).read_text() for document in documents())
    commands = set(re.findall(r"\bdcp-datastates ([a-z]+)\b", text))
    assert commands >= {"inspect", "verify", "latest", "retain", "rm"}
    known = run_cli("--help").stdout
    assert not {command for command in commands if not re.search(rf"^ +{command}\b", known, re.M)}


def test_the_table_of_functions_names_what_they_take():
    for name, *_ in table_cells("docs/api.md", "name"):
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
    for option, default, *_ in table_cells("docs/api.md", "option"):
        name = option.strip("`")
        assert name in taken, f"the writer has no option {name}"
        if default.startswith("`"):
            printed = repr(taken[name].default).replace("'", '"').removesuffix(".0")
            assert default.strip("`").removesuffix(".0") == printed


@pytest.mark.parametrize("document", documents())
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
