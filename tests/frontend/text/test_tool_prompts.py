"""Tools in the prompts of templates that do not know them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pagewire.frontend.server.parsing.dialects import DIALECTS
from pagewire.frontend.text.chat_template import render_chat
from pagewire.frontend.text.conversation import Conversation, as_text
from pagewire.frontend.text.tokenizer import Tokenizer, load_tokenizer
from pagewire.frontend.text.tool_prompts import CALL_BEGIN, CALL_END, knowledge_of, render_prompted
from tests.frontend.text.test_chat_template import TOOL

REAL = Path(__file__).parents[1] / "server" / "parsing" / "templates"
DEMO = Path(__file__).parents[3] / "pagewire" / "demo"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STRICT = (  # of Gemma 2 and others: no system message, and roles that alternate
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
)
PARTS = "{% for m in messages %}[{{ m.role }}]{% for part in m.content %}{{ part.text }}{% endfor %}\n{% endfor %}"
SHOWS = "{{ tools | tojson if tools }}" + CHATML
USER = {"role": "user", "content": "Weather in Köln?"}
CALLS = [
    {"id": str(i), "type": "function", "function": {"name": "f", "arguments": json.dumps({"city": city})}}
    for i, city in enumerate(("Köln", "Rom"))
]
HISTORY: list[Any] = [
    USER,
    {"role": "assistant", "content": None, "tool_calls": CALLS},
    {"role": "tool", "tool_call_id": "0", "name": "f", "content": "rain"},
    {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "sun"}]},
    {"role": "user", "content": "Well?"},
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(DEMO)


def rendered(source: str, messages: list[Any], tools: list[Any] | None, prompts: bool = True) -> str:
    conversation = Conversation(messages, tools, {}, "auto", False, False, {}, prompts)
    return render_prompted(source, {}, conversation).text


@pytest.mark.parametrize(
    ("source", "knowledge"),
    [
        (CHATML, (False, False, True)),
        (STRICT, (False, False, False)),
        (SHOWS, (True, False, True)),
        (
            "{% if xml_tools %}{{ xml_tools }}{{ tools is none }}{% endif %}{{ messages }}",
            (False, False, True),
        ),
        ("{{ raise_exception('no') }}{{ tools }}", (True, False, False)),
        *(((path.read_text()), (True, True, True)) for path in sorted(REAL.glob("*.jinja"))),
    ],
)
def test_what_templates_know(source: str, knowledge: tuple[bool, ...]) -> None:
    assert knowledge_of(source) == knowledge


@pytest.mark.parametrize("source", [CHATML, STRICT, PARTS])
def test_a_conversation_with_tools(source: str) -> None:
    """The functions, the calls, which the dialect reads back, and the results are in the prompt, in their order."""
    text = rendered(source, HISTORY, [TOOL])
    function = json.dumps(TOOL["function"], ensure_ascii=False)
    assert text.count(function) == 1
    places = [
        text.index(part) for part in (function, "Köln", '"Rom"', 'name="f">\nrain\n', "\nsun\n", "Well?")
    ]
    assert places[1:] == sorted(places[1:])
    written = text[text.rindex("assistant") :]
    calls = DIALECTS["prompted"].new_parser([TOOL["function"]], lambda: "0", True).parse(written).tool_calls
    assert [(c.name, json.loads(c.arguments)["city"]) for c in calls] == [("f", "Köln"), ("f", "Rom")]
    assert (
        "assistant" not in written[9:] and written.count("user") == 1
    )  # results and question are one message
    # Without tools in the request, its calls and results still stand in the prompt.
    bare = rendered(source, HISTORY, None)
    assert function not in bare and "sun" in bare and bare.count(CALL_BEGIN) == bare.count(CALL_END) == 2


def test_where_the_functions_stand() -> None:
    system = {"role": "system", "content": "Be brief."}
    text = rendered(CHATML, [system, USER], [TOOL])
    assert text.count("<|im_start|>system") == 1 and "Be brief.\n\nYou can call functions." in text
    assert rendered(CHATML, [USER], [TOOL]).startswith("<|im_start|>system\nYou can call functions.")
    text = rendered(STRICT, [USER], [TOOL])
    assert text.startswith("[user]You can call functions.") and text.endswith(
        "without tags.\n\nWeather in Köln?\n"
    )
    picture = {"role": "user", "content": [{"type": "text", "text": "What?"}]}
    assert rendered(STRICT, [picture], [TOOL]).endswith("without tags.\n\n\nWhat?\n")
    assert rendered(STRICT, [USER], []) == rendered(STRICT, [USER], None)


def test_a_template_that_shows_tools_and_no_calls() -> None:
    """Its calls are bare objects, as the dialect `json` reads them; it shows the functions itself."""
    text = rendered(SHOWS, HISTORY, [TOOL])
    assert text.startswith(json.dumps([TOOL], ensure_ascii=False)) and "You can call" not in text
    assert '\n{"name": "f", "arguments": {"city": "Köln"}}\n{"name": "f"' in text and CALL_BEGIN not in text
    qwen = (REAL / "qwen3.jinja").read_text()
    assert rendered(qwen, HISTORY, [TOOL]) == rendered(qwen, HISTORY, [TOOL], prompts=False)


def test_what_is_malformed_is_refused(tokenizer: Tokenizer) -> None:
    def render(messages: list[Any], tools: Any, **options: Any) -> str:
        return render_chat(tokenizer, messages, tools=tools, prompts_tools=True, **options)

    with pytest.raises(TypeError, match="a message must be a dict, got int"):
        render([3, HISTORY[1]], None)
    with pytest.raises(TypeError, match="a tool must be a JSON schema"):
        render([USER], [len])
    with pytest.raises(ValueError, match="not valid"):
        render([USER], [TOOL], chat_template="{% if %}")
    with pytest.raises(ValueError, match=r"messages\[1\].content: part \d: only text"):
        render([USER, {"role": "tool", "content": [3]}], None)


def test_a_template_of_a_request(tokenizer: Tokenizer) -> None:
    """It is rendered in another process, where it is asked what it knows."""
    options: Any = {"tools": [TOOL], "prompts_tools": True, "template_files": False}
    text = render_chat(tokenizer, HISTORY, chat_template=STRICT, **options)
    assert text == rendered(STRICT, HISTORY, [TOOL])
    warnings: list[str] = []
    render_chat(tokenizer, [USER], chat_template=CHATML, on_warning=warnings.append, **options)
    assert not warnings
    assert as_text(HISTORY[3]["content"]) in text


def test_tools_and_calls_nested_too_deeply_are_refused_by_name() -> None:
    nested: Any = "x"
    for _ in range(2000):
        nested = {"allOf": [nested]}
    tool = {"type": "function", "function": {"name": "f", "parameters": nested}}
    with pytest.raises(ValueError, match="nested too deeply"):
        rendered(CHATML, [USER], [tool])
    call = {"id": "0", "type": "function", "function": {"name": "f", "arguments": nested}}
    with pytest.raises(ValueError, match="nested too deeply"):
        rendered(CHATML, [USER, {"role": "assistant", "content": None, "tool_calls": [call]}], None)
