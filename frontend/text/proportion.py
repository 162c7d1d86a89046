"""How much longer a tokenizer may make a text: `tokenizer.json` is a stranger's file, and its rules can multiply.

Ten rules that each replace "a" by "aa" make a thousand characters of one, in one call of a library that nothing
stops. So rules are looked at when the tokenizer is loaded, and those that can multiply are refused.
"""

from __future__ import annotations

import base64
import binascii
import json
from math import prod
from typing import Any

MOST = 64  # times as long as a text: known tokenizers have up to 4
UNICODE = 18  # characters that Unicode makes of U+FDFA, its longest form; no rule of a tokenizer, not counted
LISTS = ("normalizers", "decoders", "processors")  # the parts of a sequence, by what it is of


def check_proportion(original: Any) -> None:
    """Check a tokenizer of the library `tokenizers`.

    Raises:
        ValueError: it can make a text or a list of tokens over `MOST` times as long.
    """
    for name in ("normalizer", "decoder", "post_processor"):
        part = getattr(original, name, None)
        if part is None:
            continue
        factor = factor_of(json.loads(part.__getstate__()))
        if factor > MOST:
            raise ValueError(
                f"the tokenizer's {name} can make a text {write_factor(factor)} times as long, and at most {MOST} "
                "times is allowed: its rules (Replace, Prepend, Precompiled, templates) put many characters for few"
            )


def write_factor(factor: float) -> str:
    """Return a factor for a message."""
    return f"{factor:.0f}" if factor < 1e6 else f"{factor:.0e}"


def factor_of(part: dict[str, Any]) -> float:
    """Return how many characters or tokens a part of a tokenizer makes of one, at most.

    A pattern may match nothing between any two characters, as `x*` does, which then come beside its content.
    """
    match part:
        case {"type": "Sequence"}:
            return prod((factor_of(each) for name in LISTS for each in part.get(name, ())), start=1.0)
        case {"type": "Replace", "pattern": {"String": str(pattern)}, "content": str(content)} if pattern:
            return max(1.0, len(content) / len(pattern))
        case {"type": "Replace"}:
            return 1.0 + len(part.get("content", ""))
        case {"type": "Prepend"}:
            return 1.0 + len(part.get("prepend", ""))
        case {"type": "Precompiled"}:
            longest = longest_form(part.get("precompiled_charsmap") or "")
            return 1.0 if longest <= UNICODE else float(longest)
        case {"type": "TemplateProcessing"}:
            return max(1.0, *(copies(part.get(name) or []) for name in ("single", "pair")))
    return 1.0  # all others follow Unicode, or take characters away


def longest_form(charsmap: str) -> int:
    """Return the length of the longest text that a compiled table of sentencepiece has for a character.

    charsmap: in base64; the size of an index in 4 bytes, the index, and texts that end with a byte of 0.
    """
    try:
        data = base64.b64decode(charsmap)
    except (ValueError, binascii.Error):
        return 0  # the library does not read it either
    start = 4 + int.from_bytes(data[:4], "little")
    return max((len(text.decode("utf-8", "replace")) for text in data[start:].split(b"\0")), default=0)


def copies(template: list[Any]) -> float:
    """Return how often a template has the tokens of the text, and of a token that it adds."""
    named = [
        piece["Sequence"].get("id") for piece in template if isinstance(piece, dict) and "Sequence" in piece
    ]
    added = len(template) - len(named)
    return max([1.0, added / MOST, *(float(named.count(name)) for name in set(named))])
