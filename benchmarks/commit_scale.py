"""How the commit group grows with its ranks: requests to the store, bytes, sockets and seconds, reckoned to 16,384.

    python benchmarks/commit_scale.py
    python benchmarks/commit_scale.py --ranks 4 8 16 32 64 --json results/commit-scale-….json

Threads of one process stand in for ranks, so seconds are those of one machine that does the work of all: requests,
bytes and sockets are what to look at. See benchmarks/README.md for what the figures mean.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from rich import box
from rich.console import Console
from rich.table import Table
from torch.distributed.checkpoint.metadata import Metadata

from curves import exponent
from dcp_datastates.commit.group import CommitGroup
from dcp_datastates.commit.peers import Connection, Peers
from dcp_datastates.commit.round import Consolidated, Round
from dcp_datastates.storage.claims import claim
from machine import describe

RECKONED = 16_384
REQUEST_SECONDS = 11.3e-6
"""Of the store's only thread, for one request: measured with c10d's TCPStore of torch 2.13."""

SAVES = 5
BEATING_SECONDS = 5.0
_TIMEOUT = timedelta(seconds=300)


@dataclass(frozen=True)
class Row:
    """What ``ranks`` ranks cost. Requests and bytes are of all ranks together; sockets of one."""

    ranks: int
    gloo_requests: int
    gloo_bytes: int
    building_requests: int
    building_seconds: float
    sockets_per_rank: float
    store_connections_per_rank: float
    save_requests: float
    save_seconds: float
    beat_requests_per_second: float


class _Counting(dist.Store):
    """A store in memory that counts what making one gloo group asks of it."""

    def __init__(self) -> None:
        super().__init__()
        self.requests = 0
        self.nbytes = 0
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: Any) -> None:
        with self._changed:
            self._values[key] = value.encode() if isinstance(value, str) else bytes(value)
            self._count(self._values[key])
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        with self._changed:
            self._changed.wait_for(lambda: key in self._values, _TIMEOUT.total_seconds())
            self._count(self._values[key])
            return self._values[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        with self._changed:
            self._changed.wait_for(
                lambda: all(key in self._values for key in keys), _TIMEOUT.total_seconds()
            )
            self._count(b"")

    def check(self, keys: list[str]) -> bool:
        with self._changed:
            self._count(b"")
            return all(key in self._values for key in keys)

    def _count(self, value: bytes) -> None:
        self.requests += 1
        self.nbytes += len(value)


class _Durable:
    """A part that is on storage already."""

    error = None
    progress = 0

    def wait(self, seconds: float) -> bool:
        return True

    def cancel(self) -> None:
        pass


class _Requests:
    """Counts the requests of this package's own connections, while it is entered."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> _Requests:
        real = self._real = Connection._ask
        requests = self

        def ask(connection: Connection, request: Callable[[Any], Any]) -> Any:
            requests.count += 1  # a few may be missed between threads
            return real(connection, request)

        Connection._ask = ask  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        Connection._ask = self._real  # type: ignore[method-assign]


def _together(world: int, work: Callable[[int], Any]) -> list[Any]:
    results: list[Any] = [None] * world
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def _gloo(world: int) -> _Counting:
    store = _Counting()
    groups = _together(world, lambda rank: dist.ProcessGroupGloo(store, rank, world, _TIMEOUT))
    del groups
    return store


def _sockets() -> int:
    links = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
    return sum(os.path.islink(link) and os.readlink(link).startswith("socket:") for link in links)


def _connections(port: int) -> int:
    """Established connections to the store's server."""
    there = Counter(
        fields[2].rpartition(":")[2]
        for name in ("tcp", "tcp6")
        for fields in map(str.split, Path(f"/proc/self/net/{name}").read_text().splitlines()[1:])
        if fields[3] == "01"
    )
    return there[f"{port:04X}"]


def _save(groups: list[CommitGroup], number: int, root: Path) -> None:
    path = root / str(number)
    path.mkdir()
    claimed = claim(path, groups[0].neighbours)
    drawn = groups[0].draw()

    def commit(rank: int) -> None:
        round_ = Round(
            drawn,
            claimed.attempt,
            path,
            _Durable(),
            claim=claimed if rank == 0 else None,
            first=groups[0].first,
            timeout=300,
        )
        if rank == 0:
            round_.provide(Consolidated(Metadata({}), []))
        groups[rank].submit(round_)
        round_.committed.result()

    _together(len(groups), commit)


def measure(world: int) -> Row:
    """One set of ranks, from its first save to its fifth; then its heartbeats alone."""
    gloo = _gloo(world)
    server = dist.TCPStore("127.0.0.1", 0, None, True, _TIMEOUT, False)
    before = _sockets()
    with tempfile.TemporaryDirectory() as root, _Requests() as requests:
        client = dist.TCPStore("127.0.0.1", server.port, None, False, _TIMEOUT, False)
        ranks = tuple(range(world))
        groups = [CommitGroup(Peers(rank, ranks, client)) for rank in ranks]
        hearts = [group.heart for group in groups if group.heart is not None]
        for heart in hearts:
            heart.quicken()
        began = time.monotonic()
        _save(groups, 0, Path(root))
        building, built = requests.count, time.monotonic() - began
        seconds = []
        for number in range(1, SAVES + 1):
            began = time.monotonic()
            _save(groups, number, Path(root))
            seconds.append(time.monotonic() - began)
        saved = requests.count
        time.sleep(BEATING_SECONDS)
        beaten = requests.count
        # What beats in the meantime belongs to no save.
        rate = (beaten - saved) / BEATING_SECONDS
        row = Row(
            ranks=world,
            gloo_requests=gloo.requests,
            gloo_bytes=gloo.nbytes,
            building_requests=building,
            building_seconds=round(built, 3),
            sockets_per_rank=round((_sockets() - before) / world, 1),
            store_connections_per_rank=round((_connections(server.port) - 1) / world, 1),
            save_requests=round((saved - building - rate * sum(seconds)) / SAVES, 1),
            save_seconds=round(sorted(seconds)[len(seconds) // 2], 4),
            beat_requests_per_second=round(rate, 1),
        )
        for heart in hearts:
            heart.slow()
        _together(world, lambda rank: groups[rank].close())
    return row


def reckon(rows: list[Row]) -> dict[str, float]:
    """Each figure at :data:`RECKONED` ranks: from the largest measured, with the power that all of them show."""
    reckoned = {}
    for name in [name for name in asdict(rows[0]) if not name.endswith("_seconds")][1:]:
        points = [(row.ranks, getattr(row, name)) for row in rows if getattr(row, name) > 0]
        power = exponent(points)
        if math.isfinite(power):
            ranks, value = points[-1]
            reckoned[name] = value * (RECKONED / ranks) ** power
    return reckoned


def _table(rows: list[Row], reckoned: dict[str, float]) -> Table:
    table = Table(box=box.SIMPLE)
    table.add_column("")
    for row in rows:
        table.add_column(f"{row.ranks}", justify="right")
    table.add_column(f"{RECKONED:,}, reckoned", justify="right")
    for name in list(asdict(rows[0]))[1:]:
        cells = [f"{getattr(row, name):,}" for row in rows]
        last = f"{reckoned[name]:,.0f}" if name in reckoned else ""
        table.add_row(name.replace("_", " "), *cells, last)
    requests = reckoned.get("gloo_requests", 0.0) + reckoned.get("building_requests", 0.0)
    busy = reckoned.get("beat_requests_per_second", 0.0) + reckoned.get("save_requests", 0.0)
    table.caption = (
        f"at {RECKONED:,} ranks, of the store's thread: building {requests * REQUEST_SECONDS:,.0f} s, "
        f"a save a second {busy * REQUEST_SECONDS:.0%}"
    )
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8, 16, 32, 64])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    rows = []
    for world in sorted(options.ranks):
        rows.append(measure(world))
        print(f"{world} ranks: {rows[-1]}", file=sys.stderr)
    reckoned = reckon(rows)
    Console(width=140).print(_table(rows, reckoned))
    if options.json is not None:
        with tempfile.TemporaryDirectory() as directory:
            record = describe(Path(directory))
        record["rows"] = [asdict(row) for row in rows]
        record["reckoned"] = {"ranks": RECKONED, **reckoned}
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
