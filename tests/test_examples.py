"""The programs in ``examples`` run as they lie there, and do what they show."""

import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.commands import ROOT, documents, program, run, started, torchrun
from support.jobs.scripts import ranks_of_torchrun, run_program, run_script
from support.state.checkpoints import assert_same, attempts, committed, load_everything
from support.stores import server
from support.waiting import await_that
from torch.distributed.checkpoint.state_dict import get_state_dict

import dcp_datastates as ds

EXAMPLES = ROOT / "examples"
QUICK_START = (EXAMPLES / "quick_start.py").read_text()

DDP_LINE = "    model = torch.nn.parallel.DistributedDataParallel(model)\n"
"""The line of the quick start that the recipe for FSDP1 replaces."""
SPARSELY = "if step % 20 == 0 and rank == 0:"
ROUNDED = "{loss.item():.3f}"


def example(name):
    return (EXAMPLES / f"{name}.py").read_text()


def write(directory, text):
    directory.mkdir(exist_ok=True)
    (directory / "train.py").write_text(text)
    return directory


def python(*arguments):
    return [sys.executable, "train.py", *map(str, arguments)]


def train(directory, *arguments, world=0, expect=0, **environment):
    """Run the program in ``directory`` to its end: by itself, or by as many ranks as torchrun would start."""
    text = (directory / "train.py").read_text()
    preface = ranks_of_torchrun(world) if world else ""
    ended = run_program(preface + text, directory, [*map(str, arguments)], 150, **environment)
    assert ended.returncode == expect, f"{ended.returncode}\n{ended.stdout}\n{ended.stderr}"
    assert ended.stdout.count("ended with 0\n") == world, ended.stderr
    return ended


def begin_from(checkpoint, root):
    """Make a copy of ``checkpoint`` the only one in ``root``."""
    shutil.copytree(checkpoint, root / checkpoint.name)


def await_commit(checkpoint, process):
    """Return when ``process`` has committed ``checkpoint``."""
    await_that(lambda: committed(checkpoint) or process.poll() is not None, 120)
    assert committed(checkpoint), process.communicate()


def children(process):
    return [
        int(child)
        for task in Path(f"/proc/{process}/task").iterdir()
        for child in (task / "children").read_text().split()
    ]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The quick start, run for 13 steps in one process."""
    directory = write(tmp_path_factory.mktemp("uninterrupted"), QUICK_START)
    train(directory, 13)
    return directory


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """The last checkpoint of the quick start, run for 9 steps in one process."""
    directory = write(tmp_path_factory.mktemp("begun"), QUICK_START)
    train(directory, 9)
    return directory / "ckpt" / "step-8"


# --- the quick start ------------------------------------------------------------------------------


def test_the_QUICK_START_deletes_old_checkpoints_and_awaits_its_last_save(uninterrupted):
    left = {path.name for path in (uninterrupted / "ckpt").iterdir() if path.is_dir()}
    assert left == {f"step-{step}" for step in (10, 11, 12)}
    assert all(committed(uninterrupted / "ckpt" / name) for name in left)


def test_the_QUICK_START_goes_on_after_a_kill_as_if_nothing_had_happened(
    uninterrupted, begun, tmp_path
):
    directory = write(tmp_path, QUICK_START)
    begin_from(begun, directory / "ckpt")
    killed = {"DCP_DATASTATES_FAILPOINTS": "publish.link.before@3=kill"}
    train(directory, 13, expect=-signal.SIGKILL, **killed)
    assert ds.latest(directory / "ckpt") == directory / "ckpt" / "step-10"
    ended = train(directory, 13)
    assert "rank 0 began after step 10\n" in ended.stdout
    assert_same_checkpoint(directory, uninterrupted)


def test_the_QUICK_START_under_torchrun_goes_on_as_if_it_had_not_ended(begun, tmp_path):
    long, resumed = (write(tmp_path / name, QUICK_START) for name in ("long", "resumed"))
    begin_from(begun, long / "ckpt")  # by one process
    train(long, 13, world=2)
    begin_from(long / "ckpt" / "step-10", resumed / "ckpt")
    ended = run(torchrun(2, "train.py", 13), resumed)
    assert {f"rank {rank} began after step 10" in ended.stdout for rank in (0, 1)} == {True}
    assert not committed(resumed / "ckpt" / "step-9")
    (attempt,) = attempts(resumed / "ckpt" / "step-12")
    assert {path.name[:6] for path in attempt.glob("r*")} == {"r00000", "r00001"}
    assert_same_checkpoint(resumed, long)


def assert_same_checkpoint(found, expected):
    """The last checkpoint of the quick start is the same, bit for bit, in both folders."""
    states = [load_everything(directory / "ckpt" / "step-12") for directory in (found, expected)]
    assert_same(*states)


# --- the recipes ----------------------------------------------------------------------------------


def test_one_process_takes_a_last_save_when_it_is_told_to_stop(tmp_path):
    directory = write(tmp_path, example("one_process"))
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
    directory = write(tmp_path, example("ddp"))
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
    leaves = (
        "\nassert all(each.is_leaf for each in average.parameters()), 'the average has a history'\n"
    )
    text = example("fsdp2") + leaves
    directory, whole = (write(tmp_path / name, text) for name in ("cut", "whole"))
    train(directory, 12, world=2)
    resumed, uninterrupted = train(directory, 20, world=1), train(whole, 20, world=2)
    assert validations(resumed)[0] == pytest.approx(validations(uninterrupted)[0], abs=1e-3)
    state = load_everything(directory / "ckpt" / "step-19")
    assert state["batches"]["taken"] == 20 * 24, "the position in the data was not resumed"
    assert state["optimizer"]["state"]["0.weight"]["step"] == 20, "the optimizer was not resumed"
    assert state["scheduler"]["last_epoch"] == 20
    finished = train(directory, 20, world=1)  # started again, with nothing left to do
    assert validations(finished) == validations(resumed)


def validations(ended):
    return [float(found) for found in re.findall(r"validation ([\d.]+)", ended.stdout)]


def test_fsdp2_with_tensor_parallelism_goes_on_on_another_mesh(tmp_path):
    directory, whole = (write(tmp_path / name, example("fsdp2_tp")) for name in ("cut", "whole"))
    train(directory, 6, 2, world=4)
    resumed, expected = (losses(train(where, 8, 2, world=2)) for where in (directory, whole))
    assert sorted(resumed) == [6, 7]
    for step, found in resumed.items():
        assert float(min(found)) == pytest.approx(float(min(expected[step])), rel=1e-3)


def test_a_program_that_used_torch_save_goes_on_from_its_last_file(tmp_path):
    model = torch.nn.Linear(512, 512)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.ones(512)).sum().backward()
    optimizer.step()
    old = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 7}
    directory = write(tmp_path / "job", example("from_torch_save"))
    torch.save(old, directory / "old.pt")
    assert "holds step 11" in train(directory, "old.pt", 12).stdout
    assert "holds step 13" in train(directory, "old.pt", 14).stdout
    newest = torch.load(directory / "newest.pt", weights_only=True)
    assert newest["optimizer"]["state"]["weight"]["step"] == 1 + (13 - 7)


def test_a_program_that_used_dcp_loads_its_old_checkpoint(tmp_path):
    model = torch.nn.Linear(512, 512)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    directory = write(tmp_path / "job", example("from_stock_dcp"))
    old = {"model": model_state, "optimizer": optimizer_state}
    dcp.save(old, checkpoint_id=directory / "old", no_dist=True)
    assert "loaded new" in train(directory, "old", "new").stdout
    assert load_everything(directory / "new")["optimizer"]["state"]["weight"]["step"] == 3, (
        "two, and the one that torch counts when it makes an optimizer's state"
    )


def test_checkpoints_are_evaluated_while_the_run_goes_on(tmp_path):
    directory = write(tmp_path, QUICK_START)
    (directory / "evaluate.py").write_text(example("evaluate_while_training"))
    with started([sys.executable, "evaluate.py", "ckpt", "3"], directory) as evaluation:
        slowly = {"DCP_DATASTATES_FAILPOINTS": "read.before=sleep:0.05"}
        with started(python(1000), directory, **slowly) as training:
            printed, errors = evaluation.communicate(timeout=120)
            training.terminate()
            training.communicate(timeout=120)
    assert evaluation.returncode == 0, errors
    steps = [int(step) for step in re.findall(r"step-(\d+): mean output", printed)]
    assert len(steps) == 3
    assert steps == sorted(set(steps))


def test_a_program_follows_the_weights_that_a_run_publishes(tmp_path):
    directory = write(tmp_path, example("publish_weights"))
    with started(python("serve", "weights"), directory) as serving:
        trained = train(directory, "train", "weights")
        printed, errors = serving.communicate(timeout=120)
    assert serving.returncode == 0, errors
    steps = [int(step) for step in re.findall(r"version \d+, step (\d+)", printed)]
    assert steps == sorted(set(steps))
    assert steps[-1] == 50
    assert "not published" not in trained.stderr


def test_a_data_loader_goes_on_in_the_middle_of_an_epoch_with_equal_losses(tmp_path):
    pytest.importorskip("torchdata")
    cut, whole = (write(tmp_path / name, example("data_loader")) for name in ("cut", "whole"))
    expected = losses(train(whole, 60))  # an epoch has 25 steps
    assert losses(train(cut, 33)) == {step: expected[step] for step in range(33)}
    assert losses(train(cut, 60)) == {step: expected[step] for step in range(33, 60)}


def test_a_data_loader_goes_on_at_another_number_of_ranks(tmp_path):
    pytest.importorskip("torchdata")
    directory = write(tmp_path, example("data_loader_ranks"))
    ended = [train(directory, 20, world=2), train(directory, 34, world=3)]
    batches = re.findall(r"samples \[([\d, ]+)\]", ended[0].stdout + ended[1].stdout)
    samples = [int(sample) for batch in batches for sample in batch.split(", ")]
    assert len(samples) == 20 * 2 * 6 + 14 * 3 * 6
    assert len(set(samples)) == len(samples), "a sample was taken twice in an epoch"


def test_each_save_is_told_of_by_its_record(tmp_path):
    pytest.importorskip("prometheus_client")
    counted = 'dcp_datastates_saves_total{outcome="committed"} 4.0'
    read = "prometheus_client.generate_latest().decode()"
    # Counted in the background, a moment after the outcome is known.
    wait = f"while {counted!r} not in {read}:\n    time.sleep(0.01)\n"
    source = example("monitoring").replace(f"print({read})", f"import time\n{wait}print({read})")
    ended = train(write(tmp_path, source))
    lines = [json.loads(line) for line in ended.stderr.splitlines() if line.startswith("{")]
    assert [line["step"] for line in lines] == [0, 1, 2, 7]
    assert {line["outcome"] for line in lines} == {"committed"}
    assert ended.stdout.count("committed") >= 4
    assert "[1, 2] 2\n" in ended.stdout
    assert counted in ended.stdout


def test_a_program_that_has_changed_goes_on(tmp_path):
    printed = train(write(tmp_path, example("changed_program"))).stdout
    assert "model.middle.weight" in printed
    assert "restored 0\n" in printed


def test_a_run_with_an_archive_goes_on_from_it(tmp_path):
    directory = write(tmp_path, example("archive"))
    assert "slow/step-20\n" in train(directory, "fast", "slow", 25).stdout
    shutil.rmtree(directory / "fast")
    train(directory, "fast", "slow", 31)
    state = load_everything(directory / "fast" / "step-30")
    assert state["optimizer"]["state"]["weight"]["step"] == 31, "not from the archive"


def test_a_checkpoint_is_exported_and_compared(begun, tmp_path):
    files = pytest.importorskip("safetensors.torch")
    directory = write(tmp_path, example("export"))
    assert "float32 [10], bfloat16 [10]" in train(directory, begun, "weights", "start").stdout
    names = {f"{layer}.{kind}" for layer in (0, 2) for kind in ("weight", "bias")}
    assert set(files.load_file(directory / "weights" / "model.safetensors")) == names
    assert set(load_everything(directory / "start")["model"]) == names


def test_a_run_in_a_bucket_goes_on(tmp_path):
    url = server.bucket_behind(server.endpoint(), name="example") + "/run"
    directory = write(tmp_path, example("object_store"))
    assert "holds [5, 7]" in train(directory, url, 8).stdout
    assert "holds [10, 11]" in train(directory, url, 12).stdout


def test_fsdp1_goes_on_with_equal_losses_after_a_kill_and_without_fsdp(tmp_path):
    for line in (DDP_LINE, SPARSELY, ROUNDED):
        assert line in QUICK_START
    exact = QUICK_START.replace(SPARSELY, "if True:").replace(ROUNDED, "{loss.item()}")
    fsdp1 = exact.replace(DDP_LINE, program("FSDP1", "docs/index.md"))

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


def losses(ended):
    """The losses that the ranks have printed, by step."""
    found = {}
    for step, loss in re.findall(r"step (\d+): loss ([\d.e-]+)", ended.stdout):
        found.setdefault(int(step), set()).add(loss)
    return found


def test_the_notebook_looks_into_a_checkpoint(uninterrupted):
    pytest.importorskip("safetensors")
    ended = run_program(example("notebook"), uninterrupted)
    ended.assert_clean()
    assert "step-12" in ended.stdout
    assert "tensor(" in ended.stdout
    assert "'model.0.weight'" in ended.stdout, "the names in rank 0's file"


# --- all of them ------------------------------------------------------------------------------------


ELSEWHERE = "".join(each.read_text() for each in ROOT.glob("integration/*/test_*.py"))
"""What tests those that need a framework, or a cluster."""


@pytest.mark.parametrize("path", sorted(EXAMPLES.iterdir()), ids=lambda path: path.name)
def test_each_example_is_short_tested_and_linked(path):
    assert len(path.read_text().splitlines()) <= 80
    assert f'"{path.stem}' in Path(__file__).read_text() or f"examples/{path.name}" in ELSEWHERE
    assert any(f"/examples/{path.name})" in (ROOT / each).read_text() for each in documents())
