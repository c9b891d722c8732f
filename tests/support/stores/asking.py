"""Requests by hand, of a server on the wire."""

from __future__ import annotations

from typing import Any

from dcp_datastates.wire.line import Line


def asked(line: Line, words: object) -> tuple[Any, memoryview]:
    """The answer to a request."""
    line.send(words)
    return line.result()
