"""``dcp-datastates audit``: resume a job from an older checkpoint, and compare its steps with the journal."""

from __future__ import annotations

import argparse
import json
import os
import secrets
import subprocess
from dataclasses import asdict
from typing import Any

from dcp_datastates.checkpoints.inventory import is_directory
from dcp_datastates.errors import ConfigurationError
from dcp_datastates.journal.audit import VARIABLE, Order
from dcp_datastates.storage.object_path import locate, stored
from dcp_datastates_cli.output import NO, OK, TROUBLE, answer


def run(options: argparse.Namespace) -> int:
    """Start the job's command, and say what its managers report; returns the exit status."""
    root = locate(options.root)
    folder = stored(root).folder
    if folder is None or not is_directory(root):
        raise ConfigurationError(f"there is no directory {str(root)!r}, so no journal")
    if options.steps < 1:
        raise ConfigurationError(f"--steps {options.steps} must be 1 or more")
    report = folder / f".datastates-audit-{secrets.token_hex(8)}-"
    order = json.dumps(asdict(Order(str(root), options.steps, str(report))))
    try:
        output = 2 if options.json else None  # the document comes alone
        environment = {**os.environ, VARIABLE: order}
        status = subprocess.run(options.job, env=environment, stdout=output).returncode
        reports = [json.loads(path.read_text()) for path in folder.glob(f"{report.name}*[0-9]")]
    except OSError as error:
        raise ConfigurationError(f"{options.job[0]!r} cannot be started: {error}") from None
    finally:
        for path in folder.glob(f"{report.name}*"):
            path.unlink(missing_ok=True)
    reports.sort(key=lambda each: each["rank"])
    result = _result(reports)
    text = "\n".join(each["text"] for each in reports)
    if not reports:
        text = (
            f"no CheckpointManager on {str(root)!r} has reported: the command ended with status {status}. It must "
            f"restore, call save() at each step, and leave the loop when stopping is true"
        )
    document = {"root": root, "result": result, "command_status": status, "ranks": reports}
    answer(options, document, text)
    return {"equal": OK, "different": NO}.get(result, TROUBLE)


def _result(reports: list[dict[str, Any]]) -> str:
    outcomes = {each["outcome"] for each in reports}
    missing = bool(reports) and len(reports) < reports[0]["world"]
    if "different" in outcomes:
        return "different"
    return "equal" if outcomes == {"equal"} and not missing else "not compared"
