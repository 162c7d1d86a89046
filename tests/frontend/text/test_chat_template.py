"""Chat templates render as transformers renders them, in a sandbox."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from pagewire.frontend.text.chat_template import chat_prompt, conversations_of, render_chat
from pagewire.frontend.text.engine_tokenizer import EngineTokenizer
from pagewire.frontend.text.tokenizer import Tokenizer, load_tokenizer
from tests.frontend import trained

CHATML = """\
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n' }}
    {%- for tool in tools %}
        {{- '\\n' }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if loop.index > 50 %}{% break %}{% endif %}
    {%- set content = message.content | default('') %}
    {%- if message.reasoning_content %}
        {%- set content = '<think>' + message.reasoning_content + '</think>' + content %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{ content }}{% endgeneration %}
    {%- else %}
        {{- content }}
    {%- endif %}
    {%- for call in message.tool_calls or [] %}
        {{- '\\n' }}{{- call.function.name }}{{- call.function.arguments | tojson(indent=2) }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
LLAMA = """\
{{ bos_token }}
{% for message in messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Roles must alternate') }}
    {% endif %}
    {% if message['role'] == 'user' %}
        {{ '[INST] ' + message['content'].strip() + ' [/INST]' }}
    {% else %}
        {{ ' ' + message['content'] | trim + ' ' + eos_token }}
    {% endif %}
{% endfor %}
"""
PARTS = """\
{% for message in messages %}<{{ message.role }}>
{% for part in message['content'] %}{{ part.type }}:{{ part['text'] }};{% endfor %}
{% endfor %}"""
BOTH = """\
{% for m in messages %}{% set content = m['content'] %}
{% if content is string %}{{ content }}{% else %}{% for part in content %}[{{ part.text }}]{% endfor %}{% endif %}
{% endfor %}"""
USER = {"role": "user", "content": " Grüße, 世界 "}
CHAT = [USER, {"role": "assistant", "content": "Hi & <b>hello</b> "}, {"role": "user", "content": "The fox?"}]
TOOL = {"type": "function", "function": {"name": "f", "description": "çà", "parameters": {"type": "object"}}}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"x": "é", "n": 1}}}],
}


@pytest.fixture(scope="module")
def tokenizer(folders: dict[str, Path]) -> Tokenizer:
    return load_tokenizer(folders["byte_level"])


@lru_cache(maxsize=1)
def theirs(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


CASES: list[tuple[str | None, list[dict[str, Any]], dict[str, Any]]] = [
    (None, CHAT, {}),
    (None, CHAT, {"add_generation_prompt": False}),
    (CHATML, CHAT, {}),
    (CHATML, CHAT, {"tools": [TOOL, TOOL]}),
    (CHATML, [USER, CALL, {"role": "tool", "content": "42"}], {"tools": [TOOL]}),
    (CHATML, CHAT, {"chat_template_kwargs": {"enable_thinking": False}}),
    (CHATML, [USER, {"role": "assistant", "reasoning": "hm", "content": "so"}], {}),
    (CHATML, [USER, {"role": "assistant", "thinking": "hm", "content": "so"}], {}),
    (LLAMA, CHAT, {}),
    (LLAMA, CHAT, {"chat_template_kwargs": {"bos_token": "<B>"}}),
    (BOTH, CHAT, {}),
    (BOTH, [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}], {}),
    (PARTS, [{"role": "user", "content": [{"type": "text", "text": "a"}]}], {}),
    ("{{ strftime_now('%Y') }}{{ messages | length }}{{ documents }}{{ tools }}", CHAT, {}),
    ("{{ messages[0] | tojson }}{{ {'b': 1, 'a': [1]} | tojson(indent=1, sort_keys=true) }}", CHAT, {}),
    (
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
        CHAT,
        {},
    ),
]


@pytest.mark.parametrize(("template", "messages", "options"), CASES)
def test_templates_render_as_in_transformers(
    template: str | None,
    messages: list[dict[str, Any]],
    options: dict[str, Any],
    tokenizer: Tokenizer,
    folders: dict[str, Path],
) -> None:
    kwargs = {"add_generation_prompt": True, **options}
    kwargs |= kwargs.pop("chat_template_kwargs", {})
    their = theirs(folders["byte_level"])
    text = their.apply_chat_template(messages, chat_template=template, tokenize=False, **kwargs)
    prompt = chat_prompt(tokenizer, messages, chat_template=template, **options)
    assert prompt["prompt"] == text
    ids = their.apply_chat_template(messages, chat_template=template, return_dict=False, **kwargs)
    assert prompt["prompt_token_ids"] == ids


@pytest.mark.parametrize("template", [None, CHATML, LLAMA, BOTH])
@pytest.mark.parametrize("final", ["Well, ", "Well", "  so "])
def test_continuing_the_final_message(
    template: str | None, final: str, tokenizer: Tokenizer, folders: dict[str, Path]
) -> None:
    messages = [USER, {"role": "assistant", "content": final}]
    given = json.dumps(messages)
    kwargs: dict[str, Any] = {"chat_template": template, "continue_final_message": True}
    text = theirs(folders["byte_level"]).apply_chat_template(messages, tokenize=False, **kwargs)
    assert render_chat(tokenizer, messages, add_generation_prompt=False, **kwargs) == text
    assert json.dumps(messages) == given


def test_continuing_a_final_message_of_parts(tokenizer: Tokenizer, folders: dict[str, Path]) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two "}]
    messages = [USER | {"content": [{"type": "text", "text": "?"}]}, {"role": "assistant", "content": parts}]
    kwargs: dict[str, Any] = {"chat_template": PARTS, "continue_final_message": True}
    text = theirs(folders["byte_level"]).apply_chat_template(messages, tokenize=False, **kwargs)
    assert render_chat(tokenizer, messages, add_generation_prompt=False, **kwargs) == text
    assert text.endswith("two ")


def test_no_final_message_to_continue(tokenizer: Tokenizer) -> None:
    def refused(messages: list[dict[str, Any]], template: str | None = None, **options: Any) -> None:
        render_chat(tokenizer, messages, chat_template=template, continue_final_message=True, **options)

    with pytest.raises(ValueError, match="cannot both be true"):
        refused(CHAT, add_generation_prompt=True)
    with pytest.raises(ValueError, match="no text to continue"):
        refused([USER, CALL], add_generation_prompt=False)
    with pytest.raises(ValueError, match="changes or drops"):
        refused(CHAT, "{{ messages[0].content }}", add_generation_prompt=False)


@pytest.mark.parametrize(
    ("template", "content", "form", "text"),
    [
        (None, ["a", {"type": "text", "text": "b"}], "auto", "a\nb"),
        (None, ["a", {"type": "input_text", "text": "b"}], "string", "a\nb"),
        (PARTS, "a", "auto", "text:a;"),
        (PARTS, "a", "openai", "text:a;"),
        (PARTS, ["a", "b"], "auto", "text:a;text:b;"),
        (BOTH, "a", "auto", "a"),
        (BOTH, "a", "openai", "[a]"),
        (BOTH, ["a", "b"], "auto", "[a][b]"),
        (BOTH, ["a", "b"], "string", "a\nb"),
    ],
)
def test_content_takes_the_form_that_the_template_expects(
    template: str | None, content: Any, form: str, text: str, tokenizer: Tokenizer
) -> None:
    rendered = render_chat(
        tokenizer,
        [{"role": "user", "content": content}],
        chat_template=template,
        chat_template_content_format=form,
        add_generation_prompt=False,
    )
    assert text in rendered.replace("</s>", "")


def test_arguments_of_tool_calls_may_be_json_text(tokenizer: Tokenizer) -> None:
    as_text = json.loads(json.dumps(CALL))
    as_text["tool_calls"][0]["function"]["arguments"] = json.dumps({"x": "é", "n": 1})
    assert render_chat(tokenizer, [USER, as_text], chat_template=CHATML) == render_chat(
        tokenizer, [USER, CALL], chat_template=CHATML
    )


def test_which_template(tokenizer: Tokenizer, tmp_path: Path) -> None:
    named = load_tokenizer(
        trained.save(
            trained.byte_level(),
            tmp_path,
            chat_template=[
                {"name": "default", "template": "D"},
                {"name": "tool_use", "template": "T"},
                {"name": "rag", "template": "R"},
            ],
        )
    )
    assert render_chat(named, CHAT) == "D"
    assert render_chat(named, CHAT, tools=[TOOL]) == "T"
    assert render_chat(named, CHAT, chat_template="rag") == "R"
    assert render_chat(named, CHAT, chat_template="{{ 1 + 1 }}") == "2"
    file = tmp_path / "mine.jinja"
    file.write_text("F{{ messages | length }}")
    assert render_chat(named, CHAT, chat_template=str(file)) == "F3"
    with pytest.raises(ValueError, match="neither a template, nor a name of one, nor a file"):
        render_chat(named, CHAT, chat_template="nothing.jinja")
    del named.chat_template["default"]  # type: ignore[union-attr, arg-type]
    with pytest.raises(ValueError, match="no default chat template; name one of rag, tool_use"):
        render_chat(named, CHAT)
    named.chat_template = None
    with pytest.raises(ValueError, match="no chat template: give one"):
        render_chat(named, CHAT)


@pytest.mark.parametrize(
    ("messages", "template", "error", "message"),
    [
        ([], None, ValueError, "empty"),
        (["hi"], None, TypeError, "must be a dict, got str"),
        (
            [{"role": 1, "content": "hi"}],
            None,
            ValueError,
            r"messages\[0\]: a message needs a 'role', a string",
        ),
        (
            [USER, {"role": "user", "content": 5}],
            None,
            ValueError,
            r"messages\[1\].content: .* text .*, got int",
        ),
        ([{"role": "user", "content": {}}], BOTH, ValueError, "text or a list of parts, got dict"),
        (
            [{"role": "user", "content": ["a", {"type": "text"}]}],
            BOTH,
            ValueError,
            "part 1: .* text is missing",
        ),
        ([{"role": "user", "content": [["a"]]}], PARTS, ValueError, "part of type 'list'"),
        ([{"role": "user", "content": [{"type": "input_audio"}]}], PARTS, ValueError, "type 'input_audio'"),
        ([{"content": "hi"}], None, ValueError, "needs a 'role'"),
        ([USER, USER], LLAMA, ValueError, "rejects the conversation: Roles must alternate"),
        ([{"role": "user"}], LLAMA, ValueError, "no attribute 'content'"),
        (CHAT, "{% for %}", ValueError, "not valid"),
        (CHAT, "{{ messages + 1 }}", ValueError, "fails on the conversation"),
        (CHAT, "{{ ''.__class__.__mro__ }}", ValueError, "rejects"),
        (CHAT, "{{ messages.append(1) }}", ValueError, "rejects"),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            None,
            ValueError,
            "part of type 'image_url'",
        ),
        ([{"role": "user", "content": object()}], None, TypeError, "plain data, not object"),
    ],
)
def test_refused_conversations(
    messages: Any, template: str | None, error: type[Exception], message: str, tokenizer: Tokenizer
) -> None:
    with pytest.raises(error, match=message):
        render_chat(tokenizer, messages, chat_template=template)


def test_options_that_are_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="must be one of auto, string, openai"):
        render_chat(tokenizer, CHAT, chat_template_content_format="parts")
    with pytest.raises(TypeError, match="a tool must be a JSON schema"):
        render_chat(tokenizer, CHAT, tools=[len])  # type: ignore[list-item]


def test_a_refusal_is_the_content_of_its_message(tokenizer: Tokenizer) -> None:
    refusals: list[dict[str, Any]] = [
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "I will not."}]},
        {"role": "assistant", "content": None, "refusal": "I will not."},
    ]
    for message in refusals:
        assert "I will not." in render_chat(tokenizer, [USER, message])
        assert "I will not." in render_chat(tokenizer, [USER, message], chat_template=BOTH)


@pytest.mark.parametrize("arguments", ["[" * 100_000, "not JSON", "", "[1]", '{"n": NaN}'])
def test_arguments_that_are_not_json_are_rendered(arguments: str, tokenizer: Tokenizer) -> None:
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
    assert "f" in render_chat(tokenizer, [USER, call], chat_template=CHATML)
    assert render_chat(tokenizer, [USER, {"role": "assistant", "tool_calls": 3}])


def test_variables_that_a_template_reads(tokenizer: Tokenizer) -> None:
    template = (
        "{% if day is not defined %}{% set day = 'today' %}{% endif %}{{ day }}"
        "{% for m in messages %}{% if thinks %}!{% endif %}{% endfor %}"
    )

    def rendered(**variables: Any) -> str:
        return render_chat(tokenizer, CHAT, chat_template=template, chat_template_kwargs=variables)

    assert rendered() == "today"
    assert rendered(day="once", thinks=True, range=3, never_read=object()) == "once!!!"
    with pytest.raises(TypeError, match="plain data"):
        rendered(day=object())
    with pytest.raises(ValueError, match="cannot set tokenize, chat_template"):
        rendered(tokenize=False, chat_template="x")


@pytest.mark.parametrize("files", [True, False])
def test_variables_that_a_template_does_not_read_are_named(
    tokenizer: Tokenizer, files: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Also by the process that renders a template from a request."""
    template, warnings = "{{ read }}{{ messages[0].content }}", []  # type: ignore[var-annotated]
    options: dict[str, Any] = {"chat_template": template, "template_files": files}
    options["chat_template_kwargs"] = {"read": 1, "enable_thinking": False}
    assert render_chat(tokenizer, CHAT, **options, on_warning=warnings.append).startswith("1")
    assert warnings == ["the chat template does not read 'enable_thinking', so they have no effect"]
    assert not caplog.records
    for _ in range(2):
        render_chat(tokenizer, CHAT, **options)
    assert len(caplog.records) <= 1  # once in a process
    assert all("does not read 'enable_thinking'" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("files", [True, False])
def test_tools_that_a_template_does_not_show_are_said(tokenizer: Tokenizer, files: bool) -> None:
    def warnings(
        template: str, messages: list[dict[str, Any]], tools: list[Any] | None, **more: Any
    ) -> list[str]:
        texts: list[str] = []
        options: dict[str, Any] = {"template_files": files, "on_warning": texts.append, **more}
        render_chat(tokenizer, messages, chat_template=template, tools=tools, **options)
        return texts

    tool = {"type": "function", "function": {"name": "get_weather"}}
    unseen = ["the chat template does not show tools, so the model does not know of them"]
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}"
    counted = "{{ tools | length }}" + plain
    assert warnings(plain, CHAT, [tool]) == unseen
    assert warnings("{% if tools is string %}{{ tools }}{% endif %}" + plain, CHAT, [tool]) == unseen
    final = {"add_generation_prompt": False, "continue_final_message": True}
    assert warnings("{{ tools[5] }}" + plain, CHAT, [tool], **final) == unseen
    assert warnings(plain, CHAT, None) == warnings(plain, CHAT, []) == warnings(counted, CHAT, [tool]) == []
    assert warnings(CHATML, CHAT, [tool]) == []


SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
DEEPSEEK = (
    "{% for m in messages %}{% if m['role'] == 'assistant' and m['content'] is none %}"
    "{% for call in m['tool_calls'] %}[{{ call['function']['name'] }}]{% endfor %}"
    "{% elif m['content'] != none %}{{ m['content'] + '.' }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("call", [CALL, {name: value for name, value in CALL.items() if name != "content"}])
@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (SMOLLM2, "user\nhi<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n<|im_start|>tool\n42<|im_end|>"),
        (DEEPSEEK, "hi.[f]42."),
        (
            "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %};{% endfor %}",
            "hi;;42;",
        ),
        (BOTH, "hi42"),
    ],
)
def test_content_that_is_null_is_empty_unless_a_template_tests_for_it(
    tokenizer: Tokenizer, template: str, expected: str, call: dict[str, Any]
) -> None:
    messages = [{"role": "user", "content": "hi"}, call, {"role": "tool", "content": "42"}]
    text = render_chat(tokenizer, messages, chat_template=template, add_generation_prompt=False)
    assert text.endswith(expected) or f"{expected}\n" in text, text
    for content_format in ("string", "openai"):
        render_chat(
            tokenizer, messages[1:2], chat_template=DEEPSEEK, chat_template_content_format=content_format
        )


PUBLISHED = [
    *sorted((Path(__file__).parents[1] / "server" / "parsing" / "templates").glob("*.jinja")),
    *sorted((Path(__file__).parents[3] / "examples" / "templates").glob("tool_*.jinja")),
]


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.stem)
def test_published_templates_take_calls_without_content(tokenizer: Tokenizer, path: Path) -> None:
    call = {**CALL["tool_calls"][0], "id": "abcdefghi"}  # type: ignore[index]
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "abcdefghi", "name": "f", "content": "42"},
    ]
    warnings: list[str] = []
    options: dict[str, Any] = {"tools": [TOOL], "on_warning": warnings.append}
    text = render_chat(tokenizer, messages, chat_template=path.read_text(), **options)
    assert "é" in text and "42" in text and "None" not in text and not warnings


def test_a_programs_tokenizer_knows_prompt_as_the_name_of_a_text(tokenizer: Tokenizer) -> None:
    theirs = EngineTokenizer(tokenizer)
    assert theirs.encode(prompt="The fox") == theirs.encode("The fox") == tokenizer.encode("The fox")
    assert theirs.encode(prompt="x", add_special_tokens=False) == tokenizer.encode("x", False)
    for given in ({}, {"text": "a", "prompt": "b"}):
        with pytest.raises(TypeError, match="one text"):
            theirs.encode(**given)


def test_template_names_from_requests_are_not_files(tokenizer: Tokenizer, tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("S")
    assert render_chat(tokenizer, CHAT, chat_template=str(file)) == "S"
    with pytest.raises(ValueError, match="neither a template"):
        render_chat(tokenizer, CHAT, chat_template=str(file), template_files=False)


def test_one_conversation_or_several() -> None:
    assert conversations_of(CHAT) == [CHAT]
    assert conversations_of([CHAT, CHAT]) == [CHAT, CHAT]
    with pytest.raises(TypeError, match="a list of messages"):
        conversations_of("hello")
    with pytest.raises(TypeError, match="a list of messages"):
        conversations_of(USER)


def test_messages_nested_too_deeply_are_refused_by_name(tokenizer: Tokenizer) -> None:
    nested: Any = "x"
    for _ in range(2000):
        nested = [nested]
    with pytest.raises(ValueError, match="nested too deeply"):
        render_chat(tokenizer, [USER | {"extra": nested}], chat_template=CHATML)
    with pytest.raises(ValueError, match="nested too deeply"):
        render_chat(tokenizer, CHAT, chat_template="{{ own }}", chat_template_kwargs={"own": nested})
