"""What an upload costs: training's time, memory and requests."""

import threading
from types import SimpleNamespace

import pytest
import torch
from support.jobs.scripts import run_script
from support.simulated.object_stores import MemoryStore, installed
from support.state.checkpoints import CACHE, assert_same, clone
from support.state.loops import owned
from support.stores.proxy import Proxy
from support.stores.server import bucket_behind, endpoint, use
from support.tiers import sampled

import dcp_datastates
from dcp_datastates._native import SEGMENT_BYTES
from dcp_datastates.errors import ConfigurationError
from dcp_datastates.saving.write import check_fits

MIB = 1 << 20


def test_a_file_whose_parts_do_not_fit_in_the_cache_is_refused_with_the_way_out():
    small = SimpleNamespace(host_cache_bytes=32 * MIB)
    fits, large = ([gibibytes << 30] for gibibytes in (70, 170))
    check_fits(fits, small)
    with pytest.raises(ConfigurationError, match=r"170.* GiB .*host_cache_size='"):
        check_fits(large, small)
    check_fits(large, SimpleNamespace(host_cache_bytes=1 << 30))


class _Waiting(MemoryStore):
    """Takes no piece of a stream until it may."""

    def __init__(self):
        super().__init__()
        self.may_go_on = threading.Event()

    def put_stream(self, key, pieces, **options):
        assert self.may_go_on.wait(60)
        super().put_stream(key, pieces, **options)


def test_a_step_waits_for_reads_and_not_for_the_store(monkeypatch):
    store = _Waiting()
    path = installed(monkeypatch, store)
    state, optimizer = owned(6 * MIB)
    expected = clone(state)
    handle = dcp_datastates.async_save(state, path, host_cache_size=CACHE)
    optimizer.step()  # returns: the state is in the host cache
    assert not handle.committed.done()
    assert not torch.equal(state["w"], expected["w"])
    store.may_go_on.set()
    handle.result(60)
    assert_same(dcp_datastates.load(path), expected)


@pytest.mark.parametrize("mebibytes", sampled([4, 20, 64], keep=[4, 20]))
def test_a_save_needs_few_requests(mebibytes, s3_root):
    proxy = Proxy(endpoint())
    root = f"{bucket_behind(proxy.url)}/run"
    try:
        for step in range(2):  # the first one of a process tries the store, too
            before = len(proxy.requests)
            state = {"w": torch.zeros(mebibytes * MIB // 4)}
            stats = dcp_datastates.save(state, f"{root}/step-{step}", host_cache_size=CACHE)
            made = proxy.requests[before:]
        assert stats.written_bytes is not None
        parts = -(-stats.written_bytes // SEGMENT_BYTES)  # of the file: a header, and checksums
        assert len(made) <= parts + 6, made
        if parts == 1:
            assert len(made) <= 5, made
    finally:
        proxy.close()
        use(endpoint())


MEMORY = """
import dcp_datastates as ds
from pathlib import Path

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) << 10

root = os.environ["ROOT"]
small = {"w": torch.ones(5 << 20)}
for _ in range(2):  # what a process needs once
    ds.save(small, root + "/small", host_cache_size="32MiB")
ds.load(root + "/small")
state = {f"w{n}": torch.full((10 << 20,), float(n)) for n in range(4)}
Path("/proc/self/clear_refs").write_text("5")  # the peak is the present size
before = peak()
ds.save(state, root + "/step-1", host_cache_size="32MiB")
print((peak() - before) >> 20)
"""


def test_memory_is_bounded_by_the_cache_whatever_the_size_of_the_state(
    s3_root, tmp_path, monkeypatch
):
    monkeypatch.setenv("ROOT", s3_root)
    ended = run_script(MEMORY, tmp_path, timeout=120)
    ended.assert_clean()
    assert int(ended.stdout) < 64, "of 160 MiB; the cache is in the process's size before"


KILLED = """
import dcp_datastates as ds
from dcp_datastates.storage.object_path import locate

root = os.environ["ROOT"]
store = locate(root).store
send = store.put_stream

def send_some(key, pieces, **options):
    def some():
        yield next(pieces)
        print("sending", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    send(key, some(), **options)

ds.save({"w": torch.zeros(3 << 20)}, root + "/step-1", host_cache_size="64MiB")
store.put_stream = send_some
ds.save({"w": torch.ones(3 << 20)}, root + "/step-1", host_cache_size="64MiB")
"""


def test_a_process_killed_in_an_upload_leaves_the_old_checkpoint_and_the_next_save_works(
    s3_root, tmp_path, monkeypatch
):
    monkeypatch.setenv("ROOT", s3_root)
    ended = run_script(KILLED, tmp_path, timeout=120)
    assert ended.stdout == "sending\n", ended.stderr
    assert ended.returncode == -9
    path = f"{s3_root}/step-1"
    assert_same(dcp_datastates.load(path), {"w": torch.zeros(3 << 20)})
    dcp_datastates.save({"w": torch.full((3 << 20,), 2.0)}, path, host_cache_size=CACHE)
    assert_same(dcp_datastates.load(path), {"w": torch.full((3 << 20,), 2.0)})
