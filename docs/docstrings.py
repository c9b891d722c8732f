"""Turns the reStructuredText of docstrings (roles, literal blocks) into Markdown and links, for mkdocstrings."""

from __future__ import annotations

import re
from typing import Any

import griffe

_PACKAGE = "dcp_datastates"
_ERRORS = ("Error", "Skipped", "Unknown")
_LITERAL = re.compile(r"^::\n+|(?<=\w:):$", re.MULTILINE)
"""The marks before a literal block, which Markdown knows by its indentation."""

_ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):`~?([^`]+)`")


class Docstrings(griffe.Extension):
    """Rewrites each docstring. A role becomes a link, or plain code if the site has no such name."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of ``obj`` before it is parsed."""
        if obj.docstring:
            text = _LITERAL.sub("", obj.docstring.value)
            obj.docstring.value = _ROLE.sub(lambda role: _link(role[1], obj), text)


def _link(name: str, scope: griffe.Object) -> str:
    try:
        target = scope.resolve(name)
    except griffe.NameResolutionError:
        # A full name, or a public one that the module does not import.
        place = f"{_PACKAGE}.errors" if name.endswith(_ERRORS) else _PACKAGE
        target = name if name.startswith(("torch.", f"{_PACKAGE}.")) else f"{place}.{name}"
    label = name.removeprefix(f"{_PACKAGE}.")
    return f'<autoref identifier="{target}" optional><code>{label}</code></autoref>'
