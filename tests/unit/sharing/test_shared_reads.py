"""One rank's part in shared reads: two of them here, in one process."""

import contextlib
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.state.chunks import reads_of_rows
from support.waiting import await_that

from dcp_datastates._native import BLOCK_BYTES
from dcp_datastates.errors import CheckpointNotFoundError
from dcp_datastates.format.metadata_table import FileRecord
from dcp_datastates.io.committed import range_reader
from dcp_datastates.sharing import shared_reads
from dcp_datastates.sharing.assignment import Offer, Unit, assign, blocks_of, needed_blocks
from dcp_datastates.sharing.shared_reads import OwnUnits, SharedReads, pays
from dcp_datastates.storage.object_path import locate
from dcp_datastates.wire.line import Client, RefusedError, connect
from dcp_datastates.wire.server import listen

BLOCKS = 20
NBYTES = BLOCKS * BLOCK_BYTES - 1000
TABLE = 84


class _Job:
    """Two ranks that need all of one file, and what they read of it."""

    def __init__(self, directory, monkeypatch):
        self.reads = []
        self.data = b"".join(bytes([n + 1]) * BLOCK_BYTES for n in range(BLOCKS))[:NBYTES]
        self.file = directory / "f"
        self.file.write_bytes(self.data + bytes(TABLE))
        note = SimpleNamespace(files={"f": FileRecord("f", NBYTES + TABLE, NBYTES)})
        self.needed = reads_of_rows(("o", "f", 0, NBYTES))

        def counted(paths):
            read = range_reader(paths)

            def read_range(path, begin, end):
                self.reads.append((begin, end))
                return read(path, begin, end)

            return read_range

        monkeypatch.setattr(shared_reads, "range_reader", counted)
        self.runs = needed_blocks(self.needed, blocks_of(note.files))
        self.listening = [listen("127.0.0.1") for _ in range(2)]
        self.addresses = [address for _, address in self.listening]
        offers = [Offer(tuple(each), self.runs.ravel()) for each in self.addresses]
        self.shares = assign(dict(enumerate(offers)))
        self.ranks = []
        self.start = lambda rank: self.ranks.append(
            SharedReads(self.shares[rank], *self.listening[rank], note, directory)
        )

    def read(self, rank, ahead=True):
        step = 3 << 20  # units are longer, and begin elsewhere
        ranges = [(begin, min(begin + step, NBYTES)) for begin in range(0, NBYTES, step)]
        with rank.reading(self.needed if ahead else reads_of_rows()) as read_range:
            return b"".join(bytes(read_range(str(self.file), *each)) for each in ranges)

    @property
    def bytes_read(self):
        return sum(end - begin for begin, end in self.reads)


@pytest.fixture
def job(tmp_path, monkeypatch):
    job = _Job(tmp_path, monkeypatch)
    yield job
    for rank in job.ranks:
        rank.end()
    for listening, _ in job.listening:
        listening.close()


def test_two_ranks_read_all_once_between_them(job):
    job.start(0)
    job.start(1)
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(job.read, job.ranks))
    assert found == [job.data, job.data]
    assert job.bytes_read == NBYTES


def test_a_rank_that_has_ended_passes_on_what_others_still_need(job):
    job.start(0)
    job.start(1)
    assert job.read(job.ranks[0]) == job.data
    job.ranks[0].end()
    assert job.read(job.ranks[1]) == job.data
    assert job.bytes_read == NBYTES


def refuses(address):
    with contextlib.suppress(OSError):
        connect(address).close()
        return False
    return True


def test_what_a_rank_keeps_for_others_goes_if_they_do_not_ask(job, monkeypatch):
    monkeypatch.setattr(shared_reads, "_KEPT_SECONDS", 0.2)
    job.start(0)
    assert job.read(job.ranks[0], ahead=True) == job.data
    job.ranks[0].end()
    await_that(lambda: refuses(job.addresses[0]))
    job.start(1)
    assert job.read(job.ranks[1]) == job.data


def test_what_all_have_taken_is_not_kept(job):
    job.start(0)
    job.start(1)
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(job.read, job.ranks))
    for rank, address in zip(job.ranks, job.addresses, strict=True):
        rank.end()
        await_that(lambda address=address: refuses(address), seconds=5)


def test_a_rank_that_never_begins_to_read_is_not_waited_for(job, monkeypatch):
    monkeypatch.setattr(shared_reads, "_ANSWER_SECONDS", 0.2)
    job.start(0)
    assert job.read(job.ranks[0]) == job.data
    assert job.bytes_read == NBYTES


@pytest.mark.parametrize("started", [0, 1])
def test_without_threads_to_read_ahead_all_is_read(job, monkeypatch, started):
    """The system gives no more threads: those that read ahead end nevertheless."""
    job.start(0)
    job.start(1)
    submit, begun = ThreadPoolExecutor.submit, []

    def few(self, *args):
        begun.append(args)
        if len(begun) > started:
            raise RuntimeError("can't start new thread")
        return submit(self, *args)

    monkeypatch.setattr(shared_reads, "_MOST_KEPT_BYTES", 8 << 20)
    monkeypatch.setattr(ThreadPoolExecutor, "submit", few)
    assert job.read(job.ranks[0]) == job.data


def test_the_end_needs_no_thread(job, monkeypatch):
    job.start(0)
    job.start(1)
    assert job.read(job.ranks[1]) == job.data

    def refuse(self):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as no_threads:
        no_threads.setattr(threading.Thread, "start", refuse)
        job.ranks[1].end()
    with pytest.raises(OSError, match=r"refused"):
        connect(job.addresses[1])


def test_few_threads_ask_one_rank_at_the_same_time(job, monkeypatch):
    """Each has a thread there, and so have those of thousands of other ranks."""
    asking, most, ask, lock = 0, 0, Client.ask, threading.Lock()

    def slow_ask(*given, **options):
        nonlocal asking, most
        with lock:
            asking += 1
            most = max(most, asking)
        time.sleep(0.01)
        try:
            return ask(*given, **options)
        finally:
            with lock:
                asking -= 1

    monkeypatch.setattr(shared_reads, "_MOST_LINES", 2)
    monkeypatch.setattr(Client, "ask", slow_ask)
    job.start(0)
    job.start(1)
    begins = range(0, NBYTES, BLOCK_BYTES)
    with ThreadPoolExecutor(16) as threads, job.ranks[0].reading(job.needed) as read_range:

        def read(begin):
            return bytes(read_range(str(job.file), begin, min(begin + BLOCK_BYTES, NBYTES)))

        assert b"".join(threads.map(read, begins)) == job.data
    assert most == 2


def test_files_that_are_left_and_checksum_tables_are_read_from_storage(job):
    job.start(0)
    job.start(1)
    with job.ranks[0].reading(reads_of_rows()) as read_range:
        begin = NBYTES // 4096 * 4096
        assert bytes(read_range(str(job.file), begin, NBYTES + TABLE))[-TABLE:] == bytes(TABLE)
    assert job.reads == [(begin, NBYTES + TABLE)]
    assert job.ranks[1].leave(["f"])
    assert not job.ranks[1].leave(["f"])
    assert job.read(job.ranks[1], ahead=False) == job.data
    assert job.bytes_read == (NBYTES + TABLE - begin) + NBYTES


def test_errors_of_storage_are_those_of_this_rank(job):
    job.start(0)
    job.start(1)
    job.file.unlink()
    with pytest.raises(CheckpointNotFoundError, match="No such file"):
        job.read(job.ranks[0])


def test_only_ranks_of_the_load_are_served_and_only_with_units_of_this_rank(job):
    job.start(0)
    address = job.addresses[0]
    own = next(iter(job.shares[0].own_units(job.runs)))
    other = next(iter(job.shares[1].own_units(job.runs)))
    with pytest.raises(PermissionError, match="DCP_DATASTATES_SECRET"):
        connect(address._replace(token=bytes(16)))
    line = connect(address)
    line.send(["unit", own.begin, 5, 9])
    assert bytes(line.result(most=4)[1]) == job.data[5:9]
    for words in (
        ["unit", other.begin, 5, 9],
        ["unit", own.begin + 1, 5, 9],
        ["unit", own.begin, 9, 5],
        ["unit", own.begin, -9, 5],
        ["unit", own.begin, 0, 9 << 20],
        ["unit", 1 << 63, 0, 9],
        ["unit", -1, 0, 9],
        ["unit", own.begin, 0, 1 << 64],
        ["unit", own.begin],
        {"unit": own.begin},
        None,
    ):
        line.send(words)
        with pytest.raises(RefusedError, match="not kept"):
            line.result(most=9 << 20)
    line.close()


def test_a_rank_with_another_secret_is_named_and_its_part_read_from_storage(job, caplog):
    job.start(0)
    job.start(1)
    stranger = job.addresses[1]._replace(token=bytes(16))
    job.ranks[0]._peers[1] = Client([stranger], most_idle=1)
    assert job.read(job.ranks[0]) == job.data
    (said,) = [each for each in caplog.records if each.levelname == "WARNING"]
    assert "rank 1 (127.0.0.1:" in said.getMessage()
    assert "DCP_DATASTATES_SECRET" in said.getMessage()


# ---- a unit is read once, and kept until its readers have it, within bounds ----------------------------


class _Storage:
    def __init__(self):
        self.reads = []
        self.go_on = threading.Event()
        self.go_on.set()

    def read(self, unit):
        self.reads.append(unit.begin)
        assert self.go_on.wait(30)
        if unit.begin >= 1000:
            raise OSError("damaged")
        return bytes([unit.begin]) * ((unit.end - unit.begin) * BLOCK_BYTES)


def _unit(begin, readers=2):
    return Unit(begin, begin + 1, 0, readers)


def _units(storage, blocks, *units):
    """Units, of which so many ``blocks`` are kept."""
    return OwnUnits(storage.read, units or map(_unit, range(9)), blocks * BLOCK_BYTES)


def _taken(units, unit, nbytes=BLOCK_BYTES):
    with units.taken(unit, 0, nbytes) as data:
        return data


def test_many_that_ask_at_once_wait_for_one_read():
    storage = _Storage()
    storage.go_on.clear()
    unit = _unit(1, readers=5)
    units = _units(storage, 8, unit)
    with ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(_taken, units, unit) for _ in range(4)]
        await_that(lambda: storage.reads == [1])
        storage.go_on.set()
        assert {each.result() for each in asked} == {bytes([1]) * BLOCK_BYTES}
    assert storage.reads == [1]


def test_a_unit_goes_when_all_readers_have_all_of_it():
    storage = _Storage()
    unit = _unit(1)
    units = _units(storage, 8, unit)
    assert units.read_ahead(unit)
    assert _taken(units, unit) is not None
    assert _taken(units, unit, BLOCK_BYTES - 1) is not None
    assert not units.are_gone.is_set()
    with units.taken(unit, BLOCK_BYTES - 1, BLOCK_BYTES) as data:
        assert data == bytes([1])
        assert not units.are_gone.is_set()
    assert units.are_gone.is_set()
    assert _taken(units, unit) is None
    assert units.read_ahead(unit)
    assert storage.reads == [1]


@pytest.mark.parametrize(
    ("begin", "end"), [(0, BLOCK_BYTES + 1), (5, 5), (9, 5), (-5, 5), (0, 1 << 70)]
)
def test_bytes_that_a_unit_does_not_have_are_not_taken(begin, end):
    units = _units(_Storage(), 8)
    for _ in range(3):
        with units.taken(_unit(1), begin, end) as data:
            assert data is None
    assert _taken(units, _unit(1)) is not None


def test_reading_ahead_waits_for_room_and_a_request_takes_that_of_the_oldest():
    storage = _Storage()
    units = _units(storage, 2)
    assert units.read_ahead(_unit(1))
    assert units.read_ahead(_unit(2))
    assert not units.read_ahead(_unit(3))
    assert storage.reads == [1, 2]
    assert _taken(units, _unit(4)) == bytes([4]) * BLOCK_BYTES
    assert _taken(units, _unit(1)) is None
    assert _taken(units, _unit(2)) is not None


def test_what_is_in_use_makes_no_room():
    units = _units(_Storage(), 2)
    with units.taken(_unit(1), 0, 1), units.taken(_unit(2), 0, 1):
        assert _taken(units, _unit(3)) is None
    assert _taken(units, _unit(3)) is not None
    assert _taken(units, _unit(2)) is not None


def test_what_was_read_for_a_request_makes_no_room_before_it_is_used(monkeypatch):
    units = _units(_Storage(), 1)
    begun, others = units._begun, []

    def ask_between(unit, **options):
        kept = begun(unit, **options)
        if unit == _unit(1):
            others.append(_taken(units, _unit(2)))
        return kept

    monkeypatch.setattr(units, "_begun", ask_between)
    assert _taken(units, _unit(1)) is not None
    assert others == [None]


def test_what_is_being_read_makes_no_room():
    storage = _Storage()
    storage.go_on.clear()
    units = _units(storage, 1)
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(_taken, units, _unit(1))
        await_that(lambda: storage.reads == [1])
        assert _taken(units, _unit(2)) is None
        storage.go_on.set()
        assert first.result() is not None
    assert _taken(units, _unit(2)) is not None  # it had not gone


def test_a_unit_that_cannot_be_read_is_not_kept():
    storage = _Storage()
    damaged, whole = _unit(1000), _unit(1, readers=1)
    units = _units(storage, 1, damaged, whole)
    assert _taken(units, damaged) is None
    assert units.read_ahead(damaged)
    assert storage.reads == [1000]
    assert not units.are_gone.is_set()
    assert _taken(units, whole) is not None
    assert units.are_gone.is_set()


@pytest.mark.parametrize("begun", [False, True])
def test_after_the_end_nothing_is_kept(begun):
    storage = _Storage()
    units = _units(storage, 8)
    if begun:
        assert _taken(units, _unit(1)) is not None
    units.close()
    assert _taken(units, _unit(1)) is None
    assert _taken(units, _unit(2)) is None
    assert not units.read_ahead(_unit(3))


def test_a_rank_without_units_keeps_nothing():
    assert OwnUnits(_Storage().read, [], 8 * BLOCK_BYTES).are_gone.is_set()


# ---- where it pays: by default, in object stores and network file systems ----------------------------


@pytest.mark.parametrize("url", ["s3://bucket/run/c", "gs://b/c", "ram://run/c", "memory://c"])
def test_object_stores_but_for_those_in_memory(url):
    assert pays(locate(url)) is url.startswith(("s3", "gs"))


def _mounts(tmp_path: Path, kind: str, device: int) -> Path:
    of_path = f"{os.major(device)}:{os.minor(device)}"
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        f"20 1 0:999 / /elsewhere rw shared:1 - nfs4 host:/x rw\n"
        f"21 1 {of_path} / {tmp_path} rw,relatime - {kind} host:/export rw,vers=4.2\n"
    )
    return mounts


_ON_OTHER_MACHINES = ["nfs4", "nfs", "lustre", "cifs", "fuse.s3fs", "gpfs", "ceph", "beegfs"]
_LOCAL = ["ext4", "xfs", "tmpfs", "fuseblk", "overlay"]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [*((kind, True) for kind in _ON_OTHER_MACHINES), *((kind, False) for kind in _LOCAL)],
)
def test_file_systems_by_the_type_of_their_mount(tmp_path, kind, expected):
    mounts = _mounts(tmp_path, kind, tmp_path.stat().st_dev)
    assert pays(tmp_path, mounts) is expected


def test_what_is_not_known_counts_as_local(tmp_path):
    assert pays(tmp_path, tmp_path / "no such file") is False
    assert pays(tmp_path / "no such place", _mounts(tmp_path, "nfs", 1)) is False
    (tmp_path / "mountinfo").write_text("nonsense\n\n1 2 3\n")
    assert pays(tmp_path, tmp_path / "mountinfo") is False
