"""Work that would hold up an event loop, in threads; large texts are tokenized one at a time."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from pagewire.frontend import wiring
from pagewire.frontend.api.slow_work import SlowWork
from pagewire.frontend.text.prompts import TextPair
from pagewire.frontend.text.tokenizer import LARGE_TEXT

T = TypeVar("T")

OFF_LOOP_CHARS = 8192  # take a few milliseconds to tokenize, or to put into a chat template
MAX_WAITING_TEXTS = 256
# Prompts whose pictures and sounds are fetched and decoded at the same time: each holds up to 300 MB meanwhile. A
# tenant's downloads from a slow host leave threads for others.
MEDIA_THREADS = 8
MEDIA_THREADS_OF_TENANT = 6
MAX_WAITING_MEDIA = 256

# Of texts, embeddings and answers: each takes a fraction of a second.
NUM_THREADS = min(32, (os.cpu_count() or 1) + 4)  # as the threads of an event loop

_work = SlowWork("texts", NUM_THREADS, math.inf, num_reserved=1)
# A tokenizer takes hundreds of bytes for a character. Smaller texts do not wait behind these.
_large_texts = SlowWork("large texts", 1, MAX_WAITING_TEXTS)
media_work = SlowWork(
    "prompts with pictures or sounds",
    MEDIA_THREADS,
    MAX_WAITING_MEDIA,
    MEDIA_THREADS_OF_TENANT,
    num_reserved=1,
)
"""Does what blocks while the media of a prompt are fetched and decoded."""


def template_work(max_waiting: int) -> SlowWork:
    """Return threads that render the chat templates of requests, as many as there are processes for it."""
    return SlowWork("chat templates", wiring.NUM_PARALLEL, max_waiting, num_reserved=wiring.NUM_RESERVED)


def num_chars(prompt: Any) -> int:
    """The characters of a prompt, or of a pair of texts, that are tokenized."""
    if isinstance(prompt, TextPair):
        return len(prompt.first) + len(prompt.second)
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    return len(text) if isinstance(text, str) else 0


async def off_loop(size: int, work: Callable[..., T], *args: Any) -> T:
    """Return `work(*args)`, run in a thread if `size` (in characters) is large enough to block the event loop.

    Threads work in the turns of tenants: a thousand texts of one do not hold up those of another.
    """
    if size >= OFF_LOOP_CHARS:
        return await _work.run(lambda: work(*args))
    return work(*args)


async def tokenizing(num_chars: int, work: Callable[..., T], *args: Any) -> T:
    """Return `work(*args)`, which tokenizes texts. num_chars: of the longest one.

    It runs as with `off_loop`; but work on large texts of all requests waits for a thread of its own. A caller that
    is cancelled meanwhile gives its place up.

    Raises:
        EngineBusyError: too many large texts are waiting.
    """
    if num_chars >= LARGE_TEXT:
        return await _large_texts.run(lambda: work(*args))
    return await off_loop(num_chars, work, *args)
