"""The documents use the field's words, and plain ones."""

import re

import pytest
from support.commands import ROOT, documents

UNCLEAR = (
    "at once",
    "nobody",
    "somebody",
    "whoever",
    "in place of",
    "comes to be",
    "of training's",
)
UNCLEAR += ("mend", "mended", "reckoned", "whatever comes", "behind training")


@pytest.mark.parametrize("document", [*documents(), "SECURITY.md"])
def test_documents_use_plain_words(document):
    text = re.sub(r"<!--.*?-->", "", (ROOT / document).read_text(), flags=re.DOTALL)
    found = [each for each in UNCLEAR if re.search(rf"\b{each}\b", " ".join(text.split()), re.I)]
    assert found == []
