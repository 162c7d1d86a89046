"""Whether a draft model has the model's vocabulary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from pagewire.ipc.files.hub import read_file

MAX_SHARE = 0.01  # of ids that may stand for other tokens: such drafts are wrong, and the others are not


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]] = {}


class _Tokenizer(msgspec.Struct):
    model: _Model


def share_of_others(model_path: str, draft_path: str) -> float:
    """The share of token ids that stand for other tokens in the second tokenizer than in the first, 0 to 1.

    0 where a `tokenizer.json` is missing (GGUF files have none) or of an unknown form: then sizes alone count.
    """
    files = [Path(path) / "tokenizer.json" for path in (model_path, draft_path)]
    if not all(file.is_file() for file in files):
        return 0.0
    try:
        first, second = (read_file(file) for file in files)
        if first == second:
            return 0.0
        ours, theirs = _tokens(first), _tokens(second)
    except (OSError, ValueError):
        return 0.0
    ids = ours.keys() & theirs.keys()
    return sum(ours[i] != theirs[i] for i in ids) / len(ids) if ids else 0.0


def _tokens(content: bytes) -> dict[int, Any]:
    """Tokens by id.

    Raises:
        ValueError: not the content of a tokenizer.json with a vocabulary.
    """
    vocab = msgspec.json.decode(content, type=_Tokenizer).model.vocab
    if isinstance(vocab, dict):
        return {index: token for token, index in vocab.items()}
    return {index: token for index, (token, _) in enumerate(vocab)}
