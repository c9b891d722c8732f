"""Turns the Sphinx roles of docstrings into links of the site: for mkdocstrings, which knows Markdown only."""

from __future__ import annotations

import re
from typing import Any

import griffe

_PACKAGE = "dcp_datastates"
_ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):`~?([^`]+)`")


class SphinxRoles(griffe.Extension):
    """Replaces each role by a link, which stays plain code if the site has no such name."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of ``obj`` before it is parsed."""
        if obj.docstring:
            obj.docstring.value = _ROLE.sub(lambda role: _link(role[1], obj), obj.docstring.value)


def _link(name: str, obj: griffe.Object) -> str:
    label = name.removeprefix(f"{_PACKAGE}.")
    scope = obj if obj.is_class else obj.parent
    if scope is not None and scope.is_class and name in scope.members:
        target = f"{_PACKAGE}.{scope.name}.{name}"
    else:
        target = name if name.startswith(("torch.", f"{_PACKAGE}.")) else f"{_PACKAGE}.{name}"
    return f'<autoref identifier="{target}" optional><code>{label}</code></autoref>'
