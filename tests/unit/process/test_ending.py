"""Processes that end, fork or are interrupted while a save is in flight."""

import itertools

import pytest
import torch
from support.jobs.scripts import HASTY_END, run_script
from support.state.checkpoints import committed, load
from support.tiers import sampled, tries


def _committed_or_absent(path, number):
    if committed(path):
        found = load({"w": torch.zeros(1_000_000)}, path)["w"].unique().tolist()
        assert found == [number]


@pytest.mark.parametrize("deadline", sampled([0.0, 0.2, 3600], keep=[3600]))
def test_an_interpreter_that_ends_with_a_save_in_flight_ends_cleanly(deadline, tmp_path):
    path = tmp_path / "c"
    run_script(
        f"""
        state, optimizer = owned(1)
        future = dcp.async_save(state, storage_writer=writer(reads={deadline}))
        """,
        path,
    ).assert_clean()
    _committed_or_absent(path, 1.0)


def test_an_interpreter_that_only_imports_or_makes_a_writer_ends_cleanly(tmp_path):
    ended = run_script("keep = writer()", tmp_path / "c")
    ended.assert_clean()
    assert ended.stderr == ""
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("saves", tries(4, 10))
def test_children_that_come_and_go_while_saves_are_written_harm_neither(saves, tmp_path):
    path = tmp_path / "c"
    run_script(
        f"""
        state, optimizer = owned(0)
        ours = writer(reads="immediate")
        for number in range({saves}):
            expected = state["w"].detach().clone()
            future = dcp.async_save(state, storage_writer=ours)
            children = []
            for _ in range(4):
                child = os.fork()
                if child == 0:
                    ours.__dict__.clear()
                    os._exit(0)
                children.append(child)
            optimizer.step()
            future.result(30)
            for child in children:
                assert os.waitpid(child, 0)[1] == 0
            assert number_at() == expected[0].item()
        """,
        path,
    ).assert_clean()


def test_data_loader_workers_run_beside_a_save(tmp_path):
    path = tmp_path / "c"
    run_script(
        """
        if __name__ == "__main__":
            state, optimizer = owned(1)
            loader = torch.utils.data.DataLoader(list(range(64)), batch_size=4, num_workers=2)
            future = dcp.async_save(state, storage_writer=writer(reads=0.2))
            assert sum(batch.sum().item() for batch in loader) == sum(range(64))
            optimizer.step()
            future.result(30)
            assert number_at() == 1.0
        """,
        path,
    ).assert_clean()


ENDS = {"": 0, "sys.exit(3)": 3, "raise RuntimeError('training went wrong')": 1}


@pytest.mark.parametrize(
    ("how", "end"),
    sampled(
        itertools.product(["own", "dcp"], ENDS),
        keep=[*zip(["dcp", "dcp", "own"], ENDS, strict=True)],
    ),
)
def test_a_process_that_does_not_wait_for_its_saves_finishes_them_before_it_ends(
    how, end, tmp_path
):
    path = tmp_path / "c"
    call = {
        "own": "dcp_datastates.async_save(state, f'{path}-{i}', host_cache_size='64MiB')",
        "dcp": "dcp.async_save(state, storage_writer=writer(f'{path}-{i}'))",
    }[how]
    ended = run_script(
        f"""
        import dcp_datastates
        os.environ["DCP_DATASTATES_FAILPOINTS"] = "sync.data.before=sleep:0.2"
        state, optimizer = owned(0)
        for i in range(5):
            {call}
            optimizer.step()
        {end}
        """,
        path,
    )
    assert ended.returncode == ENDS[end], ended.stderr
    assert ("training went wrong" in ended.stderr) == end.startswith("raise")
    assert "failed" not in ended.stderr
    for number in range(5):
        where = tmp_path / f"c-{number}"
        assert committed(where), f"save {number} is lost"
        assert load({"w": torch.zeros(1_000_000)}, where)["w"].unique().tolist() == [-number]


def test_a_save_that_the_end_of_the_process_cannot_wait_for_is_named(tmp_path):
    path = tmp_path / "c"
    ended = run_script(
        """
        import dcp_datastates
        os.environ["DCP_DATASTATES_FAILPOINTS"] = "publish.decide.before=sleep:3"
        dcp_datastates.async_save({"w": torch.ones(10)}, path, exit_timeout=1)
        """,
        path,
    )
    assert ended.returncode == 0, ended.stderr
    assert f"the save to '{path}' failed: the process ends" in ended.stderr
    assert "committing" in ended.stderr


def test_the_end_of_the_process_says_what_it_waits_for(tmp_path):
    path = tmp_path / "c"
    ended = run_script(
        """
        import dcp_datastates
        from dcp_datastates.saving import start
        start._FIRST_LINE_SECONDS = 0.5
        os.environ["DCP_DATASTATES_FAILPOINTS"] = "publish.decide.before=sleep:2"
        dcp_datastates.async_save({"w": torch.ones(10)}, path)
        """,
        path,
    )
    ended.assert_clean()
    assert "the end of this process has waited for" in ended.stderr
    assert f"the save to '{path}' (committing)" in ended.stderr
    assert committed(path)


@pytest.mark.parametrize(
    ("how", "failpoint"),
    sampled(
        [
            ("own", "flush.write.before"),
            ("dcp", "flush.write.before"),
            ("dcp", "flush.open.before"),
            ("dcp", "sync.data.before"),
        ],
        keep=[("own", "flush.write.before"), ("dcp", "sync.data.before")],
    ),
)
def test_a_process_whose_storage_hangs_ends_with_its_own_status(
    how, failpoint, tmp_path, monkeypatch
):
    call = {
        "own": "dcp_datastates.async_save(state, path, host_cache_size='64MiB', exit_timeout=1)",
        "dcp": "dcp.async_save(state, storage_writer=writer(exit_timeout=1))",
    }[how]
    monkeypatch.setenv("DCP_DATASTATES_FAILPOINTS", f"{failpoint}=sleep:1000")
    ended = run_script(
        f"""
        import atexit
        import dcp_datastates
        atexit.register(print, "the program's own function at exit ran")
        state, optimizer = owned(1)
        future = {call}
        optimizer.step()
        sys.exit(3)
        """,
        tmp_path / "c",
        preface=HASTY_END,
    )
    assert ended.returncode == 3, ended.stderr
    assert "Fatal" not in ended.stderr, ended.stderr
    assert ended.stdout == "the program's own function at exit ran\n"
    assert f"the save to '{tmp_path / 'c'}' failed" in ended.stderr, ended.stderr
    assert "without waiting for storage any longer" in ended.stderr, ended.stderr
    assert f"a file operation for '{tmp_path}" in ended.stderr, ended.stderr
    assert not committed(tmp_path / "c")


def test_a_process_whose_storage_hangs_in_a_load_ends_with_its_own_status(tmp_path, monkeypatch):
    run_script("dcp.save({'w': torch.ones(1_000_000)}, storage_writer=writer())", tmp_path / "c")
    monkeypatch.setenv("DCP_DATASTATES_FAILPOINTS", "restore.read.before=sleep:1000")
    ended = run_script(
        """
        import threading
        threading.Thread(target=number_at).start()  # joined at the end, as by the interpreter
        time.sleep(1)
        sys.exit(3)
        """,
        tmp_path / "c",
        preface=HASTY_END,
    )
    assert ended.returncode == 3, ended.stderr
    assert "StorageError" in ended.stderr, ended.stderr
    assert "the process ends, and a load has waited" in ended.stderr, ended.stderr
    assert f"a file operation for '{tmp_path}" in ended.stderr, ended.stderr
