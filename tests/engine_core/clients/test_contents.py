"""The contents of media that unfinished requests hold."""

from __future__ import annotations

from pagewire.engine_core.clients.contents import Contents
from pagewire.ipc.wire.codec import Tensor
from pagewire.ipc.wire.embeddings import media_of
from pagewire.ipc.wire.items import Prompt


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
