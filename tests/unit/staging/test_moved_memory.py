"""Memory that is moved, resized, shared or freed under a deferred read: the right bytes, or a torn save."""

import ctypes
import mmap

import pytest
import torch
from support.jobs.scripts import run_script
from support.state.checkpoints import async_save, committed, load, raises, writer
from support.tiers import sampled

from dcp_datastates import track
from dcp_datastates.errors import SnapshotTornError

SAVED = """
parameter = torch.nn.Parameter(torch.arange(1 << 20, dtype=torch.float32))
optimizer = torch.optim.SGD([parameter], lr=1.0)
track(optimizer)
expected = parameter.detach().clone()
ours = writer(reads=3600)
future = dcp.async_save({"w": parameter.detach()}, storage_writer=ours)
for _ in range(200):  # planned and handed over, mostly; the window is shut
    time.sleep(0.001)
"""

CHECKED = """
reused = [torch.full((1 << 20,), -1.0) for _ in range(4)]
try:
    ours.committed.exception(30)
    future.result(30)
except BaseException as error:
    print("torn" if "SnapshotTornError" in repr(error) else repr(error))
    assert not os.path.exists(path + "/.metadata")
else:
    found = {"w": torch.zeros(1 << 20)}
    dcp.load(found, storage_reader=DataStatesReader(path), no_dist=True)
    print("whole" if torch.equal(found["w"], expected) else "WRONG BYTES")
"""

QUEUE = """
import torch.multiprocessing as mp
queue = mp.get_context("spawn").Queue()
queue.put(parameter.detach())
time.sleep(0.5)
"""

# What is done, and how the save may end.
MOVES = {
    "share_memory_": ("parameter.detach().share_memory_()", {"whole"}),
    "a module's share_memory": (
        "module = torch.nn.Module(); module.w = parameter; module.share_memory()",
        {"whole"},
    ),
    "a queue": (QUEUE, {"whole"}),
    "a storage of nothing": ("parameter.untyped_storage().resize_(0)", {"whole"}),
    "a larger storage": ("parameter.untyped_storage().resize_(64 << 20)", {"whole"}),
    "a typed storage": ("parameter.detach().storage().resize_(0)", {"whole"}),
    "a larger tensor": ("parameter.data.resize_(16 << 20)", {"torn", "whole"}),
    "an out= that grows": (
        "torch.add(torch.ones(16 << 20), 1, out=parameter.detach())",
        {"torn", "whole"},
    ),
    "another storage": ("parameter.data.set_(torch.zeros(1 << 20))", {"torn", "whole"}),
}


EACH_KIND = ("share_memory_", "a storage of nothing", "an out= that grows", "another storage")


@pytest.mark.parametrize("move", sampled(MOVES, EACH_KIND))
def test_memory_that_moves_under_a_deferred_read_gives_no_crash_and_no_wrong_bytes(move, tmp_path):
    done, outcomes = MOVES[move]
    ended = run_script(SAVED + done + CHECKED, tmp_path / "c")
    ended.assert_clean()
    assert ended.stdout.strip() in outcomes, ended.stdout


class Mapped:
    """Memory that can be unmapped at will."""

    def __init__(self, nbytes):
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        self._libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._address = self._libc.mmap(
            None, ctypes.c_size_t(nbytes), mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0
        )
        self._nbytes = nbytes
        buffer = (ctypes.c_char * nbytes).from_address(self._address)
        self.tensor = torch.frombuffer(buffer, dtype=torch.float32)

    def unmap(self):
        assert self._libc.munmap(self._address, self._nbytes) == 0


def test_memory_that_is_unmapped_before_it_is_read_is_a_torn_save(tmp_path):
    """Nothing tells of it: neither a storage's address nor its size, nor a counter."""
    mapped = Mapped(32 << 20)
    mapped.tensor.fill_(7.0)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    track(optimizer, also=[mapped.tensor])
    ours = writer(tmp_path, reads=3600)
    future = async_save({"w": mapped.tensor}, tmp_path, by=ours)
    mapped.unmap()
    assert ours.committed.exception(60) is not None
    with raises(SnapshotTornError):
        future.result(60)
    assert not committed(tmp_path)
    following = torch.full((1 << 20,), 3.0)
    async_save({"w": following}, tmp_path).result(60)
    assert torch.equal(load({"w": torch.zeros(1 << 20)}, tmp_path)["w"], following)


def test_memory_moves_freely_once_it_is_read(tmp_path):
    parameter = torch.nn.Parameter(torch.ones(1 << 20))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    track(optimizer)
    parameter.grad = torch.ones_like(parameter)
    for number in range(8):
        future = async_save({"w": parameter.detach()}, tmp_path / str(number))
        before = parameter.detach().clone()
        optimizer.step()
        parameter.data.resize_(parameter.numel() + 1024)  # from C++, behind the gate
        parameter.data.resize_(1 << 20)
        future.result(60)
        found = load({"w": torch.zeros(1 << 20)}, tmp_path / str(number))["w"]
        assert torch.equal(found, before)


def test_storages_that_are_not_saved_do_not_wait(tmp_path):
    """FSDP2 frees and allocates a storage for each module, in forward and backward."""
    parameter = torch.nn.Parameter(torch.ones(1 << 20))
    track(torch.optim.SGD([parameter], lr=1.0))
    future = async_save({"w": parameter.detach()}, tmp_path, reads=3600)
    other = torch.ones(1 << 20).untyped_storage()
    other.resize_(0)
    other.resize_(1 << 10)
    assert not future.done()
    parameter.untyped_storage().resize_(0)  # this one does
    future.result(60)


def test_storages_resize_in_compiled_code(tmp_path):
    def shrink_and_grow(tensor):
        doubled = tensor * 2
        tensor.untyped_storage().resize_(0)
        tensor.untyped_storage().resize_(doubled.untyped_storage().size())
        tensor.copy_(doubled)
        return doubled + 1

    compiled = torch.compile(shrink_and_grow, backend="eager", fullgraph=True)
    tensor = torch.ones(1 << 10)
    assert torch.equal(compiled(tensor), torch.full((1 << 10,), 3.0))
    assert torch.equal(tensor, torch.full((1 << 10,), 2.0))
