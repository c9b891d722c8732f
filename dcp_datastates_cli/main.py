"""The arguments of the command line, and where a command begins. Must not import torch, so nothing that does."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

__all__ = ["main"]

_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status, or exits with it on wrong usage."""
    options = _parser().parse_args(arguments)
    try:
        # Imports torch, which takes seconds: not before it is known that a command is to run.
        from dcp_datastates_cli.commands import run

        return run(options)
    except KeyboardInterrupt:
        return _INTERRUPTED


def _version() -> str:
    try:
        return version("dcp_datastates")
    except PackageNotFoundError:  # a source tree that is not installed
        return "0+unknown"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dcp-datastates", description="Look after checkpoints that dcp_datastates has written."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (what, description, arguments) in _COMMANDS.items():
        command = commands.add_parser(name, help=what, description=description)
        for names, options in (*arguments, _JSON):
            command.add_argument(*names, **options)
    return parser


_Argument = tuple[tuple[str, ...], dict[str, Any]]


def _argument(*names: str, help: str, **options: Any) -> _Argument:
    return names, {"help": help, **options}


def _flag(*names: str, help: str) -> _Argument:
    return _argument(*names, help=help, action="store_true")


_JSON: Final = _flag("--json", help="print one JSON document")
_PATH: Final = _argument("path", metavar="PATH", help="a checkpoint")
_ANY_PATH: Final = _argument(
    "path", metavar="PATH", help="a checkpoint, or a directory of checkpoints"
)
_THREADS: Final = _argument(
    "--threads", type=int, metavar="N", help="how many work at a time (default: cores, 8 at most)"
)
_NO_BAR: Final = _flag("--quiet", help="no progress bar")
_LEVEL: Final = _argument(
    "--verify",
    choices=("metadata", "structure", "full"),
    default="structure",
    help="what a checkpoint must pass: its metadata can be read; and every file is there with its size (the default); "
    "and every stored byte matches its checksum",
)
_DRY_RUN: Final = _flag("-n", "--dry-run", help="say what would be deleted, delete nothing")
_ONLY: Final = _argument(
    "--only",
    action="append",
    metavar="NAME",
    help="take only what is under this name; may be given several times",
)
_ALLOW_OBJECTS: Final = _flag(
    "--allow-objects", help="unpickle Python objects that may run code; only for files you trust"
)
_PIN_NAME: Final = _argument("--name", default="keep", help='what the pin is for, such as "eval"')


def _rename(what: str) -> _Argument:
    return _argument(
        "--rename",
        action="append",
        metavar="OLD=NEW",
        help=f"{what}; of several, the first that fits counts",
    )


_COMMANDS: Final[dict[str, tuple[str, str, tuple[_Argument, ...]]]] = {
    "verify": (
        "read every stored byte and compare it with its checksum",
        "Check every stored byte of a checkpoint, or of all checkpoints in a directory, and that the parts of each "
        "agree. Exit status: 0 whole, 1 damaged, 2 nothing to check or it cannot be read.",
        (_ANY_PATH, _THREADS, _flag("--quiet", help="print damage only, no progress bar")),
    ),
    "inspect": (
        "say what is in a checkpoint, or list a directory of checkpoints",
        "Say what is in a checkpoint, or list a directory of checkpoints. Only the metadata are read, and the sizes of "
        "files looked up. Exit status: 0 described, 1 metadata are damaged, or a file is missing or has another size, "
        "2 no checkpoint or it cannot be read.",
        (_ANY_PATH, _flag("--tensors", help="list every tensor and object")),
    ),
    "doctor": (
        "try what the storage at a root can do",
        "Try each operation that saves rely on, on files or objects of its own below ROOT, and say what is missing, "
        "what is done without it, or which permission or mount option helps. A job's first save below a root tries the "
        "same. Exit status: 0 saves work, 1 they do not, 2 storage fails or does not answer.",
        (
            _argument(
                "root",
                metavar="ROOT",
                help="where checkpoints are to lie: a directory, or a URL",
            ),
        ),
    ),
    "watch": (
        "show a directory of checkpoints as it changes, until Ctrl-C",
        "Show the newest checkpoints in a directory, with their age and the time between commits, and the saves that "
        "are in flight, until Ctrl-C. To a pipe: a line for each commit. Exit status: 130 interrupted, 2 the directory "
        "cannot be read.",
        (
            _argument("path", metavar="ROOT", help="a directory of checkpoints"),
            _argument(
                "--every",
                type=float,
                default=2.0,
                metavar="SECONDS",
                help="how often to look (default: 2)",
            ),
            _argument(
                "--rows", type=int, default=12, metavar="N", help="how many to show (default: 12)"
            ),
        ),
    ),
    "trace": (
        "say what each rank's part of a save cost",
        "Say which phase of a checkpoint's save took how long, up to the publication, and on which rank the longest. "
        "Only the metadata are read. --json prints the trace in Chrome's format instead, a timeline over all ranks for "
        "https://ui.perfetto.dev. Exit status: 0 done, 1 the metadata are damaged, 2 no checkpoint, or it has no trace.",
        (_PATH,),
    ),
    "convert": (
        "convert a checkpoint to another format, or from one",
        "Convert SRC, a checkpoint of this package or of stock DCP, a Hugging Face folder, a safetensors file or a file "
        "of torch.save, and write DST, which appears when it is complete. Tensors are streamed. Exit status: 0 done, "
        "1 the source is damaged, 2 wrong usage, it cannot be read, or DST cannot be written.",
        (
            _argument(
                "source",
                metavar="SRC",
                help="a file or directory; its content says what it is",
            ),
            _argument("target", metavar="DST", help="a new file or directory"),
            _argument(
                "--to",
                choices=("datastates", "hf", "peft", "safetensors", "dcp", "torch"),
                help="this package's format (the default if SRC has another); a Hugging Face folder; one safetensors "
                "file; stock DCP; one file of torch.save",
            ),
            _argument(
                "--part",
                metavar="NAME",
                help="take only what is under this name, and remove it from the names: with --part model, "
                "model.norm.weight becomes norm.weight",
            ),
            _ONLY,
            _argument(
                "--exclude",
                action="append",
                metavar="NAME",
                help="leave out what is under this name",
            ),
            _rename("replace this prefix of names"),
            _argument(
                "--dtype", help="dtype of all floating-point tensors, such as bfloat16 or bf16"
            ),
            _argument(
                "--shard-size",
                metavar="SIZE",
                help="most bytes of tensors in a file (default: 5GB)",
            ),
            _argument(
                "--config-from",
                metavar="DIR",
                help="with --to hf: copy configuration and tokenizer files from this folder (default: from SRC)",
            ),
            _flag("--overwrite", help="replace the checkpoint at DST"),
            _flag("--strict", help="fail if DST cannot hold the Python objects of SRC"),
            _argument(
                "--host-cache-size", metavar="SIZE", help="memory for tensors (default: 256MiB)"
            ),
            _ALLOW_OBJECTS,
            _THREADS,
            _flag("--quiet", help="print no result, no progress bar"),
        ),
    ),
    "diff": (
        "say what two checkpoints differ in",
        "Compare two checkpoints of any format that convert reads: names, shapes, dtypes, bytes, objects. How tensors "
        "are sharded does not matter. The worst difference comes first. Exit status: 0 the same, 1 different, 2 wrong "
        "usage, or one of them is damaged or cannot be read.",
        (
            _argument("a", metavar="A", help="a checkpoint: a file or directory"),
            _argument("b", metavar="B", help="another"),
            _ONLY,
            _rename("replace this prefix of A's names"),
            _ALLOW_OBJECTS,
            _THREADS,
            _flag("--quiet", help="print nothing but the differences, no progress bar"),
        ),
    ),
    "copy": (
        "copy a checkpoint between directories and object stores",
        "Copy a checkpoint, byte for byte, between directories and object stores (s3://bucket/run/step-1). Every byte "
        "is compared with its checksum; the copy appears when it is whole. The same command goes on after an "
        "interrupt. Exit status: 0 copied, 1 the checkpoint is damaged, 2 no checkpoint or the system refused.",
        (
            _argument("source", metavar="SOURCE", help="a checkpoint"),
            _argument("target", metavar="TARGET", help="where the copy goes"),
            _THREADS,
            _NO_BAR,
        ),
    ),
    "latest": (
        "print the path of the newest whole checkpoint",
        "Print the path of the newest checkpoint in a directory that passes --verify; say which are left out, and why. "
        "Exit status: 0 found, 1 there is none, 2 the directory cannot be read.",
        (
            _argument(
                "root",
                metavar="ROOT",
                nargs="+",
                help="a directory of checkpoints; or the tiers of a run, the nearest first",
            ),
            _LEVEL,
        ),
    ),
    "retain": (
        "delete old checkpoints by rules",
        "Delete the checkpoints in a directory that are older than the N newest good ones (those that pass --verify), "
        "unless another option or a pin keeps them. The last good one is never deleted, nor one that a save is "
        "replacing, nor anything that is not a checkpoint of this package. Exit status: 0 done, 2 wrong usage or the "
        "system refused.",
        (
            _argument("root", metavar="ROOT", help="a directory of checkpoints"),
            _argument(
                "--keep",
                type=int,
                required=True,
                metavar="N",
                help="how many good ones stay, 1 or more",
            ),
            _argument(
                "--every",
                type=int,
                metavar="STEPS",
                help="keep those whose step is a multiple of this, too",
            ),
            _argument(
                "--best",
                metavar="METRIC:min|max[:N]",
                help='keep the best N, too: "loss:min", "accuracy:max:3"',
            ),
            _argument("--within", metavar="TIME", help='keep those of this time, too: "36h", "7d"'),
            _LEVEL,
            _DRY_RUN,
        ),
    ),
    "rm": (
        "delete checkpoints",
        "Delete checkpoints, after asking on a terminal. Foreign files in their directories stay. Nothing is deleted if "
        "one of the paths is not a checkpoint. Exit status: 0 deleted, 1 the answer was not yes, 2 no checkpoint or the "
        "system refused.",
        (
            _argument("paths", metavar="PATH", nargs="+", help="a checkpoint"),
            _flag("-y", "--yes", help="do not ask"),
            _DRY_RUN,
        ),
    ),
    "pin": (
        "keep a checkpoint from deletion",
        "Keep a checkpoint from deletion. Exit status: 0 done, 2 refused.",
        (_PATH, _PIN_NAME),
    ),
    "unpin": (
        "let it go again",
        "Let it go again. Exit status: 0 done, 2 refused.",
        (_PATH, _PIN_NAME),
    ),
}
"""By name: what it does, for the list of all; its description; its arguments."""
