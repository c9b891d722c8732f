"""What saving takes from a transformer that keeps a GPU busy: no saves, stock ``async_save``, and this package.

    python benchmarks/gpu_training.py --dir /mnt/nvme --json results.json --png results.png

See benchmarks/README.md for what the figures mean. ``--smoke`` runs a tiny model on the host: a check of this script.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import sys
import tempfile
import time
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

import dcp_datastates
from apart import measured_apart
from dcp_datastates import DataStatesWriter
from dcp_datastates.io.engine import engine
from disk import raw_write_rate
from gpu_contenders import Contender, Ours, Stock, StockPinned
from gpu_copies import BareCopy, prepare
from gpu_job import SMOKE, Job, Shape
from gpu_output import drawable, gpu, print_table, write_json
from machine import describe

_NAMES = (Contender.name, Ours.name, StockPinned.name, Stock.name)
_GRACE_SECONDS = 60.0
"""A process that saves for longer than it should may end the save that it is in."""


@dataclass
class Stretch:
    """Iterations with a save in one of every ``every``. Seconds; an entry per save."""

    every: int
    iterations: list[float] = field(default_factory=list)
    """Mean from one save to the next, which begins when this one is committed."""
    calls: list[float] = field(default_factory=list)
    """In ``async_save``."""
    steps: list[float] = field(default_factory=list)
    """Of the host before and in the first ``optimizer.step()`` after it."""
    waits: list[float] = field(default_factory=list)
    """Until it was committed, after the iterations."""
    commits: list[float] = field(default_factory=list)
    """From the call."""


@dataclass
class Outcome:
    """Of one process with one contender."""

    device: dict[str, Any]
    state_bytes: int
    seconds: float = 0.0
    stretches: list[Stretch] = field(default_factory=list)
    peak_memory: int = 0
    losses: list[float] = field(default_factory=list)
    eager_bytes: int | None = None
    """Copied at the call, in the last save by ours."""
    read_rates: list[float] = field(default_factory=list)
    """Bytes per second from the call to ``captured``: ours, on an idle GPU."""
    bare_rates: list[float] = field(default_factory=list)
    """The same of one pinned ``copy_`` of as many bytes, between those."""

    @staticmethod
    def of(document: dict[str, Any]) -> Outcome:
        stretches = [Stretch(**each) for each in document["stretches"]]
        return Outcome(**{**document, "stretches": stretches})


# ---- in a process of its own -------------------------------------------------------------------------


class Clock:
    """Says whether there is time for something that was done before."""

    def __init__(self, seconds: float) -> None:
        self.began = time.perf_counter()
        self._end = self.began + seconds

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self.began

    def allows(self, seconds: float) -> bool:
        return time.perf_counter() + seconds < self._end


def measure(name: str, options: argparse.Namespace) -> Outcome:
    clock = Clock(options.seconds)
    shape = SMOKE if options.smoke else Shape()
    _deterministic()
    job = Job(shape)
    for _ in range(2):  # makes the optimizer's state, and warms up
        job.forward_backward()
        job.step()
    job.synchronize()
    contender = _contender(name, options)
    outcome = Outcome(gpu(), job.nbytes)
    _say(f"{name}: {clock.elapsed:.1f} s to start, {job.nbytes / (1 << 30):.2f} GiB")
    if isinstance(contender, Ours):
        prepare(engine(options.cache), shape.device)
    first = Stretch(1)
    save_and_iterate(contender, job, options.dir / "warm-up", first)
    _say(f"{name}: first save, to warm up, {first.iterations[0]:.1f} s")
    slowest = 0.0  # the first stretch has one save in any case
    for every in options.every:
        found = stretch(contender, job, every, options, clock, slowest)
        slowest = first.iterations[0]
        outcome.stretches.append(found)
        _say(f"{name}: every {every}, ms per iteration: {_list(found.iterations, 1e3)}")
    outcome.peak_memory = _peak_memory()
    outcome.losses = [float(loss) for loss in job.losses]
    if isinstance(contender, Ours):
        last = contender.writer.last_save
        outcome.eager_bytes = None if last is None else last.eager_bytes
        read_while_idle(job, options, clock, outcome)
        _say(f"{name}: D2H GB/s: {_list(outcome.read_rates, 1e-9)}")
    contender.close()
    outcome.seconds = clock.elapsed
    return outcome


def _contender(name: str, options: argparse.Namespace) -> Contender:
    if name == Stock.name:
        return Stock()
    if name == StockPinned.name:
        return StockPinned(on_gpu=not options.smoke)
    return Ours(options.cache) if name == Ours.name else Contender()


def _deterministic() -> None:
    """So that the losses tell whether saving changes what is learnt."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # it would fill every empty tensor


def stretch(
    contender: Contender,
    job: Job,
    every: int,
    options: argparse.Namespace,
    clock: Clock,
    slowest: float,
) -> Stretch:
    """As many saves as ``options`` says, or as there is time for; one may take ``slowest`` seconds."""
    found = Stretch(every)
    for number in range(options.saves):
        if not clock.allows(slowest):
            _say(f"{contender.name}: no time for more than {number} saves")
            break
        began = time.perf_counter()
        save_and_iterate(contender, job, options.dir / f"{every}-{number}", found)
        slowest = max(slowest, time.perf_counter() - began)
    return found


def save_and_iterate(contender: Contender, job: Job, path: Path, found: Stretch) -> None:
    """A save, and the iterations until the next: as in jobs that wait for the one before. Removes what was saved."""
    state = job.state()
    job.synchronize()
    began = time.perf_counter()
    future = contender.save(state, path)
    found.calls.append(time.perf_counter() - began)
    del state
    ended: Future[float] = Future()
    if future is not None:
        future.add_done_callback(lambda _: ended.set_result(time.perf_counter() - began))
    for number in range(found.every):
        job.forward_backward()
        at = time.perf_counter()
        if number == 0:
            contender.before_step()
        job.step()
        if number == 0:
            found.steps.append(time.perf_counter() - at)
    if future is not None:
        at = time.perf_counter()
        future.result()
        found.waits.append(time.perf_counter() - at)
        found.commits.append(ended.result())
    job.synchronize()
    found.iterations.append((time.perf_counter() - began) / found.every)
    shutil.rmtree(path, ignore_errors=True)


def read_while_idle(job: Job, options: argparse.Namespace, clock: Clock, outcome: Outcome) -> None:
    """How fast the whole state is read when nothing else is under way, in turns with a bare copy."""
    if options.cache <= job.nbytes:
        _say("D2H is not measured: the host cache does not hold the state")
        return
    state = job.state()
    writer = DataStatesWriter(host_cache_size=options.cache, read_window="immediate")
    if job.shape.device == "cuda":
        torch.cuda.empty_cache()
    bare = BareCopy(job.nbytes, job.shape.device)
    slowest = 0.0
    for number in range(options.reads):
        if not clock.allows(slowest):
            _say(f"no time for more than {number} reads")
            break
        outcome.bare_rates.append(job.nbytes / bare.seconds())
        job.synchronize()
        path = options.dir / f"read-{number}"
        began = time.perf_counter()
        response = dcp_datastates.async_save(state, path, writer=writer)
        writer.captured.result()
        outcome.read_rates.append(job.nbytes / (time.perf_counter() - began))
        response.upload_completion.result()
        shutil.rmtree(path)
        slowest = max(slowest, time.perf_counter() - began)
    writer.close()


def _peak_memory() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _say(line: str) -> None:
    print(line, flush=True)


def _list(values: list[float], unit: float) -> str:
    return ", ".join(f"{unit * value:.1f}" for value in values)


# ---- all of them -------------------------------------------------------------------------------------


def take_turns(
    options: argparse.Namespace, directory: Path
) -> tuple[dict[str, list[Outcome]], int]:
    """Every contender in a process of its own, one after another, and again while there is time.

    Also returns how many processes failed.
    """
    clock = Clock(60 * options.minutes)
    results: dict[str, list[Outcome]] = {}
    failed = 0
    for round_ in range(options.repeats):
        for position, name in enumerate(_NAMES):
            left = 60 * options.minutes - clock.elapsed
            if round_ == 0:
                share = left / (len(_NAMES) - position)
            elif name in results and clock.allows(results[name][0].seconds * 1.1):
                share = left
            else:
                continue
            _say(f"--- {clock.elapsed:.0f} s: {name}, round {round_ + 1}")
            arguments = [*sys.argv[1:], "--dir", str(directory), "--contender", name]
            arguments += ["--seconds", f"{share:.0f}"]
            document = measured_apart(__file__, arguments, share + _GRACE_SECONDS)
            if document is None:
                failed += 1
            else:
                results.setdefault(name, []).append(Outcome.of(document))
            for left_over in directory.iterdir():
                shutil.rmtree(left_over, ignore_errors=True)
    return results, failed


def disk_rate(directory: Path, nbytes: int) -> dict[str, float]:
    try:
        return {"raw disk": raw_write_rate(directory, nbytes)}
    except OSError as error:
        _say(f"the file system refuses O_DIRECT ({error}): its rate is that of buffered writes")
        rate = raw_write_rate(directory, nbytes, direct=False)
        return {"raw disk, through the page cache": rate}


def show(results: dict[str, list[Outcome]], rates: dict[str, float]) -> None:
    outcomes = [each for found in results.values() for each in found]
    _say(
        f"\n{outcomes[0].device['device']}, state {outcomes[0].state_bytes / (1 << 30):.2f} GiB; "
        + ", ".join(f"{name} {rate / 1e9:.2f} GB/s" for name, rate in rates.items())
    )
    header = ("", "saves", "iteration", "of none", "async_save", "step", "wait", "commit")
    for every in (each.every for each in outcomes[0].stretches):
        rows = []
        none = _pooled(results, Contender.name, every).iterations
        for name in results:
            found = _pooled(results, name, every)
            if not found.iterations:
                continue
            iteration = median(found.iterations)
            rows.append(
                (
                    name,
                    f"{len(found.commits)}",
                    f"{1e3 * iteration:.1f} ms",
                    f"{iteration / median(none):.3f}" if none else "",
                    _milliseconds(found.calls),
                    _milliseconds(found.steps),
                    _milliseconds(found.waits),
                    _milliseconds(found.commits),
                )
            )
        print_table(f"a save every {every} iteration(s), medians", header, rows)
    rows = [
        (
            name,
            f"{len(found)}",
            f"{median(each.peak_memory for each in found) / (1 << 30):.1f} GiB",
            _rate([rate for each in found for rate in each.read_rates]),
            _rate([rate for each in found for rate in each.bare_rates]),
        )
        for name, found in results.items()
    ]
    print_table("processes, medians", ("", "processes", "peak host", "D2H", "bare copy"), rows)
    shortest = min(len(each.losses) for each in outcomes)
    apart = max(
        (abs(each.losses[i] - outcomes[0].losses[i]) for each in outcomes for i in range(shortest)),
        default=0.0,
    )
    _say(f"losses of all processes, largest difference from the first: {apart:.3g}")


def _pooled(results: dict[str, list[Outcome]], name: str, every: int) -> Stretch:
    pooled = Stretch(every)
    for outcome in results.get(name, []):
        for found in outcome.stretches:
            if found.every == every:
                pooled.iterations += found.iterations
                pooled.calls += found.calls if found.commits else []
                pooled.steps += found.steps
                pooled.waits += found.waits
                pooled.commits += found.commits
    return pooled


def _milliseconds(values: list[float]) -> str:
    return f"{1e3 * median(values):.2f} ms" if values else ""


def _rate(values: list[float]) -> str:
    return f"{median(values) / 1e9:.2f} GB/s" if values else ""


def draw(results: dict[str, list[Outcome]], cadences: list[int], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(cadences), figsize=(6 * len(cadences), 4), squeeze=False)
    for axis, every in zip(axes[0], cadences, strict=True):
        found = {name: _pooled(results, name, every).iterations for name in results}
        heights = {name: 1e3 * median(values) for name, values in found.items() if values}
        axis.barh(list(heights), list(heights.values()))
        axis.set_xlabel("ms per iteration")
        axis.set_title(f"a save every {every} iteration(s)")
        axis.invert_yaxis()
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--dir", type=Path, help="where the checkpoints go; 32 GiB")
    arguments.add_argument("--every", type=int, nargs="+", default=[1, 10])
    arguments.add_argument("--saves", type=int, default=2, help="of a stretch")
    arguments.add_argument("--reads", type=int, default=3, help="on an idle GPU")
    arguments.add_argument(
        "--repeats", type=int, default=3, help="processes of each, if time allows"
    )
    arguments.add_argument("--minutes", type=float, default=5.5, help="for all, about")
    arguments.add_argument("--cache-gib", type=float, default=14)
    arguments.add_argument("--json", type=Path)
    arguments.add_argument("--png", type=Path)
    arguments.add_argument("--smoke", action="store_true")
    for hidden in ("--contender", "--into", "--seconds"):
        arguments.add_argument(hidden, help=argparse.SUPPRESS)
    options = arguments.parse_args()
    options.cache = int((0.125 if options.smoke else options.cache_gib) * (1 << 30))
    if options.contender is not None:
        options.seconds = float(options.seconds)
        outcome = measure(options.contender, options)
        Path(options.into).write_text(json.dumps(asdict(outcome)))
        return 0
    if not options.smoke and not torch.cuda.is_available():
        arguments.error("there is no GPU; --smoke runs a tiny model on the host")
    options.png = drawable(options.png)
    directory = Path(tempfile.mkdtemp(prefix="gpu-training-", dir=options.dir))
    try:
        machine = describe(directory)
        rates = disk_rate(directory, (64 << 20) if options.smoke else (4 << 30))
        results, failed = take_turns(options, directory)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    if not results:
        return 1
    show(results, rates)
    if options.json is not None:
        document = {
            **machine,
            **next(iter(results.values()))[0].device,
            "benchmark": "gpu_training",
            "shape": asdict(SMOKE if options.smoke else Shape()),
            "host_cache_bytes": options.cache,
            "rates": rates,
            "outcomes": {name: list(map(asdict, found)) for name, found in results.items()},
        }
        write_json(options.json, document)
    if options.png is not None:
        draw(results, options.every, options.png)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
