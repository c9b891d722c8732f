"""Draws planning.svg: which rank writes what.

python docs/design/draw_planning.py > docs/design/planning.svg
"""

from __future__ import annotations

ROW = 17  # pixels of a row of a tensor
RANK = 165  # from one rank to the next
LEFT, WIDTH = 130, 120
SHARDED, REPLICATED, OTHER = "#4c8dcb", "#e0a13a", "#9a9a9a"

OWN = (3, 3, 3, 1)
"""Rows of the sharded tensor that each rank holds: the last shard of an uneven split is smaller."""
COPIED = 6
"""Rows of the tensor that all ranks hold."""
SHARE = (sum(OWN) + COPIED) // len(OWN)


def text(x: float, y: float, words: str, size: int = 13, anchor: str = "middle") -> str:
    """Words, whose baseline is at ``y``."""
    return f'<text x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}">{words}</text>'


def box(x: float, y: float, rows: float, colour: str, words: str = "") -> str:
    """Some rows of a tensor, with a name."""
    height = rows * ROW
    drawn = (
        f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{height}" fill="{colour}" stroke="white"/>'
    )
    return drawn + (text(x + WIDTH / 2, y + height / 2 + 4, words, 12) if words else "")


def arrow(x: float, top: float, bottom: float) -> str:
    """A line down."""
    return f'<path d="M{x} {top}V{bottom}" stroke="#444" fill="none" marker-end="url(#head)"/>'


def picture() -> str:
    """The SVG."""
    drawn, taken = [], 0
    states, files = 45, 330
    drawn.append(text(10, states + 60, "what each", anchor="start"))
    drawn.append(text(10, states + 76, "rank holds", anchor="start"))
    drawn.append(text(10, files + 40, "what each", anchor="start"))
    drawn.append(text(10, files + 56, "rank writes", anchor="start"))
    for rank, own in enumerate(OWN):
        x = LEFT + rank * RANK
        drawn.append(text(x + WIDTH / 2, 30, f"rank {rank}", 15))
        drawn.append(box(x, states, own, SHARDED, f"W, shard {rank}" if own > 1 else "W, 3"))
        drawn.append(box(x, states + own * ROW, COPIED, REPLICATED, "b, all of it"))
        drawn.append(arrow(x + WIDTH / 2, 204, 224))
        drawn.append(arrow(x + WIDTH / 2, 272, files - 22))
        rows = SHARE - own
        slices = f"b, row {taken}" if rows == 1 else f"b, rows {taken} to {taken + rows - 1}"
        drawn.append(box(x, files - 16, 1, OTHER, "header"))
        drawn.append(
            box(x, files - 16 + ROW, own, SHARDED, f"W, shard {rank}" if own > 1 else "W, 3")
        )
        drawn.append(box(x, files - 16 + ROW * (1 + own), rows, REPLICATED, slices))
        drawn.append(box(x, files - 16 + ROW * (1 + SHARE), 1, OTHER, "checksums"))
        drawn.append(text(x + WIDTH / 2, files + 104, f"r0000{rank}-0.safetensors", 11))
        taken += rows
    middle = LEFT + (len(OWN) - 1) * RANK / 2 + WIDTH / 2
    drawn.append(
        f'<rect x="{LEFT}" y="228" width="{(len(OWN) - 1) * RANK + WIDTH}" height="40" rx="6" '
        'fill="none" stroke="#444"/>'
    )
    drawn.append(
        text(middle, 245, "the first rank assigns rows so that all files have the same size")
    )
    drawn.append(
        text(middle, 261, "a structure that was saved before: a digest up, a digest down", 12)
    )
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 770 450" font-family="sans-serif">\n'
        '<defs><marker id="head" markerWidth="8" markerHeight="8" refX="6" refY="3" orient="auto">'
        '<path d="M0 0L6 3L0 6" fill="none" stroke="#444"/></marker></defs>\n'
        '<rect width="770" height="450" rx="8" fill="white"/>\n' + "\n".join(drawn) + "\n</svg>"
    )


if __name__ == "__main__":
    print(picture())
