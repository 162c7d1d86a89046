"""The fields `cache_control` of a request to /v1/messages: up to where its prompt is to stay cached, and how long.

A mark stands for all of the prompt before it. So of several marks those count that are for longer than all later
ones. Where a marked block ends in the prompt is found by its text. A mark on the last block is for the whole
prompt, as is one whose block cannot be found, since a template or an edit has changed it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pagewire.frontend.client import Tokenizer, TokensPrompt, has_media, tokenize_off_loop
from pagewire.frontend.server.anthropic.protocol import CountTokensRequest
from pagewire.frontend.server.http.errors import APIError
from pagewire.ipc.quoting import quoted
from pagewire.ipc.wire.items import Retention

SECONDS = {"5m": 300.0, "1h": 3600.0}
MAX_MARKS = 4
JSON = dict[str, Any]


@dataclass(frozen=True, slots=True)
class CacheMark:
    """A mark behind the first `num_blocks` blocks of a request, for a time."""

    num_blocks: int
    seconds: float


@dataclass(slots=True)
class MarkedBlocks:
    """The texts of a request's blocks in the order of the prompt, and the marks behind some of them.

    texts: None of a block that has none of its own, such as a picture.
    first_turn: number of blocks before the first message: of tools, which are one block, and of the system's text.
    """

    texts: list[str | None] = field(default_factory=list)
    marks: list[CacheMark] = field(default_factory=list)
    first_turn: int = 0

    @classmethod
    def of(cls, request: CountTokensRequest) -> MarkedBlocks:
        """Those of a request.

        Raises:
            APIError: a mark is malformed, there are too many, or a longer time comes after a shorter one.
        """
        blocks = cls()
        for index, tool in enumerate(request.tools or ()):
            if not blocks.texts:
                blocks.texts.append(None)
            blocks._mark(tool, f"tools[{index}]")
        blocks._read(request.system, "system")
        blocks.first_turn = len(blocks.texts)
        for index, turn in enumerate(request.messages):
            blocks._read(turn.get("content"), f"messages[{index}].content")
        blocks._mark({"cache_control": request.cache_control}, "")
        if len(blocks.marks) > MAX_MARKS:
            raise bad_cache_control(
                f"at most {MAX_MARKS} blocks may have cache_control, got {len(blocks.marks)}"
            )
        times = [mark.seconds for mark in blocks.marks]
        if times != sorted(times, reverse=True):
            raise bad_cache_control("cache_control: a ttl of 1h must not come after one of 5m")
        return blocks

    def _read(self, content: Any, place: str) -> None:
        """Add the blocks of a content; what else is wrong with it is found elsewhere."""
        if isinstance(content, str):
            self.texts.append(content)
            return
        for index, block in enumerate(content if isinstance(content, list) else ()):
            if isinstance(block, dict):
                self.texts.append(block_text(block))
                self._mark(block, f"{place}[{index}]")
                for part in inner_blocks(block):
                    self._mark(part, f"{place}[{index}].content")

    def _mark(self, block: JSON, place: str) -> None:
        """Add the mark of the last block that was added, if it has one."""
        given = block.get("cache_control")
        if given is None:
            return
        name = f"{place}.cache_control" if place else "cache_control"
        if not isinstance(given, dict) or given.get("type") != "ephemeral":
            raise bad_cache_control(f"{name} must be an object with the type 'ephemeral'")
        if (ttl := given.get("ttl", "5m")) not in SECONDS:
            raise bad_cache_control(f"{name}.ttl must be one of {', '.join(SECONDS)}, got {quoted(ttl)}")
        self.marks.append(CacheMark(len(self.texts), SECONDS[ttl]))

    def counting(self) -> list[CacheMark]:
        """The marks that are for longer than all later ones, in order."""
        counting: list[CacheMark] = []
        for mark in reversed(self.marks):
            if not counting or mark.seconds > counting[-1].seconds:
                counting.append(mark)
        return counting[::-1]

    def end_of(self, mark: CacheMark, prompt: str) -> int | None:
        """The number of characters of the prompt before a mark; None for all of it, or if that is not known."""
        if mark.num_blocks == len(self.texts):
            return None
        before_turns = (
            mark.num_blocks <= self.first_turn
        )  # templates put tools before or behind the system's text
        texts = self.texts[: self.first_turn + 1 if before_turns else mark.num_blocks]
        if not (texts[-1] or "").strip():
            return None
        start = end = 0
        for text in filter(None, (text.strip() for text in texts if text)):
            if (start := prompt.find(text, end)) < 0:
                return None  # so that all of this takes linear time
            end = start + len(text)
        return start if before_turns else end


async def cache_wishes(
    request: CountTokensRequest, prompt: TokensPrompt, tokenizer: Tokenizer
) -> list[Retention]:
    """The parts of its prompt that a request asks to keep cached, shorter ones first.

    Raises:
        APIError: a mark is malformed, there are too many, or a longer time comes after a shorter one.
    """
    blocks = MarkedBlocks.of(request)
    wishes = []
    for mark in blocks.counting():
        text = prompt.get("prompt", "")
        end = None if has_media(prompt) else blocks.end_of(mark, text)
        num_tokens = 0
        if end is not None:
            ids = await tokenize_off_loop(end, tokenizer.encode, text[:end], False)
            num_tokens = num_equal(ids, prompt["prompt_token_ids"])
        wishes.append(Retention(mark.seconds, num_tokens=num_tokens))
    return wishes


def block_text(block: JSON) -> str | None:
    """The text of a block that stands in the prompt as it is; None if it has none."""
    if isinstance(text := block.get("text"), str):
        return text
    if isinstance(content := block.get("content"), str):
        return content
    texts = [text for part in inner_blocks(block) if isinstance(text := part.get("text"), str)]
    return texts[-1] if texts else None


def inner_blocks(block: JSON) -> Iterator[JSON]:
    """The blocks within a block, such as those of a tool's result."""
    content = block.get("content")
    return (part for part in (content if isinstance(content, list) else ()) if isinstance(part, dict))


def num_equal(ids: Sequence[int], others: Sequence[int]) -> int:
    """How many of the first tokens are equal."""
    pairs = zip(ids, others, strict=False)
    return next(
        (index for index, (one, other) in enumerate(pairs) if one != other), min(len(ids), len(others))
    )


def bad_cache_control(message: str) -> APIError:
    """The error for a malformed mark."""
    return APIError(400, message, param="cache_control")
