"""Tokens of parts of texts that were tokenized lately, and where a text may be cut into such parts.

The turns of an agent have nearly the same prompt: all but the end was tokenized a second before. A text is cut
before special tokens of the chat template, and only parts that were not met lately are tokenized.

That is exact. The library first searches the raw text for the added tokens that are not normalized: from left to
right, the longest that begins first. What is between two of them is normalized, split and tokenized by itself. So a
text may be cut before a special token that the search finds wherever it stands: one that no other of those tokens
can overlap (`stands_alone`), and that takes nothing beside it into account. Only the first part of a text is told
apart, since some pre-tokenizers put a space before the first word.
"""

from __future__ import annotations

import json
import re
import string
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import tokenizers

from pagewire.ipc.recent import Recent
from pagewire.ipc.tenants import current_tenant

MIN_SEGMENT = 1024  # characters of a part: to find shorter ones takes as long as to tokenize them
MAX_CUT_TOKENS = 32  # tokens before which texts are cut; those of the chat template are taken first
MAX_TRIED = 256  # special tokens that are looked at
TENANT_BYTES = 16 << 20  # memory for the parts of one tenant: a dozen conversations of 100,000 tokens
MAX_TENANTS = 8  # whose parts are kept: those that came last
# Whether one of these follows may decide how far the token before reaches.
FIRST = frozenset(string.punctuation) - {"_"}

Encode = Callable[[str], list[int]]
Segments = Recent[tuple[str | None, bool, str], "array[int]"]
"""Token ids of parts, by cache salt, whether the part begins its text, and the part."""


class TextCuts:
    """The places where the texts of a tokenizer may be cut.

    preferred: text in which the chosen special tokens are searched for first, such as chat templates.

    Attributes:
        around: token ids that the tokenizer puts before and behind a text; None: that is not known.
    """

    def __init__(self, original: tokenizers.Tokenizer, preferred: str) -> None:
        processor = original.post_processor
        self.around = special_around(None if processor is None else json.loads(processor.__getstate__()))
        self._pattern = pattern_of(cut_tokens(original, preferred))

    def segments(self, text: str) -> Iterator[str]:
        """The parts of a text, in order. Each but the last has at least `MIN_SEGMENT` characters."""
        start = 0
        while self._pattern is not None and (match := self._pattern.search(text, start + MIN_SEGMENT)):
            yield text[start : match.start()]
            start = match.start()
        yield text[start:]


class SegmentCache:
    """The tokens of parts of texts. Thread-safe.

    They are kept apart for each tenant and each cache salt, so that the time a text takes shows nobody what others
    have sent. At most `TENANT_BYTES` are kept for each of the `MAX_TENANTS` tenants that came last.
    """

    def __init__(self, cuts: TextCuts) -> None:
        self._cuts = cuts
        self._tenants: OrderedDict[str, Segments] = OrderedDict()
        self._lock = threading.Lock()

    def encode(self, text: str, encode: Encode, special: bool, salt: str | None) -> list[int] | None:
        """Return the token ids of a text; None if the tokens around it are not known.

        encode: tokenizes a part, without special tokens around it. special: the text has them. salt: of the cache.
        """
        around = self._cuts.around if special else ([], [])
        if around is None:
            return None
        ids = list(around[0])
        parts = self._cuts.segments(text)
        part, first = next(parts), True
        for following in parts:
            ids += self._of(part, first, encode, salt)
            part, first = following, False
        return ids + encode(part) + around[1]  # the next turn makes the last part longer: it is not kept

    def _of(self, part: str, first: bool, encode: Encode, salt: str | None) -> Iterable[int]:
        key = salt, first, part
        with self._lock:
            known = self._segments().get(key)
        if known is not None:
            return known
        ids = array("I", encode(part))
        with self._lock:
            self._segments().put(key, ids, ids.itemsize * len(ids) + part.__sizeof__())
        return ids

    def _segments(self) -> Segments:
        """Those of the current tenant."""
        tenant = current_tenant.get()
        if tenant not in self._tenants:
            self._tenants[tenant] = Recent(TENANT_BYTES)
            if len(self._tenants) > MAX_TENANTS:
                self._tenants.popitem(last=False)
        self._tenants.move_to_end(tenant)
        return self._tenants[tenant]


def cut_tokens(original: tokenizers.Tokenizer, preferred: str) -> list[str]:
    """The special tokens before which any text may be cut, at most `MAX_CUT_TOKENS`."""
    if getattr(original.model, "dropout", None) or original.encode_special_tokens:
        return []  # tokens are drawn at random, or special ones are text like any other
    added = original.get_added_tokens_decoder().values()
    raw = {token.content for token in added if token.content and not token.normalized}
    plain = [
        token.content
        for token in added
        if token.special and token.content in raw and not (token.single_word or token.lstrip)
    ]
    plain = [content for content in plain if content[0] in FIRST and len(content) < MIN_SEGMENT]
    plain.sort(key=lambda content: content not in preferred)
    return [content for content in plain[:MAX_TRIED] if stands_alone(content, raw)][:MAX_CUT_TOKENS]


def stands_alone(content: str, raw: Iterable[str]) -> bool:
    """True if no other token can begin before this one and reach into it, or begin with it.

    raw: the added tokens that are searched for in the raw text.
    """
    beginnings = tuple(content[:size] for size in range(1, len(content)))
    return not any(other.endswith(beginnings) or (content in other and content != other) for other in raw)


def pattern_of(contents: Iterable[str]) -> re.Pattern[str] | None:
    """A pattern that finds any of these tokens; None if there are none."""
    groups: dict[str, list[str]] = {}
    for content in contents:
        groups.setdefault(content[:2], []).append(re.escape(content[2:]))
    parts = (f"{re.escape(beginning)}(?:{'|'.join(rests)})" for beginning, rests in groups.items())
    return re.compile("|".join(parts)) if groups else None


def special_around(processor: dict[str, Any] | None) -> tuple[list[int], list[int]] | None:
    """The token ids that a post-processor puts before and behind a text; None for a form that is not known here."""
    match processor:
        case None | {"type": "ByteLevel"}:
            return [], []
        case {"type": "Sequence"}:
            kept = [part for part in processor["processors"] if part.get("type") != "ByteLevel"]
            return special_around(kept[0] if kept else None) if len(kept) < 2 else None
        case {"type": "TemplateProcessing"}:
            around: list[list[int]] = [[]]
            pieces, tokens = processor["single"], processor["special_tokens"]
            for piece in pieces:
                if "Sequence" in piece:
                    around.append([])
                else:
                    around[-1] += tokens[piece["SpecialToken"]["id"]]["ids"]
            return (around[0], around[1]) if len(around) == 2 else None
    return None
