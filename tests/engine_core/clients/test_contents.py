"""The contents of media that unfinished requests hold."""

from __future__ import annotations

import pytest

from pagewire.engine_core.clients.contents import Contents
from pagewire.ipc.codec import Tensor
from pagewire.ipc.embeddings import media_of
from pagewire.ipc.errors import EngineBusyError
from pagewire.ipc.items import Prompt


def prompt(value: int, num_tokens: int = 2) -> Prompt:
    return Prompt(
        [0] * num_tokens, media_of(Tensor("float16", (num_tokens, 4), bytes([value] * num_tokens * 8)))
    )


def test_equal_contents_are_held_once_and_go_with_their_last_prompt() -> None:
    contents = Contents()
    first, second, other = prompt(1), prompt(1), prompt(2)
    assert first.media[0].data is not second.media[0].data
    for each in (first, second, other, Prompt([1])):
        contents.hold(each)
    assert first.media[0].data is second.media[0].data is not other.media[0].data
    assert first.media == prompt(1).media and contents.num_bytes == 32
    del first, each
    assert contents.num_bytes == 32
    del second
    assert contents.num_bytes == 16
    del other
    assert contents.num_bytes == 0


def test_all_contents_together_are_bounded() -> None:
    contents = Contents(max_bytes=40)
    held = [prompt(1), prompt(2)]
    for each in held:
        contents.hold(each)
    with pytest.raises(EngineBusyError, match="have 48 bytes \\(limit 40\\): wait"):
        contents.hold(prompt(3))
    again = prompt(2)
    contents.hold(again)  # there is room for what is held already
    assert contents.num_bytes == 32
    held.pop(0)
    del each
    contents.hold(third := prompt(3))
    assert contents.num_bytes == 32 and third.media
