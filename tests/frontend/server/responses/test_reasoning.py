"""Reasoning in /v1/responses: items, events, token counts, and which tokens' log probabilities an answer has."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest

import pagewire.demo
from pagewire.frontend.requests.outputs import CompletionOutput
from pagewire.frontend.server.http.warnings import begin_warnings
from pagewire.frontend.server.openai.logprobs import TokenNames
from pagewire.frontend.server.openai.reply import ReplyWithCalls
from pagewire.frontend.server.parsing.choice import tool_use
from pagewire.frontend.server.parsing.reasoning import parser_for, thinking
from pagewire.frontend.server.parsing.reasoning_marks import REASONING
from pagewire.frontend.server.responses.items import item_messages, read_input
from pagewire.frontend.server.responses.reader import OutputReader
from pagewire.frontend.text.logprobs import Logprob
from pagewire.frontend.text.tokenizer import Tokenizer, load_tokenizer
from tests.frontend.server.parsing.test_tools_over_http import HERMES, Replay, client_of, replay
from tests.frontend.server.responses.test_responses import joined_items

__all__ = ["replay"]  # a fixture

THOUGHT = "Hm, Köln. So what? "
ANSWER = "The answer is 42."
TOOL: Any = {"type": "function", "name": "clock", "parameters": {"type": "object", "properties": {}}}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(Path(pagewire.demo.__path__[0]))


def ask(client: Any, **fields: Any) -> Any:
    return client.responses.create(model="fake", input="Köln?", **fields)


@pytest.mark.parametrize("parser", ["qwen3", "deepseek_r1"])
def test_reasoning_is_an_item_of_its_own(replay: Replay, parser: str) -> None:
    replay.text = f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}"
    with replay.serve(reasoning_parser=parser) as url, client_of(url) as client:
        response = ask(client)
        reasoning, message = response.output
        assert reasoning.type == "reasoning" and reasoning.id.startswith("rs_")
        assert (reasoning.status, reasoning.summary) == ("completed", [])
        assert [(part.type, part.text) for part in reasoning.content] == [("reasoning_text", THOUGHT.strip())]
        assert message.id.startswith("msg_") and response.output_text == ANSWER
        assert response.id.startswith("resp_")
        thought = replay.tokenizer.encode(f"<think>\n{THOUGHT}\n</think>", add_special_tokens=False)
        assert response.usage.output_tokens_details.reasoning_tokens == len(thought)


def test_the_events_of_reasoning(replay: Replay) -> None:
    replay.text = f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER}"
    with replay.serve(reasoning_parser="qwen3") as url, client_of(url) as client:
        events = [event.model_dump(exclude_unset=True) for event in ask(client, stream=True)]
        kinds = [event["type"].removeprefix("response.") for event in events]
        unique = [kind for kind, before in zip(kinds, [None, *kinds], strict=False) if kind != before]
        assert unique == [
            "created",
            "in_progress",
            "output_item.added",
            "content_part.added",
            "reasoning_text.delta",
            "reasoning_text.done",
            "content_part.done",
            "output_item.done",
            "output_item.added",
            "content_part.added",
            "output_text.delta",
            "output_text.done",
            "content_part.done",
            "output_item.done",
            "completed",
        ]
        assert joined_items(events) == events[-1]["response"]["output"]
        with client.responses.stream(model="fake", input="Köln?") as stream:
            final = stream.get_final_response()
        assert final.output_text == ANSWER and final.output[0].content[0].text == THOUGHT.strip()  # type: ignore


def test_reasoning_before_calls_and_in_later_turns(replay: Replay) -> None:
    flags: Any = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
    replay.text = f"<think>{THOUGHT}</think>{HERMES[HERMES.rindex('<tool_call>') :]}"
    with replay.serve(**flags) as url, client_of(url) as client:
        first = ask(client, tools=[TOOL])
        assert [item.type for item in first.output] == ["reasoning", "function_call"]
        result = {"type": "function_call_output", "call_id": first.output[1].call_id, "output": "noon"}
        history = [{"role": "user", "content": "Köln?"}, *first.model_dump()["output"], result]
        for fields in ({"input": history}, {"input": [result], "previous_response_id": first.id}):
            client.responses.create(model="fake", tools=[TOOL], **fields)
            prompt = replay.prompt[replay.prompt.rindex('[{"role"') :].replace("<|im_end|>", "")
            user, assistant, tool = json.loads(prompt)
            assert assistant["reasoning_content"] == THOUGHT.strip() and not assistant["content"]
            assert len(assistant["tool_calls"]) == 1 and tool["content"] == "noon" and user["role"] == "user"


def test_reasoning_belongs_to_the_message_after_it() -> None:
    def thought(text: str) -> dict[str, Any]:
        return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}

    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    items = read_input(
        [
            thought("a"),
            {"role": "assistant", "content": "A"},
            thought("b"),
            call,
            {"type": "reasoning", "summary": [], "encrypted_content": "x", "content": None},
            {"role": "user", "content": "B"},
            thought("dropped"),
            {"role": "user", "content": "C"},
        ]
    )
    warnings = begin_warnings("id")
    first, second, *others = item_messages(None, items)
    assert first == {"role": "assistant", "content": "A", "reasoning_content": "a"}
    assert second["reasoning_content"] == "b" and second["tool_calls"][0]["id"] == "1"
    both = [{"type": "text", "text": "B"}, {"type": "text", "text": "C"}]
    assert others == [{"role": "user", "content": both}]
    assert warnings.texts == [
        "encrypted_content of reasoning is left out: only the server that wrote it can read it"
    ]


def test_a_client_that_sends_back_no_text_of_reasoning_sends_it_encrypted(replay: Replay) -> None:
    replay.text = f"<think>{THOUGHT}</think>{ANSWER}"
    with replay.serve(reasoning_parser="qwen3") as url, client_of(url) as client:
        fields: Any = {"model": "fake", "store": False}
        first = client.responses.create(
            input="Köln?", include=["reasoning.encrypted_content"], stream=False, **fields
        )
        thought, message = first.model_dump()["output"]
        assert thought["encrypted_content"] and thought["content"][0]["text"] == THOUGHT.strip()
        del thought["content"]
        question = {"role": "user", "content": "Köln?"}
        client.responses.create(
            input=[question, thought, message, {"role": "user", "content": "And?"}], **fields
        )
        history = json.loads(replay.prompt[replay.prompt.rindex('[{"role"') :].replace("<|im_end|>", ""))
        assert history[1]["reasoning_content"] == THOUGHT.strip() and history[1]["content"] == ANSWER
        plain = client.responses.create(input="Köln?", **fields)
        assert plain.model_dump()["output"][0]["encrypted_content"] is None


def test_reasoning_that_is_cut_off(replay: Replay) -> None:
    replay.text, replay.core.reason = f"<think>{THOUGHT}", "length"
    with replay.serve(reasoning_parser="qwen3") as url, client_of(url) as client:
        response = ask(client)
        (item,) = response.output
        assert (item.type, item.status, response.status) == ("reasoning", "incomplete", "incomplete")
        details = response.usage.output_tokens_details
        assert details.reasoning_tokens == response.usage.output_tokens > 0


# ---------------------------------------------------------------- tokens


def reader_of(tokenizer: Tokenizer) -> OutputReader:
    tool = {"type": "function", "function": {"name": "clock"}}
    parser = parser_for(thinking(tool_use([tool], "auto", parser="hermes"), "qwen3"), "")
    assert parser is not None
    names = TokenNames(tokenizer, False)
    return OutputReader(
        ReplyWithCalls(parser), tokenizer, names, reasoning=REASONING["qwen3"], top_logprobs=0
    )


def increments(tokenizer: Tokenizer, text: str, cuts: list[int]) -> list[CompletionOutput]:
    """The text's tokens in some increments; an increment's text is that of its tokens, or comes a token later."""
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    places = [0, *sorted(cut % (len(token_ids) + 1) for cut in cuts), len(token_ids)]
    done, parts = 0, []
    for begin, end in itertools.pairwise(places):
        whole = tokenizer.decode(token_ids[:end], skip_special_tokens=False).rstrip("�")
        logprobs: Any = [
            {i: Logprob(-0.5, 1, tokenizer.decode([i], skip_special_tokens=False))}
            for i in token_ids[begin:end]
        ]
        parts.append(CompletionOutput(0, whole[done:], token_ids[begin:end], None, logprobs))
        done = max(done, len(whole))
    parts[-1].finish_reason = "stop"
    return parts


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(
    ("text", "content", "with_thought"),
    [
        (f"<think>\n{THOUGHT}{ANSWER}</think>\n\n{ANSWER} Köln 🦊.", f"{ANSWER} Köln 🦊.", True),
        (f"<think></think>\n\nthink {ANSWER}", f"think {ANSWER}", True),
        (f"\n<think>?</think>{HERMES}", "Let me see.", True),
        (f"{ANSWER} <think>x</think>", f"{ANSWER} <think>x</think>", False),
        (HERMES, "Let me see.", False),
    ],
)
def test_an_answer_has_the_log_probabilities_of_its_own_tokens(
    tokenizer: Tokenizer, text: str, content: str, with_thought: bool, seed: int
) -> None:
    chance = random.Random(seed)
    cuts = [chance.randrange(1000) for _ in range(chance.choice((0, 1, 5, 100)))]
    reader = reader_of(tokenizer)
    written, logprobs = "", []
    for part in increments(tokenizer, text, cuts):
        delta, tokens = reader.read(part)
        written += delta.content
        logprobs += tokens
    assert written == content
    assert b"".join(bytes(token.bytes or ()) for token in logprobs).decode().strip() == content
    thought = text[: text.index("</think>") + len("</think>")] if with_thought else ""
    assert reader.reasoning_tokens == len(tokenizer.encode(thought, add_special_tokens=False))
