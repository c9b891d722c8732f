"""The page of text: what the steps found, in relation to the bare hardware and to stock."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gpu_output import table

__all__ = ["page"]

_NOTHING = "-"
_LAUNCHES = (
    *("baseline", "bare_pinning", "pinning", "bare_copying", "copying", "writing"),
    *("small_copies", "small_copies_saving", "deep", "deep_copying"),
)
_OURS = ("ours_default", "ours", "ours_immediate", "ours_disk")
_CONTENDERS = ("none", *_OURS, "stock_pinned", "none_again")
_SMALL = ("small_batched", "small_one_by_one")
_WIDTH = 110
_MOST_ERRORS = 6


class Found:
    """What a step found, by a path of names; None for all that is not there, or failed."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self._steps = {step["name"]: step["found"] for step in document["steps"]}

    def __call__(self, *path: str) -> Any:
        value: Any = self._steps
        for name in path:
            if not isinstance(value, Mapping) or name not in value:
                return None
            value = value[name]
        return None if isinstance(value, Mapping) and "error" in value else value


def page(document: Mapping[str, Any]) -> str:
    """At most 80 lines. ``document`` is the runner's, as far as it got."""
    found = Found(document)
    names = {step["name"] for step in document["steps"]}
    parts = [_head(document, found), _steps(document)]
    parts += [make(found) for make, steps in _SECTIONS if names & set(steps)]
    return "\n\n".join("\n".join(line[:_WIDTH] for line in part) for part in parts) + "\n"


def _head(document: Mapping[str, Any], found: Found) -> list[str]:
    device = found("facts", "torch", "device") or "no GPU"
    lines = [
        f"The first half hour on a GPU: {device}, {document['date']}",
        (
            f"torch {document['torch']}, CUDA {_text(found('facts', 'torch', 'cuda'))}, driver "
            f"{_text(found('facts', 'nvidia_smi', 'driver_version'))} for CUDA "
            f"{_text(found('facts', 'torch', 'driver'))}"
        ),
    ]
    if document["smoke"]:
        lines.insert(
            0, "SMOKE, ON THE HOST, AT A TINY SIZE: no figure below says anything of a GPU"
        )
    return lines


def _steps(document: Mapping[str, Any]) -> list[str]:
    rows = []
    for step in document["steps"]:
        outcome = "passed" if step["exit_code"] == 0 else f"FAILED ({step['exit_code']})"
        outcome = "KILLED at its limit" if step["killed"] else outcome
        rows.append((step["name"], outcome, f"{step['seconds']:.0f} s", f"{step['limit']:.0f} s"))
    errors = [
        f"  {step['name']}, {part}: {found['error']}"
        for step in document["steps"]
        for part, found in step["found"].items()
        if isinstance(found, Mapping) and "error" in found
    ]
    return [*table(("step", "", "took", "limit"), rows), *errors[:_MOST_ERRORS]]


def _machine(found: Found) -> list[str]:
    memory = found("facts", "memory") or {}
    smi = found("facts", "nvidia_smi") or {}
    huge = memory.get("huge_pages") or {}

    def link(what: str) -> str:
        now, most = (smi.get(f"pcie.link.{what}.{when}") for when in ("current", "max"))
        return f"{_text(now)} of {_text(most)}"

    cpus = f"{_text(found('facts', 'machine', 'cpu'))}, {_text(memory.get('cpus'))} CPUs"
    nodes = (
        f"{_text(memory.get('numa_nodes'))}, the GPU's {_text(found('facts', 'pci', 'numa_node'))}"
    )
    limit = f"{_gib(memory.get('limit_bytes'))} ({_text(memory.get('limit_source'))})"
    kind = _text(found("facts", "machine", "file_system"))
    return [
        f"{cpus}; NUMA nodes {nodes}",
        f"memory {limit}, ulimit -l {_text(memory.get('locked_limit'))}",
        f"huge pages {_text(huge.get('enabled'))}, defrag {_text(huge.get('defrag'))}",
        f"PCIe gen {link('gen')}, width {link('width')}; checkpoints on {kind}",
    ]


def _copies(found: Found) -> list[str]:
    columns = {
        "pinned 1 GiB": "pinned_one",
        "8 MiB each": "pinned_pieces",
        "64 KiB each": "pinned_small",
        "pageable 1 GiB": "pageable_one",
        "8 MiB each ": "pageable_pieces",
    }
    rows = [
        (f"{way}, GB/s", *(_rate(found("copies", f"{way}_{name}")) for name in columns.values()))
        for way in ("d2h", "h2d")
    ]
    pinning = found("copies", "pin_seconds_per_gib")
    return [
        *table(("bare copies", *columns), rows),
        f"torch pins {_number(None if pinning is None else 1 / pinning, '.2f')} GiB/s",
    ]


def _tests(found: Found) -> list[str]:
    tests = found("tests", "tests") or {}
    counts: dict[str, int] = {}
    for outcome, _ in tests.values():
        counts[outcome] = counts.get(outcome, 0) + 1
    said = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
    bad = [name for name, (outcome, _) in tests.items() if outcome in ("failed", "error")]
    return [
        f"GPU tests: {said or 'none was over'}",
        *(f"  failed: {name}" for name in bad[:_MOST_ERRORS]),
        *(f"  skipped: {why}" for why in (found("tests", "skipped") or [])[:_MOST_ERRORS]),
    ]


def _launches(found: Found) -> list[str]:
    baseline = found("launches", "baseline", "p99")
    rows = []
    for name in _LAUNCHES:
        one = found("launches", name) or {}
        blocked = one.get("first_blocked")
        rows.append(
            (
                name.replace("_", " "),
                *(_number(one.get(key), ".1f") for key in ("p50", "p99", "max")),
                _ratio(one.get("p99"), baseline),
                _text(one.get("count")),
                _number(one.get("seconds"), ".2f"),
                "" if blocked is None else f"blocked from launch {blocked}",
            )
        )
    header = ("launches, µs, during", "p50", "p99", "max", "p99 of baseline", "count", "s", "")
    return table(header, rows)


def _cold(found: Found) -> list[str]:
    rows = []
    for step in ("cold_large", "cold_small", "cold_stock"):
        for turn in ("first", "second"):
            one = found(step, turn) or {}
            stock = found("cold_stock", turn, "stall_seconds")
            stages = ("captured", "committed", "pinned")
            rows.append(
                (
                    f"{step.removeprefix('cold_')}, {turn}",
                    _milliseconds(one.get("call_seconds")),
                    *(_milliseconds(one.get(f"{stage}_seconds")) for stage in stages),
                    _milliseconds(one.get("stall_seconds")),
                    _ratio(one.get("stall_seconds"), stock),
                    _milliseconds(one.get("longest_iteration_seconds")),
                )
            )
    plain = _milliseconds(found("cold_large", "plain_iteration_seconds"))
    state = _gib(found("cold_large", "state_bytes"))
    return [
        f"cold saves of {state}; cache larger and smaller than it; an iteration is {plain} ms",
        *table(
            (
                *("ms", "call", "captured", "committed", "pinned"),
                *("stall", "of stock's", "longest iteration"),
            ),
            rows,
        ),
    ]


def _training(found: Found) -> list[str]:
    none = found("training", "none", "window_seconds")
    stock = _cost(found("training", "stock_pinned", "window_seconds"), none)
    nbytes = found("training", "state_bytes")
    rows = []
    for name in _CONTENDERS:
        one = found("training", name) or {}
        window = one.get("window_seconds")
        cost = _cost(window, none)
        rows.append(
            (
                name.replace("_", ", "),
                _milliseconds(window),
                _ratio(window, none),
                _milliseconds(cost),
                _ratio(cost, stock),
                *(
                    _milliseconds(_median(one.get(f"{key}_seconds")))
                    for key in ("call", "first_step", "commit")
                ),
                _of(nbytes, one.get("load_seconds"), found("copies", "h2d_pinned_one")),
            )
        )
    header = (
        *("ms, ten iterations", "all", "of none", "a save costs", "of stock's"),
        *("call", "first step", "commit", "load, of bare H2D"),
    )
    captured = found("training", "ours", "captured_seconds")
    return [
        f"training with a save of {_gib(nbytes)} in the first of ten iterations, the commit not counted",
        *table(header, rows),
        "read on an idle GPU: "
        + _of(nbytes, captured, found("copies", "d2h_pinned_one"))
        + " of bare D2H",
    ]


def _rest(found: Found) -> list[str]:
    """Of the steps that were run."""
    lines = []
    if found("fsdp") is not None:
        equal = [found("fsdp", f"round_{index}", "equal") for index in range(3)].count(True)
        lines.append(f"FSDP2 with {_text(found('fsdp', 'backend'))}: {equal} of 3 loads equal")
        offload = found("fsdp", "cpu_offload") or {}
        said = offload.get("left_out") or f"equal: {_yes(offload.get('equal'))}"
        lines.append(f"FSDP2, CPU offload: {said}")
    for name in _SMALL:
        if found(name) is not None:
            took = _number(found(name, "captured", "p50"), ".0f")
            lines.append(f"{name.replace('_', ', ', 1).replace('_', ' ')}: read in {took} µs")
    lines += [
        f"{name}: {found(name, 'rounds_equal') or 0} of 4 loads equal"
        for name in ("expandable_segments", "malloc_async")
        if found(name) is not None
    ]
    for name in ("nothing", "save") if found("dying") is not None else ():
        one = found("dying", name) or {}
        seconds = one.get("seconds")
        killed = one.get("killed_after")
        took = (
            f"did not end in {killed} s" if killed else f"ended {_number(seconds, '.2f')} s later"
        )
        lines.append(
            f"a device assert, {name} in flight: {took}, exit code {_text(one.get('exit_code'))}"
        )
    return lines


_SECTIONS: tuple[tuple[Callable[[Found], list[str]], tuple[str, ...]], ...] = (
    (_machine, ("facts",)),
    (_copies, ("copies",)),
    (_tests, ("tests",)),
    (_launches, ("launches",)),
    (_cold, ("cold_large", "cold_small", "cold_stock")),
    (_training, ("training",)),
    (_rest, ("fsdp", "expandable_segments", "malloc_async", *_SMALL, "dying")),
)
"""And the steps that each is about."""


def _cost(seconds: float | None, none: float | None) -> float | None:
    return None if seconds is None or none is None else seconds - none


def _of(nbytes: int | None, seconds: float | None, bare: float | None) -> str:
    """A rate in GB/s, and its part of the bare one."""
    if not nbytes or not seconds:
        return _NOTHING
    return f"{_rate(nbytes / seconds)} GB/s, {_ratio(nbytes / seconds, bare)}"


def _ratio(value: float | None, of: float | None) -> str:
    """Nothing where ``of`` is lost in the noise."""
    return f"{value / of:.2f}" if value is not None and of is not None and of > 0 else _NOTHING


def _number(value: float | None, how: str) -> str:
    return _NOTHING if value is None else format(value, how)


def _milliseconds(seconds: float | None) -> str:
    return _number(None if seconds is None else 1e3 * seconds, ".1f")


def _rate(bytes_per_second: Any) -> str:
    """GB/s; what was left out is no number."""
    if not isinstance(bytes_per_second, (int, float)):
        return _NOTHING
    return f"{bytes_per_second / 1e9:.1f}"


def _gib(nbytes: int | None) -> str:
    return f"{_number(None if nbytes is None else nbytes / (1 << 30), '.2f')} GiB"


def _median(values: list[float] | None) -> float | None:
    return sorted(values)[len(values) // 2] if values else None


def _text(value: object) -> str:
    return _NOTHING if value is None else str(value)


def _yes(value: bool | None) -> str:
    return {True: "yes", False: "NO"}.get(value, _NOTHING)  # type: ignore[arg-type]
