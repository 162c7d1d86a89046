"""The demo model with a token for the end of its reasoning, so that a random output has one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pagewire.demo

CLOSE = "</think>"


def make_thinker(folder: Path) -> int:
    """Write the model into a folder, which must not exist, and return the id of the token."""
    shutil.copytree(Path(pagewire.demo.__path__[0]), folder)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary, merges = tokenizer["model"]["vocab"], tokenizer["model"]["merges"]
    left, right = merges.pop() if isinstance(merges[-1], list) else merges.pop().split(" ")
    token_id: int = vocabulary.pop(left + right)  # a merge of the last token made
    tokenizer["added_tokens"].append(
        {"id": token_id, "content": CLOSE, "special": False, "normalized": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    )
    path.write_text(json.dumps(tokenizer))
    return token_id
