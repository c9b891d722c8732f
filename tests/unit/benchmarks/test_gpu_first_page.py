"""The page of text that the first half hour on a GPU leaves."""

from __future__ import annotations

import json
from typing import Any

from gpu_first.page import page
from gpu_first.steps import STEPS

MOST_LINES = 80


def document(found: dict[str, Any], **changed: Any) -> dict[str, Any]:
    """The runner's, with all steps passed but as ``changed`` says by name."""
    passed = {"exit_code": 0, "killed": False, "seconds": 3.2, "limit": 30}
    steps = [
        {
            "name": step.name,
            **passed,
            "found": found.get(step.name, {}),
            **changed.get(step.name, {}),
        }
        for step in STEPS
    ]
    return {"date": "2026-11-22T10:00:00+00:00", "smoke": False, "torch": "2.13.0", "steps": steps}


LAUNCHES = {"count": 5000, "p50": 5.0, "p99": 20.0, "max": 90.0}
SAVE = {
    "call_seconds": 0.002,
    "captured_seconds": 0.1,
    "committed_seconds": 2.0,
    "pinned_seconds": 1,
}
WINDOW = {
    "call_seconds": [0.001] * 3,
    "first_step_seconds": [0.01] * 3,
    "commit_seconds": [2.0] * 3,
}

FOUND: dict[str, Any] = {
    "facts": {
        "torch": {"device": "NVIDIA H200", "cuda": "13.0", "driver": 13000},
        "nvidia_smi": {"driver_version": "580.1", "pcie.link.gen.current": "5"},
        "memory": {"cpus": 16, "limit_bytes": 128 << 30, "huge_pages": {"enabled": "[always]"}},
    },
    "copies": {
        "pin_seconds_per_gib": 0.25,
        "d2h_pinned_one": 50e9,
        "h2d_pinned_one": 40e9,
    },
    "tests": {
        "tests": {"test_a": ["passed", 1.0], "test_b[x]": ["failed", 2.0]},
        "skipped": ["there is one GPU only"],
    },
    "launches": {"baseline": LAUNCHES, "pinning": {**LAUNCHES, "p99": 60.0, "seconds": 4.0}},
    "cold_large": {"state_bytes": 4 << 30, "first": {**SAVE, "stall_seconds": 0.5}},
    "cold_stock": {"first": {**SAVE, "stall_seconds": 2.0}},
    "training": {
        "state_bytes": 4_000_000_000,
        "none": {**WINDOW, "window_seconds": 1.0, "commit_seconds": []},
        "ours": {
            **WINDOW,
            "window_seconds": 1.1,
            "captured_seconds": 0.1,
            "load_seconds": 0.2,
        },
        "ours_immediate": {**WINDOW, "window_seconds": 1.2},
        "stock_pinned": {**WINDOW, "window_seconds": 3.0},
    },
    "fsdp": {
        "backend": "nccl",
        "round_0": {"equal": True},
        "round_1": {"equal": True},
        "cpu_offload": {"left_out": "FSDP2 offloads from a GPU"},
    },
    "malloc_async": {"rounds_equal": 4},
    "dying": {
        "nothing": {"seconds": 0.5, "exit_code": 1},
        "save": {"killed_after": 20.0, "said": ["a stack"]},
    },
}


def line_of(text: str, beginning: str) -> list[str]:
    """The words of the only line that begins so."""
    (line,) = (line for line in text.splitlines() if line.startswith(beginning))
    return line.removeprefix(beginning).split()


def test_it_says_what_it_was_measured_on():
    text = page(document(FOUND))
    assert "NVIDIA H200, 2026-11-22T10:00:00+00:00" in text
    assert "torch 2.13.0, CUDA 13.0, driver 580.1 for CUDA 13000" in text
    assert "SMOKE" not in text


def test_figures_are_put_in_relation_to_bare_hardware_and_to_stock():
    text = page(document(FOUND))
    assert line_of(text, "pinning") == ["5.0", "60.0", "90.0", "3.00", "5000", "4.00"]
    assert line_of(text, "large, first")[4:6] == ["500.0", "0.25"], "of stock's stall"
    all_, of_none, cost, of_stock, *_ = line_of(text, "ours ")
    assert (all_, of_none, cost, of_stock) == ("1100.0", "1.10", "100.0", "0.05")
    assert "20.0 GB/s, 0.50" in text, "loads, of bare H2D"
    assert "read on an idle GPU: 40.0 GB/s, 0.80 of bare D2H" in text


def test_it_says_what_was_skipped_and_why():
    text = page(document(FOUND))
    assert "  skipped: there is one GPU only" in text
    assert "FSDP2, CPU offload: FSDP2 offloads from a GPU" in text


def test_it_says_what_failed():
    killed = {"killed": True, "exit_code": -9}
    text = page(document(FOUND, training=killed, fsdp={"exit_code": 1}))
    assert line_of(text, "training    ")[:4] == ["KILLED", "at", "its", "limit"]
    assert line_of(text, "fsdp")[:2] == ["FAILED", "(1)"]
    assert "  failed: test_b[x]" in text
    assert "FSDP2 with nccl: 2 of 3 loads equal" in text
    assert "a device assert, save in flight: did not end in 20.0 s" in text


def test_a_page_is_short_and_needs_nothing_that_was_found():
    many = {"tests": {f"test_{index}": ["failed", 1.0] for index in range(100)}}
    for found in (FOUND, {**FOUND, "tests": many}, {}):
        text = page(document(found))
        assert len(text.splitlines()) <= MOST_LINES
    errors = {name: {key: {"error": "no"} for key in value} for name, value in FOUND.items()}
    text = page(json.loads(json.dumps(document(errors))))
    assert "  facts, torch: no" in text
    assert len(text.splitlines()) <= MOST_LINES


def test_an_interrupted_run_has_a_page_of_what_it_has():
    for steps in range(len(STEPS)):
        cut = document(FOUND)
        cut["steps"] = cut["steps"][:steps]
        assert ("bare copies" in page(cut)) == (steps >= 2)


def test_a_step_that_was_not_run_has_no_line():
    cut = document(FOUND)
    cut["steps"] = [step for step in cut["steps"] if step["name"] in ("tests", "dying")]
    text = page(cut)
    assert "a device assert" in text
    assert "loads equal" not in text


def test_a_smoke_says_first_that_it_is_one():
    assert page({**document(FOUND), "smoke": True}).startswith("SMOKE")
