"""`cache_control`: how much of a prompt stays cached, how long, and how tokens are counted."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from pagewire.frontend.server.anthropic.cache_control import MarkedBlocks, cache_wishes
from pagewire.frontend.server.anthropic.protocol import CountTokensRequest
from pagewire.frontend.server.anthropic.writer import message_usage
from pagewire.frontend.server.http.errors import APIError
from pagewire.frontend.server.serving.usage import PromptTokensDetails, Usage
from pagewire.frontend.text.prompts import TokensPrompt
from pagewire.ipc.wire.items import RetainedPrefix, Retention
from pagewire.ipc.wire.messages import Submit
from tests.frontend.conftest import FakeCore
from tests.frontend.server.client import Answer, Client

PATH = "/v1/messages"
SHORT, LONG = {"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}
PROMPT = "<system>Be kind.\n[tools]<user>Hello, you.<assistant>Hm.<user>Well? Go on."


def text(words: str, mark: Any = None) -> dict[str, Any]:
    return {"type": "text", "text": words} | ({"cache_control": mark} if mark else {})


def request(*, system: Any = None, tool: Any = None, marks: Any = (None,) * 3, whole: Any = None) -> Any:
    """The request of `PROMPT`. marks: of the texts of its three turns."""
    turns = [("user", "Hello, you."), ("assistant", " Hm. "), ("user", "Go on.")]
    messages: list[dict[str, Any]] = [
        {"role": role, "content": [text(words, mark)]}
        for (role, words), mark in zip(turns, marks, strict=True)
    ]
    messages[-1]["content"].insert(0, text("Well?"))
    fields = {"messages": messages, "system": [text("Be kind.", system)], "cache_control": whole}
    tools = [{"name": "f", "input_schema": {"type": "object"}, "cache_control": tool}]
    return msgspec.convert(fields | {"tools": tools}, CountTokensRequest)


class Letters:
    """A tokenizer of which each character is a token."""

    def encode(self, words: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(letter) for letter in words]


def wishes(given: CountTokensRequest, prompt: str = PROMPT) -> list[tuple[float, str]]:
    """The seconds and the part of the prompt of each wish; an empty part: all of it."""
    rendered = TokensPrompt(prompt_token_ids=[ord(letter) for letter in prompt], prompt=prompt)
    found = asyncio.run(cache_wishes(given, rendered, Letters()))  # type: ignore[arg-type]
    return [(wish.seconds, prompt[: wish.num_tokens]) for wish in found]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (request(), []),
        (request(whole=SHORT), [(300.0, "")]),
        (request(marks=(None, None, LONG)), [(3600.0, "")]),
        (
            request(marks=(None, SHORT, None)),
            [(300.0, "<system>Be kind.\n[tools]<user>Hello, you.<assistant>Hm.")],
        ),
        (request(system=SHORT), [(300.0, "<system>Be kind.\n[tools]<user>")]),
        (request(tool=SHORT), [(300.0, "<system>Be kind.\n[tools]<user>")]),
        (request(system=SHORT, marks=(SHORT, None, SHORT)), [(300.0, "")]),
        (
            request(system=LONG, marks=(SHORT, None, SHORT)),
            [(3600.0, "<system>Be kind.\n[tools]<user>"), (300.0, "")],
        ),
    ],
)
def test_which_part_is_kept(given: CountTokensRequest, expected: list[tuple[float, str]]) -> None:
    assert wishes(given) == expected


def test_all_is_kept_where_a_block_is_not_found() -> None:
    changed = PROMPT.replace("Hello, you", "HELLO, YOU")
    assert wishes(request(marks=(SHORT, None, None)), changed) == [(300.0, "")]
    other = request(marks=(None, SHORT, None))
    other.messages[1]["content"][0] = {"type": "tool_use", "id": "1", "name": "f", "input": {}} | {
        "cache_control": SHORT
    }
    assert wishes(other) == [(300.0, "")]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (request(whole={"type": "for ever"}), "cache_control must be an object"),
        (
            request(system={"type": "ephemeral", "ttl": "2h"}),
            "one of 5m, 1h",
        ),
        (request(system=SHORT, tool=SHORT, marks=(SHORT,) * 3), "at most 4 blocks"),
        (request(system=SHORT, whole=LONG), "1h must not come after"),
    ],
)
def test_malformed_marks_are_refused(given: CountTokensRequest, why: str) -> None:
    with pytest.raises(APIError, match=why):
        MarkedBlocks.of(given)


def test_a_mark_within_the_result_of_a_tool() -> None:
    given = request()
    part = text("Sunny.", SHORT)
    given.messages[2]["content"] = [
        {"type": "tool_result", "tool_use_id": "1", "content": [part]},
        text("So?"),
    ]
    (mark,) = MarkedBlocks.of(given).marks
    assert mark.num_blocks == 5
    prompt = "<user>Be kind. Hello, you.<assistant>Hm.<tool>Sunny.<user>So?"
    assert wishes(given, prompt) == [(300.0, prompt.partition("<user>So")[0])]


@pytest.mark.parametrize(
    ("cached", "kept", "read", "five", "hour", "rest"),
    [
        (0, [(300.0, 80)], 0, 80, 0, 20),
        (50, [(300.0, 80)], 50, 30, 0, 20),
        (96, [(300.0, 80)], 96, 0, 0, 4),
        (0, [(3600.0, 32), (300.0, 80)], 0, 48, 32, 20),
        (48, [(3600.0, 32), (300.0, 80)], 48, 32, 0, 20),
        (0, [(3600.0, 0)], 0, 0, 0, 100),
    ],
)
def test_tokens_are_read_or_created_or_input(
    cached: int, kept: list[tuple[float, int]], read: int, five: int, hour: int, rest: int
) -> None:
    usage = message_usage(Usage(100, 7, 107, PromptTokensDetails(cached)), kept)
    assert (usage.input_tokens, usage.cache_read_input_tokens) == (rest, read)
    assert usage.cache_creation_input_tokens == five + hour
    assert msgspec.to_builtins(usage.cache_creation) == {
        "ephemeral_5m_input_tokens": five,
        "ephemeral_1h_input_tokens": hour,
    }
    assert sum((rest, read, five, hour)) == 100


@pytest.mark.parametrize("stream", [False, True])
def test_a_message(client: Client, core: FakeCore, stream: bool) -> None:
    messages = [{"role": "user", "content": [text("w5 w6", SHORT)]}]
    core.auto = False

    async def play() -> Answer:
        call = client.call("POST", PATH, {"max_tokens": 3, "messages": messages, "stream": stream})
        (submitted,) = (await asyncio.to_thread(core.expect, Submit)).requests
        assert submitted.retention == [Retention(300.0)]
        retained = [RetainedPrefix(1, "a tenant's share is 1 KV block")]
        core.tokens(submitted.key, [5], num_cached_tokens=0, retained=retained)
        core.tokens(submitted.key, [5], finish_reason="length", num_cached_tokens=0, retained=retained)
        return await call.answer()

    answer = client.run(play)
    assert answer.status == 200 and "a tenant's share is 1 KV block" in answer.headers["warning"]
    if stream:
        assert answer.body.decode().count('"cache_creation_input_tokens":1,') == 2
    else:
        assert answer.json["usage"]["cache_creation_input_tokens"] == 1
        assert answer.json["usage"]["input_tokens"] == 1
