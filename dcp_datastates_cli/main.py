"""The arguments of the command line, and where a command begins. Must not import torch, so nothing that does."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    _Commands = argparse._SubParsersAction[argparse.ArgumentParser]

_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status, or exits with it on wrong usage."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        # Imports torch, which takes seconds: not before it is known that a command is to run.
        from dcp_datastates_cli.commands import run

        return run(options)
    except KeyboardInterrupt:
        return _INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dcp-datastates", description="Look after checkpoints that dcp_datastates has written."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_verify(commands)
    _add_inspect(commands)
    _add_doctor(commands)
    _add_watch(commands)
    _add_trace(commands)
    _add_convert(commands)
    _add_diff(commands)
    _add_copy(commands)
    _add_latest(commands)
    _add_retain(commands)
    _add_rm(commands)
    _add_pin(commands)
    for command in commands.choices.values():
        command.add_argument("--json", action="store_true", help="print one JSON document")
    return parser


def _version() -> str:
    try:
        return version("dcp_datastates")
    except PackageNotFoundError:  # a source tree that is not installed
        return "0+unknown"


def _add_verify(commands: _Commands) -> None:
    verify = commands.add_parser(
        "verify",
        help="read every stored byte and compare it with its checksum",
        description="Check every stored byte of a checkpoint, or of all checkpoints in a directory, and that "
        "the parts of each agree. Exit status: 0 whole, 1 damaged, 2 nothing to check or it cannot be read.",
    )
    verify.add_argument("path", metavar="PATH", help="a checkpoint, or a directory of checkpoints")
    verify.add_argument(
        "--threads",
        type=int,
        metavar="N",
        help="how many read at a time (default: cores, 8 at most)",
    )
    verify.add_argument("--quiet", action="store_true", help="print damage only, no progress bar")


def _add_inspect(commands: _Commands) -> None:
    inspect = commands.add_parser(
        "inspect",
        help="say what is in a checkpoint, or list a directory of checkpoints",
        description="Say what is in a checkpoint, or list a directory of checkpoints. "
        "Only the metadata are read, and the sizes of files looked up. Exit status: 0 described, 1 metadata are "
        "damaged, or a file is missing or has another size, 2 no checkpoint or it cannot be read.",
    )
    inspect.add_argument("path", metavar="PATH", help="a checkpoint, or a directory of checkpoints")
    inspect.add_argument("--tensors", action="store_true", help="list every tensor and object")


def _add_doctor(commands: _Commands) -> None:
    doctor = commands.add_parser(
        "doctor",
        help="try what the storage at a root can do",
        description="Try each operation that saves rely on, on files or objects of its own below ROOT, and say what is "
        "missing, what is done without it, or which permission or mount option helps. A job's first save below a root "
        "tries the same. Exit status: 0 saves work, 1 they do not, 2 storage fails or does not answer.",
    )
    doctor.add_argument(
        "root", metavar="ROOT", help="where checkpoints are to lie: a directory, or a URL"
    )


def _add_watch(commands: _Commands) -> None:
    watch = commands.add_parser(
        "watch",
        help="show a directory of checkpoints as it changes, until Ctrl-C",
        description="Show the newest checkpoints in a directory, with their age and the time between commits, and the "
        "saves that are in flight, until Ctrl-C. To a pipe: a line for each commit. "
        "Exit status: 130 interrupted, 2 the directory cannot be read.",
    )
    watch.add_argument("path", metavar="ROOT", help="a directory of checkpoints")
    watch.add_argument(
        "--every", type=float, default=2.0, metavar="SECONDS", help="how often to look (default: 2)"
    )
    watch.add_argument(
        "--rows", type=int, default=12, metavar="N", help="how many to show (default: 12)"
    )


def _add_trace(commands: _Commands) -> None:
    trace = commands.add_parser(
        "trace",
        help="say what each rank's part of a save cost",
        description="Say which phase of a checkpoint's save took how long, up to the publication, and on which rank "
        "the longest. Only the metadata are read. --json prints the trace in Chrome's format instead, a timeline over "
        "all ranks for https://ui.perfetto.dev. "
        "Exit status: 0 done, 1 the metadata are damaged, 2 no checkpoint, or it has no trace.",
    )
    trace.add_argument("path", metavar="PATH", help="a checkpoint")


def _add_convert(commands: _Commands) -> None:
    convert = commands.add_parser(
        "convert",
        help="convert a checkpoint to another format, or from one",
        description="Convert SRC, a checkpoint of this package or of stock DCP, a Hugging Face folder, a safetensors "
        "file or a file of torch.save, and write DST, which appears when it is complete. Tensors are streamed. "
        "Exit status: 0 done, 1 the source is damaged, 2 wrong usage, it cannot be read, or DST cannot be written.",
    )
    convert.add_argument(
        "source", metavar="SRC", help="a file or directory; its content says what it is"
    )
    convert.add_argument("target", metavar="DST", help="a new file or directory")
    convert.add_argument(
        "--to",
        choices=("datastates", "hf", "peft", "safetensors", "dcp", "torch"),
        help="this package's format (the default if SRC has another); a Hugging Face folder; one safetensors file; "
        "stock DCP; one file of torch.save",
    )
    convert.add_argument(
        "--part",
        metavar="NAME",
        help="take only what is under this name, and remove it from the names: "
        "with --part model, model.norm.weight becomes norm.weight",
    )
    _add_only(convert)
    convert.add_argument(
        "--exclude", action="append", metavar="NAME", help="leave out what is under this name"
    )
    _add_rename(convert, "replace this prefix of names")
    convert.add_argument(
        "--dtype", help="dtype of all floating-point tensors, such as bfloat16 or bf16"
    )
    convert.add_argument(
        "--shard-size", metavar="SIZE", help="most bytes of tensors in a file (default: 5GB)"
    )
    convert.add_argument(
        "--config-from",
        metavar="DIR",
        help="with --to hf: copy configuration and tokenizer files from this folder (default: from SRC)",
    )
    convert.add_argument("--overwrite", action="store_true", help="replace the checkpoint at DST")
    convert.add_argument(
        "--strict", action="store_true", help="fail if DST cannot hold the Python objects of SRC"
    )
    convert.add_argument(
        "--host-cache-size", metavar="SIZE", help="memory for tensors (default: 256MiB)"
    )
    _add_work(convert, "print no result, no progress bar")


def _add_diff(commands: _Commands) -> None:
    diff = commands.add_parser(
        "diff",
        help="say what two checkpoints differ in",
        description="Compare two checkpoints of any format that convert reads: names, shapes, dtypes, bytes, objects. "
        "How tensors are sharded does not matter. The worst difference comes first. "
        "Exit status: 0 the same, 1 different, 2 wrong usage, or one of them is damaged or cannot be read.",
    )
    diff.add_argument("a", metavar="A", help="a checkpoint: a file or directory")
    diff.add_argument("b", metavar="B", help="another")
    _add_only(diff)
    _add_rename(diff, "replace this prefix of A's names")
    _add_work(diff, "print nothing but the differences, no progress bar")


def _add_only(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--only",
        action="append",
        metavar="NAME",
        help="take only what is under this name; may be given several times",
    )


def _add_rename(command: argparse.ArgumentParser, text: str) -> None:
    command.add_argument(
        "--rename",
        action="append",
        metavar="OLD=NEW",
        help=f"{text}; of several, the first that fits counts",
    )


def _add_work(command: argparse.ArgumentParser, quiet: str) -> None:
    command.add_argument(
        "--allow-objects",
        action="store_true",
        help="unpickle Python objects that may run code; only for files you trust",
    )
    command.add_argument(
        "--threads", type=int, metavar="N", help="how many work (default: cores, 8 at most)"
    )
    command.add_argument("--quiet", action="store_true", help=quiet)


def _add_latest(commands: _Commands) -> None:
    latest = commands.add_parser(
        "latest",
        help="print the path of the newest whole checkpoint",
        description="Print the path of the newest checkpoint in a directory that passes --verify; say which "
        "are left out, and why. Exit status: 0 found, 1 there is none, 2 the directory cannot be read.",
    )
    latest.add_argument(
        "root",
        metavar="ROOT",
        nargs="+",
        help="a directory of checkpoints; or the tiers of a run, the nearest first",
    )
    _add_level(latest)


def _add_retain(commands: _Commands) -> None:
    retain = commands.add_parser(
        "retain",
        help="delete old checkpoints by rules",
        description="Delete the checkpoints in a directory that are older than the N newest good ones (those that "
        "pass --verify), unless another option or a pin keeps them. The last good one is never deleted, nor one that a "
        "save is replacing, nor anything that is not a checkpoint of this package. "
        "Exit status: 0 done, 2 wrong usage or the system refused.",
    )
    retain.add_argument("root", metavar="ROOT", help="a directory of checkpoints")
    retain.add_argument(
        "--keep", type=int, required=True, metavar="N", help="how many good ones stay, 1 or more"
    )
    retain.add_argument(
        "--every",
        type=int,
        metavar="STEPS",
        help="keep those whose step is a multiple of this, too",
    )
    retain.add_argument(
        "--best",
        metavar="METRIC:min|max[:N]",
        help='keep the best N, too: "loss:min", "accuracy:max:3"',
    )
    retain.add_argument(
        "--within", metavar="TIME", help='keep those of this time, too: "36h", "7d"'
    )
    _add_level(retain)
    _add_dry_run(retain)


def _add_rm(commands: _Commands) -> None:
    rm = commands.add_parser(
        "rm",
        help="delete checkpoints",
        description="Delete checkpoints, after asking on a terminal. Foreign files in their directories stay. "
        "Nothing is deleted if one of the paths is not a checkpoint. "
        "Exit status: 0 deleted, 1 the answer was not yes, 2 no checkpoint or the system refused.",
    )
    rm.add_argument("paths", metavar="PATH", nargs="+", help="a checkpoint")
    rm.add_argument("-y", "--yes", action="store_true", help="do not ask")
    _add_dry_run(rm)


def _add_pin(commands: _Commands) -> None:
    for command, what in (("pin", "keep a checkpoint from deletion"), ("unpin", "let it go again")):
        added = commands.add_parser(
            command, help=what, description=f"{what.capitalize()}. Exit status: 0 done, 2 refused."
        )
        added.add_argument("path", metavar="PATH", help="a checkpoint")
        added.add_argument("--name", default="keep", help='what the pin is for, such as "eval"')


def _add_copy(commands: _Commands) -> None:
    copy = commands.add_parser(
        "copy",
        help="copy a checkpoint between directories and object stores",
        description="Copy a checkpoint, byte for byte, between directories and object stores (s3://bucket/run/step-1). "
        "Every byte is compared with its checksum; the copy appears when it is whole. The same command goes on after "
        "an interrupt. Exit status: 0 copied, 1 the checkpoint is damaged, 2 no checkpoint or the system refused.",
    )
    copy.add_argument("source", metavar="SOURCE", help="a checkpoint")
    copy.add_argument("target", metavar="TARGET", help="where the copy goes")
    copy.add_argument(
        "--threads", type=int, metavar="N", help="how many files are copied at a time"
    )
    copy.add_argument("--quiet", action="store_true", help="no progress bar")


def _add_level(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--verify",
        choices=("metadata", "structure", "full"),
        default="structure",
        help="what a checkpoint must pass: its metadata can be read; and every file is there with its size (the "
        "default); and every stored byte matches its checksum",
    )


def _add_dry_run(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "-n", "--dry-run", action="store_true", help="say what would be deleted, delete nothing"
    )
