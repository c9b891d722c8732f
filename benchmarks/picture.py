"""The README's picture: a few iterations of training, and what their saves do meanwhile.

``python benchmarks/picture.py`` trains and saves, writes what was measured into ``results/``, and draws it.
``--draw results/FILE.json`` draws what was measured before.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import dcp_datastates as ds
from machine import describe

PICTURE = Path(__file__).parents[1] / "docs" / "save-beside-training.svg"
ITERATIONS = 4
WARM_UPS = 4
WIDTH, LEFT, ROW = 880, 118, 34
HEIGHT = 6 * ROW + 16
NAMES = {
    "waits": "training waits",
    "deferred": "deferred",
    "reading": "reading and writing",
    "writing": "writing the rest",
}
PHASES = {
    "queue": "deferred",
    "planning": "deferred",
    "window": "deferred",
    "reading": "reading",
    "flushing": "writing",
    "voting": "commit",
    "publishing": "commit",
    "ending": "commit",
}
COLORS = {
    "forward": "#7aa6d8",
    "backward": "#3f72af",
    "step": "#1d3f6b",
    "waits": "#d1495b",
    "deferred": "#c9ced6",
    "reading": "#e9a23b",
    "writing": "#8fbf6f",
    "commit": "#4b8b3b",
}
STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#24292f}.axis{stroke:#8c959f}.small{font-size:11px}"
    "@media(prefers-color-scheme:dark){text{fill:#e6edf3}}"
)


def measure(directory: Path) -> dict[str, Any]:
    """Iterations that save, in seconds from the first one's call, and the records of their saves."""
    width = 1536
    layers = [each for _ in range(12) for each in (torch.nn.Linear(width, width), torch.nn.GELU())]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters())
    planner = ds.DataStatesSavePlanner()
    saves: list[Any] = []
    spans: list[tuple[str, float, float]] = []

    @contextlib.contextmanager
    def span(name: str) -> Iterator[None]:
        began = time.time()
        yield
        spans.append((name, began, time.time()))

    batch = torch.randn(64, width)
    ds.on_save(saves.append)
    for iteration in range(WARM_UPS + ITERATIONS):
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        with span("call"):
            handle = ds.async_save(state, directory / str(iteration), planner=planner)
        with span("forward"):
            loss = model(batch).square().mean()
        with span("backward"):
            loss.backward()  # type: ignore[no-untyped-call]
        with span("step"):
            optimizer.step()
            optimizer.zero_grad()
    handle.result()
    shown = sorted(saves, key=lambda record: record.began_at)[WARM_UPS:]
    first = shown[0].began_at
    nbytes = shown[0].eager_bytes + shown[0].deferred_bytes
    return {
        **describe(directory),
        "state_bytes": nbytes,
        "training": [[name, a - first, b - first] for name, a, b in spans if a >= first - 1e-3],
        "saves": [
            {
                "began": record.began_at - first,
                "call": record.call_seconds,
                "gated_after": record.gated_after,
                "gate": record.gate_seconds,
                "phases": dict(record.phases),
            }
            for record in shown
        ],
    }


def draw(measured: dict[str, Any]) -> str:
    """The picture as SVG, for light and dark pages."""
    end = max(
        *(each[2] for each in measured["training"]),
        *(save["began"] + sum(save["phases"].values()) for save in measured["saves"]),
    )
    scale = (WIDTH - LEFT - 10) / end
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        "<title>Training, and what its saves do meanwhile</title>",
        f"<style>{STYLE}</style>",
    ]

    def bar(row: float, kind: str, begin: float, until: float, tall: float = 20) -> None:
        if until > begin:
            lines.append(
                f'<rect x="{LEFT + begin * scale:.1f}" y="{row * ROW + 16 - tall / 2:.0f}" '
                f'width="{max(1.0, (until - begin) * scale):.1f}" height="{tall:.0f}" '
                f'fill="{COLORS[kind]}"><title>{kind}: {1e3 * (until - begin):.1f} ms</title></rect>'
            )

    def text(x: float, y: float, words: str, small: bool = False) -> None:
        kind = ' class="small"' if small else ""
        lines.append(f'<text x="{x:.1f}" y="{y:.1f}"{kind}>{words}</text>')

    text(4, 21, "training")
    for kind, begin, until in measured["training"]:
        if kind != "call":
            bar(0, kind, begin, until)
    for number, save in enumerate(measured["saves"], 1):
        text(4, number * ROW + 21, f"save {number}")
        at = save["began"]
        bar(0, "waits", at, at + save["call"])
        if save["gated_after"] is not None:
            bar(0, "waits", at + save["gated_after"], at + save["gated_after"] + save["gate"])
        for phase, seconds in save["phases"].items():
            if kind := PHASES.get(phase):
                thin = kind == "deferred"
                bar(number, kind, at, at + seconds, tall=4 if thin else 20)
            at += seconds
    bottom = (len(measured["saves"]) + 1) * ROW + 10
    lines.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - 10}" y1="{bottom}" y2="{bottom}"/>')
    tick = next(each for each in (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0) if end / each < 10)
    for n in range(int(end / tick) + 1):
        text(LEFT + n * tick * scale, bottom + 14, f"{n * tick:.10g} s", small=True)
    x = float(LEFT)
    for kind, color in COLORS.items():
        words = NAMES.get(kind, kind)
        lines.append(f'<rect x="{x:.0f}" y="{bottom + 22}" width="10" height="10" fill="{color}"/>')
        text(x + 14, bottom + 31, words, small=True)
        x += 26 + 6.2 * len(words)
    return "\n".join([*lines, "</svg>"]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draw", type=Path, help="what to draw, without training")
    parser.add_argument("--dir", type=Path, default=Path(), help="a folder on the disk to save to")
    arguments = parser.parse_args()
    source = arguments.draw
    if source is None:
        with tempfile.TemporaryDirectory(dir=arguments.dir) as directory:
            measured = measure(Path(directory).absolute())
        source = Path(__file__).parent / "results" / f"picture-{measured['date'][:10]}.json"
        source.write_text(json.dumps(measured, indent=1) + "\n")
    PICTURE.write_text(draw(json.loads(source.read_text())))
    print(f"drawn: {PICTURE}, of {source}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
