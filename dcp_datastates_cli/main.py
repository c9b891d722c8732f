"""The commands with their arguments, and where one begins. Must not import torch, so nothing that does."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final, NamedTuple

_INTERRUPTED: Final = 130

_Argument = tuple[tuple[str, ...], dict[str, Any]]
"""What ``ArgumentParser.add_argument`` takes."""


def _argument(usage: str, text: str, **settings: Any) -> _Argument:
    """``usage``: the name, and what is shown for its value: "--every SECONDS". Without that, capitals are shown."""
    name, _, shown = usage.partition(" ")
    metavar = shown or (None if name.startswith("-") else name.upper())
    return (name,), {"help": text, "metavar": metavar, **settings}


def _flag(names: str, text: str) -> _Argument:
    return tuple(names.split()), {"help": text, "action": "store_true"}


class _Command(NamedTuple):
    run: str
    """The file and the function in this package."""
    description: str
    """Its first sentence is shown in the list of commands."""
    arguments: Sequence[_Argument]


_CHECKPOINT: Final = _argument("path", "a checkpoint")
_CHECKPOINTS: Final = _argument("path", "a checkpoint, or a directory of checkpoints")
_ROOT: Final = _argument("root", "a directory of checkpoints")
_THREADS: Final = _argument(
    "--threads N", "how many work at a time (default: cores, 8 at most)", type=int
)
_DRY_RUN: Final = _flag("-n --dry-run", "say what would be deleted, delete nothing")
_PIN: Final = _argument("--name", 'what the pin is for, such as "eval"', default="keep")
_LEVEL: Final = _argument(
    "--verify",
    "what a checkpoint must pass: its metadata can be read; and every file is there with its size (the default); "
    "and every stored byte matches its checksum. Or, as the default, and its replicas are known to be equal",
    choices=("metadata", "structure", "full", "replicas"),
    default="structure",
)
_ONLY: Final = _argument(
    "--only NAME", "take only what is under this name; may be given several times", action="append"
)
_OBJECTS: Final = _flag(
    "--allow-objects", "unpickle Python objects that may run code; only for files you trust"
)


def _rename(text: str) -> _Argument:
    text = f"{text}; of several, the first that fits counts"
    return _argument("--rename OLD=NEW", text, action="append")


_COMMANDS: Final = {
    "verify": _Command(
        "verify.run",
        "Read every stored byte and compare it with its checksum. Of a checkpoint, or of all checkpoints in a "
        "directory. "
        "Exit status: 0 whole, 1 damaged, 2 nothing to check or it cannot be read.",
        [_CHECKPOINTS, _THREADS, _flag("--quiet", "print damage only, no progress bar")],
    ),
    "inspect": _Command(
        "describe.run_inspect",
        "Describe a checkpoint, or the state of a directory of checkpoints. Of a directory: the newest, what is in "
        "flight, what failed last, and the free space. Only the metadata are read, and the sizes "
        "of files looked up. Exit status: 0 described, 1 metadata are damaged, or a file is missing or has another "
        "size, 2 no checkpoint or it cannot be read.",
        [
            _CHECKPOINTS,
            _flag("--tensors", "list every tensor and object of a checkpoint"),
            _flag("--all", "list every checkpoint of a directory"),
        ],
    ),
    "doctor": _Command(
        "doctor.run",
        "Try what the storage at a root can do. Each operation that saves rely on is tried, on files or objects of its "
        "own below ROOT; it says what is missing, what is done without it, or which permission or mount option helps. "
        "A job's first save below a root tries the same. "
        "Exit status: 0 saves work, 1 they do not, 2 storage fails or does not answer.",
        [_argument("root", "where checkpoints are to lie: a directory, or a URL")],
    ),
    "trace": _Command(
        "describe.run_trace",
        "Say what each rank's part of a save cost. Which phase took how long, up to the publication, and on which rank "
        "the longest. Only the metadata are read. --json prints the trace in Chrome's format instead, a timeline over "
        "all ranks for https://ui.perfetto.dev. "
        "Exit status: 0 done, 1 the metadata are damaged, 2 no checkpoint, or it has no trace.",
        [_CHECKPOINT],
    ),
    "audit": _Command(
        "audit.run",
        "Prove that a job resumes exactly. COMMAND, after --, is the job's own: it restores the checkpoint before the "
        "newest, and its steps are compared with the journal that it kept (journal=True). Its managers on ROOT save "
        "and delete nothing, and end the loop after K steps. "
        "Exit status: 0 equal, 1 different, 2 they could not be compared.",
        [
            _ROOT,
            _argument("job COMMAND", "the job's command, such as: -- torchrun train.py", nargs="+"),
            _argument("--steps K", "how many steps to compare (default: 20)", type=int, default=20),
        ],
    ),
    "convert": _Command(
        "convert.run_convert",
        "Convert a checkpoint to another format, or from one. SOURCE is a checkpoint of this package or of stock DCP, "
        "a Hugging Face folder, a safetensors file or a file of torch.save; TARGET appears when it is complete. "
        "Exit status: 0 done, 1 the source is damaged, 2 wrong usage, it cannot be read, or TARGET cannot be written.",
        [
            _argument("source", "its content says what it is"),
            _argument("target", "a new file or directory"),
            _argument(
                "--to",
                "this package's format (the default if SOURCE has another); a Hugging Face folder; a LoRA adapter; "
                "one safetensors file; stock DCP; one file of torch.save",
                choices=("datastates", "hf", "peft", "safetensors", "dcp", "torch"),
            ),
            _argument(
                "--part NAME",
                "take only what is under this name, and remove it from the names: with --part model, "
                "model.norm.weight becomes norm.weight",
            ),
            _ONLY,
            _argument("--exclude NAME", "leave out what is under this name", action="append"),
            _rename("replace this prefix of names"),
            _argument("--dtype", "of all floating-point tensors, such as bfloat16 or bf16"),
            _argument("--shard-size SIZE", "most bytes in a file (default: 5GB)"),
            _argument(
                "--config-from DIR",
                "with --to hf: copy configuration and tokenizer files from this folder (default: from SOURCE)",
            ),
            _flag("--overwrite", "replace the checkpoint at TARGET"),
            _flag("--strict", "fail if TARGET cannot hold the Python objects of SOURCE"),
            _OBJECTS,
            _THREADS,
            _flag("--quiet", "print no result, no progress bar"),
        ],
    ),
    "diff": _Command(
        "convert.run_diff",
        "Compare two checkpoints. They may have any format that convert reads; names, shapes, dtypes, bytes "
        "and objects are compared. How tensors are sharded does not matter. The worst difference comes first. "
        "Exit status: 0 the same, 1 different, 2 wrong usage, or one of them is damaged or cannot be read.",
        [
            _argument("a", "a checkpoint: a file or directory"),
            _argument("b", "another"),
            _ONLY,
            _rename("replace this prefix of A's names"),
            _OBJECTS,
            _THREADS,
            _flag("--quiet", "print nothing but the differences, no progress bar"),
        ],
    ),
    "copy": _Command(
        "convert.run_copy",
        "Copy a checkpoint between directories and object stores. Both may be URLs (s3://bucket/run/step-1). "
        "Every byte is compared with its checksum; the copy appears when it is whole. The same command goes on after "
        "an interrupt. Exit status: 0 copied, 1 the checkpoint is damaged, 2 no checkpoint or the system refused.",
        [
            _argument("source", "a checkpoint"),
            _argument("target", "where the copy goes"),
            _THREADS,
            _flag("--quiet", "no progress bar"),
        ],
    ),
    "latest": _Command(
        "describe.run_latest",
        "Print the path of the newest whole checkpoint. It is the newest in a directory that passes --verify; the "
        "command says which are left out, and why. "
        "Exit status: 0 found, 1 there is none, 2 the directory cannot be read.",
        [
            _argument(
                "root",
                "a directory of checkpoints; or the tiers of a run, the nearest first",
                nargs="+",
            ),
            _LEVEL,
        ],
    ),
    "retain": _Command(
        "delete.run_retain",
        "Delete old checkpoints by rules. Those in a directory that are older than the N newest good ones (those that "
        "pass --verify) are deleted, unless another option or a pin keeps them. The last good one never is, nor one "
        "that a save is replacing, nor anything that is not a checkpoint of this package. "
        "Exit status: 0 done, 2 wrong usage or the system refused.",
        [
            _ROOT,
            _argument("--keep N", "how many good ones stay, 1 or more", type=int, required=True),
            _argument(
                "--every STEPS", "keep those whose step is a multiple of this, too", type=int
            ),
            _argument(
                "--best METRIC:min|max[:N]", 'keep the best N, too: "loss:min", "accuracy:max:3"'
            ),
            _argument("--within TIME", 'keep those of this time, too: "36h", "7d"'),
            _LEVEL,
            _DRY_RUN,
        ],
    ),
    "delete": _Command(
        "delete.run_delete",
        "Delete checkpoints. On a terminal, it asks first. Foreign files in their directories stay. Nothing is deleted "
        "if one of the paths is not a checkpoint. "
        "Exit status: 0 deleted, 1 the answer was not yes, 2 no checkpoint or the system refused.",
        [
            _argument("paths PATH", "a checkpoint", nargs="+"),
            _flag("-y --yes", "do not ask"),
            _DRY_RUN,
        ],
    ),
    "pin": _Command(
        "delete.run_pin",
        "Keep a checkpoint from deletion. Exit status: 0 done, 2 refused.",
        [_CHECKPOINT, _PIN],
    ),
    "unpin": _Command(
        "delete.run_pin",
        "Let a checkpoint be deleted again. Exit status: 0 done, 2 refused.",
        [_CHECKPOINT, _PIN],
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status, or exits with it on wrong usage."""
    options = _parser().parse_args(arguments)
    try:
        # Imports torch, which takes seconds: not before it is known that a command is to run.
        from dcp_datastates_cli.output import run

        return run(_COMMANDS[options.command].run, options)
    except KeyboardInterrupt:
        return _INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dcp-datastates", description="Look after checkpoints that dcp_datastates has written."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (_, description, known) in _COMMANDS.items():
        first = description.partition(". ")[0]
        command = commands.add_parser(
            name, help=first[0].lower() + first[1:], description=description
        )
        for names, settings in (*known, _flag("--json", "print one JSON document")):
            command.add_argument(*names, **settings)
    return parser


def _version() -> str:
    try:
        return version("dcp_datastates")
    except PackageNotFoundError:  # a source tree that is not installed
        return "0+unknown"
