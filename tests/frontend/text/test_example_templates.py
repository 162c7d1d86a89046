"""The chat templates in `examples/templates` write what their models were trained on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pagewire.frontend.server.parsing.detection import reply_formats
from pagewire.frontend.text.conversation import compile_template

TEMPLATES = Path(__file__).parents[3] / "examples" / "templates"
SYSTEM, QUESTION, ANSWER, MORE = "Be brief.", "What is a list?", "A sequence.", "And a set?"
TOOL: Any = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
CALL: Any = {"id": "call_0123456789abc", "type": "function"}
CALL["function"] = {"name": "get_weather", "arguments": {"city": "Oslo"}}
TEXTS = {
    "chatml": (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is a list?<|im_end|>\n"
        "<|im_start|>assistant\nA sequence.<|im_end|>\n<|im_start|>user\nAnd a set?<|im_end|>\n"
        "<|im_start|>assistant\n"
    ),
    "alpaca": (
        "Be brief.\n\n### Instruction:\nWhat is a list?\n\n### Response:\nA sequence.</s>\n\n"
        "### Instruction:\nAnd a set?\n\n### Response:\n"
    ),
    "falcon_180b": (
        "System: Be brief.\nUser: What is a list?\nFalcon: A sequence.\nUser: And a set?\nFalcon:"
    ),
    "llama2": (
        "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nWhat is a list? [/INST] A sequence. </s>"
        "<s>[INST] And a set? [/INST]"
    ),
    "vicuna": "Be brief. USER: What is a list? ASSISTANT: A sequence.</s>USER: And a set? ASSISTANT:",
    "tool_hermes": (
        "<s><|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhat is a list?<|im_end|>\n"
        "<|im_start|>assistant\nA sequence.<|im_end|>\n<|im_start|>user\nAnd a set?<|im_end|>\n"
        "<|im_start|>assistant\n"
    ),
    "tool_mistral": ("<s>[INST] What is a list?[/INST] A sequence.</s>[INST] Be brief.\n\nAnd a set?[/INST]"),
}
TEXTS["tool_mistral_parallel"] = TEXTS["tool_mistral"]  # without tools
MISTRAL = (
    '<s>[AVAILABLE_TOOLS] [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": '
    '"object"}}}][/AVAILABLE_TOOLS][INST] What is a list?[/INST][TOOL_CALLS] [{"name": "get_weather", "arguments": '
    '{"city": "Oslo"}, "id": "456789abc"}]</s>[TOOL_RESULTS] {"content": "It rains.", "call_id": "456789abc"}'
    "[/TOOL_RESULTS]"
)
HERMES = (
    '<|im_start|>user\nWhat is a list?<|im_end|>\n<|im_start|>assistant\n<tool_call>\n{"name": "get_weather", '
    '"arguments": {"city": "Oslo"}}\n</tool_call><|im_end|>\n<|im_start|>tool\n<tool_response>\nIt rains.\n'
    "</tool_response>\n<|im_end|>\n<|im_start|>assistant\n"
)


def rendered(name: str, messages: list[Any], **variables: Any) -> str:
    """What a template of the folder writes."""
    template = compile_template((TEMPLATES / f"{name}.jinja").read_text())
    named = {"bos_token": "<s>", "eos_token": "</s>", "add_generation_prompt": True}
    text: str = template.render(messages=messages, **named | variables)
    return text


def test_each_template_is_here() -> None:
    assert {path.stem for path in TEMPLATES.iterdir()} == set(TEXTS)


@pytest.mark.parametrize("name", TEXTS)
def test_conversations(name: str) -> None:
    turns = [("system", SYSTEM), ("user", QUESTION), ("assistant", ANSWER), ("user", MORE)]
    messages = [{"role": role, "content": content} for role, content in turns]
    assert rendered(name, messages) == TEXTS[name]
    short = rendered(name, messages[1:2])
    assert QUESTION in short and SYSTEM not in short


@pytest.mark.parametrize(
    ("name", "dialect", "end"),
    [
        ("tool_hermes", "hermes", HERMES),
        ("tool_mistral", "mistral", MISTRAL),
        ("tool_mistral_parallel", "mistral", ""),
    ],
)
def test_tools(name: str, dialect: str, end: str) -> None:
    messages: list[Any] = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": CALL["id"], "content": "It rains."},
    ]
    text = rendered(name, messages, tools=[TOOL])
    assert json.dumps(TOOL) in text and text.endswith(end)
    source = (TEMPLATES / f"{name}.jinja").read_text()
    assert reply_formats(source, "LlamaForCausalLM", tools=None, reasoning=None, auto=None).tools == dialect
    if name == "tool_mistral_parallel":
        assert "in one list" in text and text.endswith(MISTRAL.rpartition("[/INST]")[2])
