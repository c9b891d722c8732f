"""Types of the native engine (sources in ``native/``).

The engine knows sources, segments and files; it knows neither tensors nor checkpoints. Every
call that may wait releases the GIL while it does. Addresses are plain integers: the caller keeps
the memory behind them alive (``keepalive``) and unchanged for as long as each docstring says.
Offsets and sizes are bytes, times are seconds.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Literal, final

from typing_extensions import Buffer

SEGMENT_BYTES: int
"""Size of a host cache segment (8 MiB). A file is one byte stream cut into segments."""

BLOCK_BYTES: int
"""Bytes that one stored CRC32C covers (1 MiB). Divides ``SEGMENT_BYTES``."""

MIN_HOST_CACHE_BYTES: int
"""Smallest host cache an engine accepts (4 segments)."""

def crc32c(data: Buffer, crc: int = 0) -> int:
    """CRC32C (Castagnoli, RFC 3720) of ``data``, continuing from ``crc``."""

def sample_words(
    addresses: Sequence[int], sizes: Sequence[int], seed: int, guarded: bool = False
) -> list[int]:
    """One 64-bit digest per region, of a few 8-byte words at places drawn from ``seed``.

    The same addresses, sizes and seed read the same places. An empty region gives 0. Reads host
    memory at the call, in the calling thread. ``guarded``: a region whose memory is not mapped (any more) gives
    0, too; takes several times as long.
    """

class ExpectedBytes:
    """What tensors held at the call: some words of each, or all bytes. A job compares them with what it has copied.

    Build it in one thread, and then pass it to a job. ``tensors`` are numbers of the caller's, for
    :attr:`SaveJob.difference`; ``sizes`` are in bytes. Empty tensors are left out.
    """

    MOST_WORD_BYTES: int
    """The bytes that the words of one tensor take, at most."""

    def __init__(self) -> None: ...
    def add_words(
        self, tensors: Sequence[int], addresses: Sequence[int], sizes: Sequence[int], seed: int
    ) -> None:
        """Read words from all over each tensor, at places drawn from ``seed``. Host memory, in the calling thread.

        Each tensor is divided into n equal parts, with one word of 8 bytes from each: n is 4, and one more for each
        4 MiB, up to 16. Tensors below 64 bytes are read whole.
        """
    def add_device_words(
        self,
        tensors: Sequence[int],
        addresses: Sequence[int],
        sizes: Sequence[int],
        seed: int,
        base: int,
        offset: int,
        device: int,
    ) -> Transfer:
        """The same for memory of ``device``. Make the copies that this returns before the job begins.

        They write into ``MOST_WORD_BYTES`` for each tensor from ``base + offset`` on. ``base`` is where byte 0 of
        the returned content goes. That memory must live until the job has read everything.
        """
    def add_whole(
        self,
        tensors: Sequence[int],
        addresses: Sequence[int],
        sizes: Sequence[int],
        copies: Sequence[int],
    ) -> None:
        """Expect all bytes of each tensor to be those at the address in ``copies``. No tensor may be empty."""

@final
class Fault:
    """Why a job failed. Errors travel as values; Python decides what to raise."""

    @property
    def kind(
        self,
    ) -> Literal["io", "corrupt", "cancelled", "shutdown", "lost", "torn", "device"]: ...
    @property
    def errno(self) -> int:
        """The system's error number for ``io``, or what ``fail`` was given; the driver's for ``device`` (0 otherwise).

        A file of the wrong size is ``corrupt``; ``io`` with 0 is one that was cut while being read. ``lost``:
        host memory of a group other than 0 is not mapped any more.
        """
    @property
    def path(self) -> str: ...
    @property
    def offset(self) -> int:
        """File offset of the failed operation, or of the first byte of the corrupt block."""
    @property
    def operation(self) -> str:
        """The failed operation: ``open``, ``fallocate``, ``write``, ``fdatasync``, ``read``, ``checksum`` …"""
    @property
    def message(self) -> str:
        """All of it in a sentence, with the system's words for ``errno``."""

@final
class Transfer:
    """An ordered list of copies between memory and positions of one byte stream.

    Used in both directions: gathering memory into a stream (save, ``Engine.gather``) and
    scattering a stream into memory (restore). Regions may be added in any order; no two may
    overlap in the stream. ``group`` tags a region so that ``SaveJob.wait_read`` can wait for it. Group 0 is for
    memory that cannot go away meanwhile; a save reads host memory of all other groups so that a page that is not
    mapped any more is a ``lost`` fault, and no crash.
    """

    def __init__(self) -> None: ...
    def add(self, offset: int, nbytes: int, address: int, group: int = 0, device: int = -1) -> None:
        """A contiguous region: ``nbytes`` at ``address`` <-> stream ``[offset, offset + nbytes)``.

        ``device`` is the number of the device that has the memory; -1: the host.
        """
    def add_many(
        self,
        offsets: Sequence[int],
        sizes: Sequence[int],
        addresses: Sequence[int],
        groups: Sequence[int],
        devices: Sequence[int] | None = None,
    ) -> None:
        """``add`` for whole columns, all of one length, in one call."""
    def add_buffer(self, offset: int, data: Buffer, group: int = 0) -> None:
        """``add`` for an object with the buffer protocol (contiguous); the caller keeps it alive."""
    def add_strided(
        self,
        offset: int,
        itemsize: int,
        sizes: Sequence[int],
        stream_strides: Sequence[int],
        address: int,
        memory_strides: Sequence[int],
        group: int = 0,
        device: int = -1,
    ) -> None:
        """A strided region of ``sizes`` elements. Strides are bytes and at least 0 in the stream; element 0 is
        at stream ``offset`` and at ``address``. The stream side is row-major (strides do not grow from
        the outer to the inner dimension, as in a slice of a C-contiguous array). ``sizes`` may hold
        zeros (nothing is copied) and may be empty (one element)."""
    @property
    def nbytes(self) -> int:
        """Bytes copied in all."""

@final
class Window:
    """The read window of one save: its job's deferred reads start when it opens."""

    def __init__(self, deadline: float) -> None:
        """Opens by itself ``deadline`` seconds from now, at the latest (0: open already)."""
    def open(self) -> None:
        """Open it now. Idempotent, any thread, never waits for I/O."""

@final
class Slab:
    """Contiguous host cache memory with the buffer protocol (writable). Freed by ``release`` or with the object."""

    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def release(self) -> None:
        """Give the segments back. Idempotent. The memory must not be used afterwards."""
    def abandon(self) -> None:
        """Never give them back: a device that hangs may still write there. Idempotent, as ``release`` is."""
    def __buffer__(self, flags: int, /) -> memoryview: ...

@final
class DeviceEvent:
    """A point in a device's stream. Any thread."""

    @property
    def device(self) -> int: ...
    def hold(self, stream: int) -> None:
        """Have ``stream`` of the same device wait for it; returns immediately. RuntimeError in the driver's words."""
    def wait(self, timeout: float) -> bool:
        """Wait until the device has nothing to do any more with what came before; False on timeout.

        RuntimeError in the driver's words, then: for a fault alone does not say that nothing is under way.
        """

@final
class SaveFile:
    """One file to write: a stream of ``table_offset`` bytes given by ``content``, then the checksum table.

    Bytes of the stream that no region covers are zeros. The table is
    ``ceil(table_offset / BLOCK_BYTES)`` little-endian 32-bit CRC32C values, one per block of the
    stream (the last block may be short), then the CRC32C of those words themselves. The file is
    ``table_offset + 4 * (blocks + 1)`` bytes long. ``table_offset`` is a multiple of 4. With None as the path, the
    stream is read and summed, and not written: :meth:`SaveJob.checksums` has its checksums.
    """

    def __init__(self, path: str | None, table_offset: int, content: Transfer) -> None: ...
    @property
    def nbytes(self) -> int:
        """Size of the file, table included."""

@final
class SaveJob:
    """The write of one rank's files. Native threads do the work; this is the handle.

    The sources must stay alive and unchanged until ``wait_read(-1)`` has returned True. Dropping
    the handle before that cancels the job and waits (without the GIL) for copies under way, so the
    sources are never read after the handle (which holds ``keepalive``) is gone; nor after the garbage
    collector has taken both in one cycle.
    """

    def wait_read(self, group: int, timeout: float) -> bool:
        """Wait until all regions of ``group`` (-1: of every group) are read or the job has failed.

        Returns False when ``timeout`` seconds passed first. Never waits on storage except for back-pressure.
        """
    def wait_queued(self, group: int, timeout: float) -> bool:
        """Wait until the regions of ``group`` are read or, on devices, will be before :meth:`events`; or the job
        has failed and reads nothing any more. False on timeout."""
    def events(self, group: int) -> list[DeviceEvent]:
        """After ``wait_queued``: what comes after the copies of ``group``, one per device that has some."""
    def wait(self, timeout: float) -> bool:
        """Wait until every file and directory is on stable storage, or the job has failed; False on timeout.

        A failed job counts once no thread touches its files any more, so that they may be removed.
        """
    def stream(self, file: int) -> Iterator[Segment]:
        """Of ``Engine.save_streamed``: the bytes of a file, its checksum table included, in their order.

        Its next item waits, without the GIL, until the engine has read and summed it. All but the last have
        ``SEGMENT_BYTES``. Any thread; one stream per file. The stream does not keep the job. It raises
        RuntimeError, in the words of the fault, when the job has failed; ValueError for a file that the job
        has not, and for other jobs.
        """
    def stored(self, file: int) -> None:
        """Of ``Engine.save_streamed``: the caller has made the file durable. Any thread.

        When all files are stored, the job is done. Does nothing if it has failed. Raises ValueError for a file
        whose stream was not taken to its end, or that was stored before.
        """
    def fail(self, message: str, errno: int, path: str) -> None:
        """Fail the job with an ``io`` fault if it is not finished: the caller could not send a file.

        Returns immediately. Everything that waits for the job returns, streams raise. Segments that were taken stay
        valid, and keep their memory until they are dropped; nothing waits for them.
        """
    def cancel(self) -> None:
        """Fail the job with a ``cancelled`` fault if it is not finished. Returns immediately."""
    def checksums(self, file: int) -> bytes:
        """The CRC32C of each block of a file's stream, as in its table. ValueError unless the job has succeeded."""
    @property
    def fault(self) -> Fault | None:
        """None while running and after success."""
    @property
    def difference(self) -> tuple[int, int, int] | None:
        """For a ``"torn"`` fault: the tensor's number, and begin and end of bytes of it that differ."""
    @property
    def bytes_read(self) -> int: ...
    @property
    def bytes_written(self) -> int:
        """Of a streamed job, the bytes of segments that were taken and dropped."""
    @property
    def direct(self) -> bool:
        """False if any file had to be written through the page cache (O_DIRECT refused)."""
    @property
    def read_seconds(self) -> float:
        """From the window's opening (or the submission, if later) to the last read; 0 until then."""
    @property
    def total_seconds(self) -> float:
        """From the window's opening (or the submission, if later) to durable; 0 until then."""
    @property
    def cache_seconds(self) -> float:
        """How long copy threads have waited for room in the host cache so far, all of them together."""

@final
class Segment:
    """A piece of a streamed file, with the buffer protocol (read-only, not copied).

    When it and all views of it are gone, its memory goes back to the host cache. Any thread that holds the GIL may
    drop it, at any time: also after the job has failed, or the engine was shut down.
    """

    @property
    def nbytes(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

@final
class ReadRequest:
    """A range of a file that the caller of ``Engine.restore_streamed`` fetches.

    It has a segment of the host cache until it is filled or dropped. Dropped before it is filled, it cancels the job.
    """

    @property
    def path(self) -> str: ...
    @property
    def offset(self) -> int: ...
    @property
    def nbytes(self) -> int:
        """At most ``SEGMENT_BYTES``."""
    def fill(self, data: Buffer) -> None:
        """Copy ``data`` into the segment, verify it, and scatter it into memory, in this thread, without the GIL.

        Copies to devices may go on after it returns. A wrong checksum fails the job. Does nothing if the job has
        failed. Raises ValueError, and may be called again, if ``data`` has not ``nbytes``; RuntimeError if it
        was filled before.
        """

@final
class RestorePlan:
    """What to read: regions of files, scattered into memory."""

    def __init__(self) -> None: ...
    def add_file(self, path: str, nbytes: int, table_offset: int, content: Transfer) -> None:
        """Regions of ``content`` use offsets in the file. ``nbytes`` is the size that the file must have."""

@final
class RestoreJob:
    """What is being read. The memory must stay alive until ``wait`` has returned True; dropping the handle cancels
    the job and waits for copies under way, as that of a :class:`SaveJob` does.
    """

    def wait(self, timeout: float) -> bool:
        """Wait until all is scattered and verified, or the job has failed; False on timeout.

        A failed job counts once no thread writes to its memory any more. A thread may still read a file.
        """
    def requests(self) -> Iterator[ReadRequest]:
        """Of ``Engine.restore_streamed``: what to fetch. Ends when the job is done or has failed.

        Each file's checksum table comes first, then whole blocks of up to a segment. The next item waits, without the
        GIL, for a segment, and for tables that others fetch. Any number of threads may share an iterator, or have their
        own. As many requests may be outstanding as restores may have segments. The iterator does not keep the job.
        """
    def fail(self, message: str, errno: int, path: str) -> None:
        """Fail the job with an ``io`` fault if it is not finished: the caller could not fetch.

        Returns immediately. Nothing waits for outstanding requests any more. They keep their memory until they are
        dropped.
        """
    def cancel(self) -> None: ...
    @property
    def fault(self) -> Fault | None: ...
    @property
    def bytes_read(self) -> int:
        """Bytes read from storage, rounding to blocks and checksum tables included."""

@final
class CacheStats:
    @property
    def total_segments(self) -> int: ...
    @property
    def free_segments(self) -> int: ...
    @property
    def slab_segments(self) -> int: ...
    @property
    def waiting(self) -> int:
        """Requests blocked for a segment or slab right now."""
    @property
    def returned_segments(self) -> int:
        """Segments given back so far: a number that grows while anything makes progress."""

@final
class Failpoints:
    """Places at which this process fails as it is told to (see ``dcp_datastates.storage.failpoints``). Any thread.

    Counts hits by name, from 1. A forked child goes on counting.
    """

    def __init__(
        self, entries: Sequence[tuple[str, int | None, str, float]], log_path: str
    ) -> None:
        """Of each entry the name, the hit that it is for (None: each), ``kill``, ``stop``, ``sleep`` or ``error``, and
        seconds to sleep or the ``errno``. The file at ``log_path`` gets a line with the name before an action.
        """
    def hit(self, name: str) -> int:
        """Do here what is asked for; returns the ``errno`` to fail with, or 0. Sleeps without the GIL, and as
        :func:`time.sleep` does: handlers of signals run meanwhile, and what they raise ends it.
        """

@final
class Engine:
    """The process's native threads and host cache.

    One per process is meant (``dcp_datastates.io.engine``); more are allowed in tests. Belongs to the
    process that made it: after ``fork`` the child's copy refuses every call with RuntimeError, and
    dropping it there frees nothing and waits for nothing.
    """

    def __init__(
        self,
        host_cache_bytes: int,
        copy_threads: int = 2,
        flush_threads: int = 4,
        restore_threads: int = 4,
        copy_rate: int = 0,
        write_rate: int = 0,
        io_priority: str = "normal",
        failpoints: Failpoints | None = None,
        trace_path: str = "",
    ) -> None:
        """Raises ValueError for a size below ``MIN_HOST_CACHE_BYTES``, MemoryError if the arena cannot be mapped.

        Saves copy at most ``copy_rate`` bytes per second from each device (0: no limit); this excludes what is copied
        at the call. They write, or offer to be sent, at most ``write_rate`` bytes per second together (0: no limit).
        Their threads write with ``io_priority``: normal, low or idle.

        Its file operations pass ``failpoints`` and leave a trace in the file at ``trace_path``, if they are given
        (``native/src/files/watched_file_ops.h`` has the names).
        """
    def grow(self, host_cache_bytes: int) -> None:
        """Add segments until the cache holds ``host_cache_bytes`` in all; smaller sizes change nothing.

        Here as at the start, sizes are rounded down to whole segments.

        Raises MemoryError (the cache is as it was) if the memory cannot be mapped.
        """
    @property
    def host_cache_bytes(self) -> int: ...
    @property
    def max_slab_bytes(self) -> int:
        """Largest slab that an idle cache could give."""
    def stats(self) -> CacheStats: ...
    def slab(self, nbytes: int, order: int, timeout: float) -> Slab | None:
        """Contiguous cache memory for eager copies of save ``order``; waits behind older saves.

        None on timeout, and immediately when ``nbytes`` can never fit (slabs together leave at least
        two segments to the streams).
        """
    def gather(self, content: Transfer, address: int, nbytes: int) -> None:
        """Copy the regions of ``content`` into memory at ``address`` (stream offset 0), which is ``nbytes`` long.

        Returns when done; large copies use several threads. Works on any host memory.
        """
    def save(
        self,
        files: Sequence[SaveFile],
        sync_directories: Sequence[str],
        order: int,
        window: Window,
        keepalive: Any,
        fences: Sequence[DeviceEvent] = (),
        expected: ExpectedBytes | None = None,
    ) -> SaveJob:
        """Start writing ``files`` (their directories exist; the files must not) and return immediately.

        When all files are written and fdatasynced, ``sync_directories`` are fsynced in the order given;
        then the job is done. ``order`` is the save's sequence number: older saves get segments first.
        Copies by devices come after ``fences``. The job fails with a ``"torn"`` fault, before it has read the group, if
        what is copied from memory of a group other than 0 is not as ``expected``.

        Raises ValueError for a region on a device that was not opened.
        """
    def save_streamed(
        self,
        files: Sequence[SaveFile],
        order: int,
        window: Window,
        keepalive: Any,
        fences: Sequence[DeviceEvent] = (),
        expected: ExpectedBytes | None = None,
    ) -> SaveJob:
        """``save``, but the caller sends the files: ``SaveJob.stream`` has their bytes, ``SaveJob.stored`` ends them.

        The engine opens nothing; the files' paths are only names for messages. What is read stays in the cache until
        the caller has sent it. Take the files in their order, one after another or several at a time. Send a
        segment, and drop it, without waiting for more than the next one of its stream, or for anything of a newer
        save: then the smallest cache is enough. It is not read before all of the older saves is; a closed window of
        an older save holds it up. Dropping the job before it is done cancels it.
        """
    def restore(
        self, plan: RestorePlan, keepalive: Any, fences: Sequence[DeviceEvent] = ()
    ) -> RestoreJob:
        """Start reading; copies to devices come after ``fences``. Raises ValueError for a device not opened."""
    def restore_streamed(
        self, plan: RestorePlan, keepalive: Any, fences: Sequence[DeviceEvent] = ()
    ) -> RestoreJob:
        """``restore``, but the caller fetches the bytes: ``RestoreJob.requests``.

        It has checked the files' sizes. Their paths are only names.
        """
    def open_device(self, device: int) -> None:
        """Make memory of ``device`` readable and writable, and begin to pin the host cache. Idempotent.

        Raises RuntimeError in the driver's words, or saying what the driver's library lacks.
        """
    def record_event(self, device: int, stream: int) -> DeviceEvent:
        """An event after what ``stream`` (a handle of the driver's) of ``device`` has been given so far.

        Raises RuntimeError in the driver's words, ValueError for a device that was not opened.
        """
    def copy_to_host(
        self, content: Transfer, address: int, nbytes: int, device: int, stream: int
    ) -> tuple[DeviceEvent | None, Fault | None]:
        """Have ``stream`` copy the regions of ``content``, all on ``device``, to ``address`` (stream offset 0 of the
        content), which is ``nbytes`` long. Returns immediately, if the memory is the cache's.

        Returns what comes after them, and the fault of a driver that refused: then some may be under way, too, if
        there is an event.
        """
    def limit_patience(self) -> None:
        """The process is about to end: waits for a device that hangs end in time from now on."""
    @property
    def devices_prepared(self) -> bool:
        """Whether all that ``open_device`` and ``grow`` have begun in a thread is done, or has failed."""
    @property
    def pinned_bytes(self) -> int:
        """Bytes of the host cache that are pinned; grows after ``open_device`` and ``grow``, in a thread."""
    @property
    def pin_fault(self) -> Fault | None:
        """Why not all of it could be pinned. Copies to what is not are slower."""
    @property
    def node_fault(self) -> Fault | None:
        """Why pinned memory may lie far from the device: the system did not let a thread prefer a NUMA node."""
    def keep_memory(self) -> None:
        """The process is about to end: the host cache is never unpinned nor unmapped. Unpinning would wait for a
        device that hangs.
        """
    def shutdown(self, timeout: float = 10.0) -> list[str]:
        """Fail what is in flight with a ``shutdown`` fault, join all threads. Idempotent.

        Devices that hang are waited for 10 s more, file operations that do not return ``timeout`` seconds. Threads that
        are in one then stay there, with all that they use, until the process has ended. Returns, once, a path of each
        job that is not done because of that.
        """
    @property
    def alive(self) -> bool:
        """False after ``shutdown`` and in a forked child."""
