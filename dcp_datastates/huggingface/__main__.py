"""``python -m dcp_datastates.huggingface [--only NAMES] [--set OPTION=VALUE …] SCRIPT | -m MODULE [arguments]``."""

from __future__ import annotations

import argparse
import json
import os
import runpy
import sys
from typing import Any

from dcp_datastates.errors import ConfigurationError
from dcp_datastates.huggingface.install import install


def main() -> None:
    """Run a script or a module with this package's classes in place of Accelerate's and transformers'."""
    parser = argparse.ArgumentParser(
        prog="python -m dcp_datastates.huggingface",
        description="Run SCRIPT, or a module, in which Accelerator and Trainer are those of dcp_datastates.",
        usage="%(prog)s [--only NAMES] [--set OPTION=VALUE] (-m MODULE | SCRIPT) [arguments]",
    )
    parser.add_argument("--only", metavar="NAMES", help="accelerate, or trainer (default: both)")
    parser.add_argument(
        "--set",
        metavar="OPTION=VALUE",
        action="append",
        default=[],
        help="an option of the classes, such as missing=warn or fresh=replace; a value may be JSON; may be repeated",
    )
    parser.add_argument("-m", dest="is_module", action="store_true", help="run a module")
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="SCRIPT")  # with its options
    options = parser.parse_args()
    rest = options.rest
    if not rest:
        parser.error("name a script, or a module with -m")
    try:
        install(*(options.only.split(",") if options.only else ()), **_options(options.set))
    except ConfigurationError as error:
        parser.error(str(error))
    sys.argv = rest
    if options.is_module:
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        if not os.path.isfile(rest[0]):
            parser.error(f"there is no script {rest[0]!r}")
        sys.path[0] = os.path.dirname(os.path.abspath(rest[0]))  # as Python has it for a script
        runpy.run_path(rest[0], run_name="__main__")


def _options(given: list[str]) -> dict[str, Any]:
    """``OPTION=VALUE`` of each; a value is JSON, or else a string."""
    found: dict[str, Any] = {}
    for each in given:
        name, equals, text = each.partition("=")
        if not equals:
            raise ConfigurationError(f"--set {each!r} must be OPTION=VALUE, such as missing=warn")
        try:
            found[name] = json.loads(text)
        except ValueError:
            found[name] = text
    return found


if __name__ == "__main__":
    main()
