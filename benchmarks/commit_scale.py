"""How saving grows with its ranks: requests to the store, connections and seconds, reckoned to 16,384.

    python benchmarks/commit_scale.py
    python benchmarks/commit_scale.py --ranks 4 8 16 32 64 128 --json results/commit-scale-….json

Threads of one process stand in for ranks, so seconds are those of one machine that does the work of all: requests
and sockets are what to look at. See benchmarks/README.md for what the figures mean.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from rich import box
from rich.console import Console
from rich.table import Table
from torch.distributed.checkpoint.metadata import Metadata

from dcp_datastates.commit.group import CommitGroup
from dcp_datastates.commit.place import EndedPart, Place, Round
from dcp_datastates.dcp.object_planning import document
from dcp_datastates.format.metadata_table import Trace
from dcp_datastates.ranks import failure_detector
from dcp_datastates.ranks import rank_set as store_of_ranks
from dcp_datastates.ranks.connection import Client
from dcp_datastates.ranks.gloo_tree import GlooTree, places
from dcp_datastates.ranks.meetings import Meetings
from dcp_datastates.ranks.rank_set import RankSet, of_store
from dcp_datastates.storage.claims import Claim
from machine import describe

RECKONED = 16_384
REQUEST_SECONDS = 11.3e-6
"""Of the store's only thread, for one request: measured with c10d's TCPStore of torch 2.13."""

SAVES = 5
VOTES = 20
BEATING_SECONDS = 5.0
_TIMEOUT = timedelta(seconds=300)


@dataclass(frozen=True)
class Row:
    """What ``ranks`` ranks cost. Requests are of all ranks together, those of gloo's rendezvous included, those of
    heartbeats apart; a save's are those of planning and committing it.
    """

    ranks: int
    building_requests: int
    building_seconds: float
    save_requests: float
    plan_seconds: float
    save_seconds: float
    vote_seconds: float
    vote_cpu_seconds: float
    sockets_per_rank: float
    most_sockets: int
    store_connections_per_rank: float
    keys_left: int
    beat_requests_per_second: float


class _Requests:
    """Counts this package's requests while it is entered; those of heartbeats apart."""

    def __init__(self) -> None:
        self.count = 0
        self.beats = 0
        self._lock = threading.Lock()  # guards both

    def __enter__(self) -> _Requests:
        real = self._real = Client.ask
        requests = self

        def ask(client: Client, request: Callable[[Any], Any]) -> Any:
            beat = threading.current_thread().name == "dcp_datastates-heartbeat"
            with requests._lock:
                requests.beats += beat
                requests.count += not beat
            return real(client, request)

        Client.ask = ask  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        Client.ask = self._real  # type: ignore[method-assign]


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


def _compose(reports: Sequence[bytes], claim: Claim, trace: Trace) -> bytes:
    return document(claim, Metadata({}), [], {}, trace)


def _save(groups: list[CommitGroup], number: int, root: Path) -> None:
    path = root / str(number)
    path.mkdir()
    claimed = Place(path).claim(groups[0].neighbours, True)
    drawn = groups[0].draw()

    def commit(rank: int) -> None:
        round_ = Round(
            drawn,
            claimed.attempt,
            path,
            EndedPart(),
            claim=claimed if rank == 0 else None,
            timeout=300,
            compose=_compose if rank == 0 else None,
        )
        groups[rank].submit(round_)
        round_.committed.result()

    _together(len(groups), commit)


def _vote_seconds(rank_sets: list[RankSet]) -> tuple[float, float]:
    """One operation of a tree like that of the votes, up, and down again: how long, and how much of a core per rank."""
    trees = [GlooTree(each, "timed") for each in rank_sets]
    seconds, busy = [], []

    def vote(rank: int) -> None:
        trees[rank].join(_nothing)
        for _ in range(VOTES):
            began = time.monotonic()
            trees[rank].gather(b"", _nothing)
            trees[rank].broadcast(b"", _nothing)
            if rank == 0:
                seconds.append(time.monotonic() - began)
                busy.append(time.process_time())
        trees[rank].close()

    _together(len(rank_sets), vote)
    return statistics.median(seconds), (busy[-1] - busy[0]) / (VOTES - 1) / len(rank_sets)


def _nothing() -> None:
    pass


def _plan(plans: list[Meetings], number: int) -> None:
    """A meeting to plan, with messages of the length that a plan by digest has, and one answer for all."""

    def answer(messages: Sequence[bytes]) -> list[bytes]:
        return [b"answer" * 30] * len(messages)

    def plan(rank: int) -> None:
        plans[rank].meet(number, b"message" * 30, answer, _nothing)

    _together(len(plans), plan)


def measure(world: int) -> Row:
    """One set of ranks, from its first save to its sixth; then its heartbeats alone."""
    server = dist.TCPStore("127.0.0.1", 0, None, True, _TIMEOUT, False)
    before = _sockets()
    with tempfile.TemporaryDirectory() as root, _Requests() as requests:
        client = dist.TCPStore("127.0.0.1", server.port, None, False, _TIMEOUT, False)
        ranks = tuple(range(world))
        rank_sets = [of_store(rank, ranks, client) for rank in ranks]
        _together(world, lambda rank: rank_sets[rank].connect("warm").check(["up"]))
        vote_seconds, vote_cpu_seconds = _vote_seconds(rank_sets)
        groups = [CommitGroup(each) for each in rank_sets]
        detectors = [group.detector for group in groups if group.detector is not None]
        for detector in detectors:
            detector.save_started()
        plans = [Meetings(each, "plans") for each in rank_sets]
        kept, asked, began = server.num_keys(), requests.count, time.monotonic()
        _plan(plans, 1)
        _save(groups, 0, Path(root))
        building, built = requests.count, time.monotonic() - began
        planned, saved = [], []
        for number in range(1, SAVES + 1):
            began = time.monotonic()
            _plan(plans, 1 + number)
            planned.append(time.monotonic() - began)
            began = time.monotonic()
            _save(groups, number, Path(root))
            saved.append(time.monotonic() - began)
        after = requests.count
        beats, began = requests.beats, time.monotonic()
        time.sleep(BEATING_SECONDS)
        row = Row(
            ranks=world,
            building_requests=building - asked,
            building_seconds=round(built, 3),
            save_requests=round((after - building) / SAVES, 1),
            plan_seconds=round(statistics.median(planned), 4),
            save_seconds=round(statistics.median(saved), 4),
            vote_seconds=round(vote_seconds, 5),
            vote_cpu_seconds=round(vote_cpu_seconds, 6),
            sockets_per_rank=round((_sockets() - before) / world, 1),
            most_sockets=_most_sockets(world),
            store_connections_per_rank=round((_connections(server.port) - 1) / world, 1),
            keys_left=server.num_keys() - kept,
            beat_requests_per_second=round(
                (requests.beats - beats) / (time.monotonic() - began), 1
            ),
        )
        for detector in detectors:
            detector.save_ended()
        _together(world, lambda rank: groups[rank].close())
    return row


def _memberships(world: int) -> int:
    """In how many groups of the tree the ranks are, all together."""
    return sum(len(list(places(rank, world))) for rank in range(world))


def _most_sockets(world: int) -> int:
    """Of the tree, on the rank with the most: connections, and one to be connected to for each group."""
    return max(sum(place.size for place in places(rank, world)) for rank in range(world))


def reckon(rows: list[Row]) -> dict[str, float]:
    """Each figure at :data:`RECKONED` ranks.

    By the tree's real shape: requests for building go with the memberships in groups, sockets are counted, and a vote
    passes up and down through as many groups as the tree has levels; each takes what one of 8 ranks took (of more
    threads, two cores spend the time on taking turns). Where each rank has a core, a vote takes what one rank of 8 is
    busy with, once on each level, and the network. A save's requests go with the ranks that plan; those for beats go
    with the ranks and with how often these beat.
    """
    last = rows[-1]
    flat = max((row for row in rows if row.ranks <= 8), key=lambda row: row.ranks)
    levels = len(list(places(0, RECKONED)))
    return {
        "building_requests": last.building_requests
        * (_memberships(RECKONED) / _memberships(last.ranks)),
        "save_requests": last.save_requests * (RECKONED / last.ranks),
        "vote_seconds": flat.vote_seconds * levels,
        "vote_cpu_seconds": flat.vote_cpu_seconds * levels,
        "most_sockets": _most_sockets(RECKONED),
        "beat_requests_per_second": last.beat_requests_per_second
        * (RECKONED / last.ranks)
        * (
            failure_detector.seconds_between_beats(last.ranks)
            / failure_detector.seconds_between_beats(RECKONED)
        ),
    }


def _table(rows: list[Row], reckoned: dict[str, float]) -> Table:
    table = Table(box=box.SIMPLE)
    table.add_column("")
    for row in rows:
        table.add_column(f"{row.ranks}", justify="right")
    table.add_column(f"{RECKONED:,}, reckoned", justify="right")
    for name in list(asdict(rows[0]))[1:]:
        cells = [f"{getattr(row, name):,}" for row in rows]
        last = f"{reckoned[name]:,.5g}" if name in reckoned else ""
        table.add_row(name.replace("_", " "), *cells, last)
    saving, beating = reckoned["save_requests"], reckoned["beat_requests_per_second"]
    built = reckoned["building_requests"] * REQUEST_SECONDS
    table.caption = (
        f"at {RECKONED:,} ranks, of the store's thread: building {built:,.1f} s, "
        f"a save a second {saving * REQUEST_SECONDS:.2%}, beats {beating * REQUEST_SECONDS:.0%}"
    )
    return table


def main() -> int:
    # The store's server looks up the name of each client. Where names are not served, that takes 5 s now and then.
    store_of_ranks._ANSWER_SECONDS = 300.0
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
