"""Code that a page shows of an example is a piece of the file."""

import re
import textwrap

import pytest
from support.commands import ROOT, blocks, documents

PAGES = [
    *documents(),
    *(path.relative_to(ROOT).as_posix() for path in ROOT.glob("integration/*/README.md")),
]
SHOWN = re.compile(
    r"""
    \((?:[./]*/)?examples/(?P<name>[\w.]+)\)  # a link to an example,
    (?:[^\n]|\n(?!\n))*?:\n\n  # in a paragraph that ends in a colon,
    ```(?P<language>\w+)\n(?P<text>.*?)^```$  # and the code below it
    """,
    re.VERBOSE | re.DOTALL | re.MULTILINE,
)


def shown():
    """Page, name of the example, and a piece: of a diff, what is there after it, between two lines "@@"."""
    for page in PAGES:
        for found in SHOWN.finditer((ROOT / page).read_text()):
            text = found["text"]
            if found["language"] == "diff":
                after = [line for line in text.splitlines(keepends=True) if line[0] != "-"]
                text = "".join(line if line[0] == "@" else line[1:] for line in after)
            for piece in text.split("@@\n"):
                yield page, found["name"], piece


@pytest.mark.parametrize(
    ("page", "name"),
    [
        ("integration/deepspeed/README.md", "deepspeed.json"),
        ("integration/huggingface/README.md", "lora_sft_trainer.py"),
        ("integration/lightning/README.md", "lightning_fsdp.py"),
        ("integration/torchtitan/README.md", "torchtitan.md"),
    ],
)
def test_the_page_of_a_framework_shows_its_example(page, name):
    assert (page, name) in {(page, name) for page, name, _ in shown()}


def test_what_is_shown_of_an_example_is_in_it():
    assert [(page, piece) for page, name, piece in shown() if not is_of(name, piece)] == []
    assert not is_of("quick_start.py", "manager.save(step, state)  # returns later\n")


def is_of(name, piece):
    """Whether ``piece`` is in the example, be it indented there."""
    text = (ROOT / "examples" / name).read_text()
    return any(f"\n{textwrap.indent(piece, indent)}" in f"\n{text}" for indent in ("", " " * 4))


def test_the_documents_have_no_programs_of_their_own():
    pieces = {(page, piece) for page, _, piece in shown()}
    found = [block for page in documents() for block in blocks(page)]
    python = [block for block in found if block.language in ("python", "py")]
    assert len(python) > 10
    assert [
        (block.document, block.heading)
        for block in python
        if (block.document, block.text) not in pieces
    ] == [("docs/index.md", "FSDP1")], "which test_examples.py runs in the quick start"
