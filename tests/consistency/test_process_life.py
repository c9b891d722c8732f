"""Processes that end, fork or are interrupted while a save is in flight."""

from __future__ import annotations

import pytest
import torch
from support.checkpoints import committed, load
from support.scripts import run_script


def _committed_or_absent(path, number):
    if committed(path):
        found = load({"w": torch.zeros(1_000_000)}, path)["w"].unique().tolist()
        assert found == [number]


@pytest.mark.parametrize("deadline", [0.0, 0.2, 3600])
def test_an_interpreter_that_ends_with_a_save_in_flight_ends_cleanly(deadline, tmp_path):
    path = tmp_path / "c"
    run_script(
        f"""
        state, optimizer = owned(1)
        future = dcp.async_save(state, storage_writer=writer(read_deadline={deadline}))
        """,
        path,
    ).assert_clean()
    _committed_or_absent(path, 1.0)


def test_an_interpreter_that_ends_by_sys_exit_keeps_its_exit_code(tmp_path):
    path = tmp_path / "c"
    ended = run_script(
        """
        state, optimizer = owned(1)
        future = dcp.async_save(state, storage_writer=writer())
        sys.exit(3)
        """,
        path,
    )
    assert ended.returncode == 3, ended.stderr
    _committed_or_absent(path, 1.0)


def test_an_interpreter_that_ends_by_an_exception_shows_it(tmp_path):
    path = tmp_path / "c"
    ended = run_script(
        """
        state, optimizer = owned(1)
        keep = writer()
        future = dcp.async_save(state, storage_writer=keep)
        raise RuntimeError("training went wrong")
        """,
        path,
    )
    assert ended.returncode == 1
    assert "training went wrong" in ended.stderr
    _committed_or_absent(path, 1.0)


def test_an_interpreter_that_only_imports_or_makes_a_writer_ends_cleanly(tmp_path):
    ended = run_script("keep = writer()", tmp_path / "c")
    ended.assert_clean()
    assert ended.stderr == ""
    assert not (tmp_path / "c").exists()


def test_a_child_forked_with_a_save_in_flight_saves_and_loads_on_its_own(tmp_path):
    path = tmp_path / "c"
    ended = run_script(
        """
        state, optimizer = owned(1)
        ours = writer(read_deadline=3600)
        future = dcp.async_save(state, storage_writer=ours)
        child = os.fork()
        if child == 0:
            signal.alarm(25)  # kills this child if it hangs
            code = 1
            try:
                mine = {"w": torch.full((1_000_000,), 2.0)}
                dcp.save(mine, storage_writer=writer(path + "-child"), no_dist=True)
                code = 0 if number_at(path + "-child") == 2.0 else 2
                later = dcp.async_save(mine, storage_writer=writer(path + "-child-async"), no_dist=True)
                later.result(20)
                code = code or (0 if number_at(path + "-child-async") == 2.0 else 3)
            except BaseException:
                import traceback
                traceback.print_exc()
            finally:
                os._exit(code)
        optimizer.step()
        future.result(30)
        assert number_at() == 1.0
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0, os.waitstatus_to_exitcode(status)
        """,
        path,
    )
    ended.assert_clean()


def test_children_that_come_and_go_while_saves_are_written_harm_neither(tmp_path):
    path = tmp_path / "c"
    run_script(
        """
        state, optimizer = owned(0)
        ours = writer(read_window="immediate")
        for number in range(10):
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


def test_a_child_that_exits_through_python_leaves_the_parents_save_alone(tmp_path):
    path = tmp_path / "c"
    run_script(
        """
        state, optimizer = owned(1)
        ours = writer(read_deadline=3600)
        future = dcp.async_save(state, storage_writer=ours)
        child = os.fork()
        if child == 0:
            sys.exit(0)  # runs every exit handler that the parent registered
        assert os.waitpid(child, 0)[1] == 0
        assert not future.done()
        optimizer.step()
        future.result(30)
        assert number_at() == 1.0
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
            future = dcp.async_save(state, storage_writer=writer(read_deadline=0.2))
            assert sum(batch.sum().item() for batch in loader) == sum(range(64))
            optimizer.step()
            future.result(30)
            assert number_at() == 1.0
        """,
        path,
    ).assert_clean()


def test_a_step_works_while_the_interpreter_has_no_save_at_all(tmp_path):
    run_script(
        """
        state, optimizer = owned(1)
        optimizer.step()
        assert not os.path.exists(path)
        """,
        tmp_path / "c",
    ).assert_clean()
