"""``python -m dcp_datastates.deepspeed SAVE_DIR OUTPUT_DIR [--tag TAG]``: see ``export.py``."""

from __future__ import annotations

import argparse
import sys

from dcp_datastates.deepspeed.export import export
from dcp_datastates.errors import DataStatesError


def main(arguments: list[str] | None = None) -> int:
    """Export one tag; prints its new directory. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m dcp_datastates.deepspeed",
        description="Writes a tag as DeepSpeed's own checkpoint engine would have written it.",
    )
    parser.add_argument("save_dir", help="the directory given to save_checkpoint")
    parser.add_argument("output", help="the directory to write to")
    parser.add_argument("--tag", help="the tag; default: the one that the file latest names")
    chosen = parser.parse_args(arguments)
    try:
        print(export(chosen.save_dir, chosen.output, chosen.tag))
    except (DataStatesError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
