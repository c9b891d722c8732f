"""A tokenizer and a data set, made on the spot: the wheel of torchtitan brings neither."""

from __future__ import annotations

import json
import random
from pathlib import Path

_BEGIN, _END = "<|begin|>", "<|end|>"
_DOCUMENTS = 400
_WORDS = 60


def make_inputs(directory: Path) -> tuple[Path, Path]:
    """Write ``tokenizer/`` and ``text/`` below ``directory``; the paths of the two. The same at every call."""
    from tokenizers import (
        Tokenizer,
        models,
        pre_tokenizers,
    )  # a test that needs none is collected without

    dice = random.Random(20)
    words = ["".join(dice.choices("abdeghiklmnorstuw", k=dice.randint(2, 7))) for _ in range(800)]
    tokenizer = directory / "tokenizer"
    tokenizer.mkdir(parents=True)
    names = dict.fromkeys([_BEGIN, _END, "<|unknown|>", *words])
    vocabulary = {name: number for number, name in enumerate(names)}
    model = Tokenizer(models.WordLevel(vocabulary, unk_token="<|unknown|>"))
    model.pre_tokenizer = pre_tokenizers.Whitespace()
    model.add_special_tokens([_BEGIN, _END])
    model.save(str(tokenizer / "tokenizer.json"))
    (tokenizer / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": _BEGIN, "eos_token": _END, "add_bos_token": True})
    )
    text = directory / "text"
    text.mkdir()
    with (text / "data.jsonl").open("w") as file:
        for _ in range(_DOCUMENTS):
            file.write(json.dumps({"text": " ".join(dice.choices(words, k=_WORDS))}) + "\n")
    return tokenizer, text
