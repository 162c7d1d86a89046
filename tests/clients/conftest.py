"""A server on the demo model, which the clients of this environment call; the server runs in the project's own."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator

import pytest

PATIENCE = 60
TEMPLATE = """\
{% if tools %}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}
{{- message.content or "" }}
{%- for call in message.tool_calls %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking %}<think>{% elif tools %}<think></think>{% endif %}{% endif %}"""
"""A template with tools and reasoning, which the demo model's own has not."""
OPTIONS = (
    *(
        "--port",
        "0",
        "--dtype",
        "float32",
        "--kv-cache-memory-bytes",
        "67108864",
        "--chat-template",
        TEMPLATE,
    ),
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3"),
)


@pytest.fixture(scope="session")
def url() -> Iterator[str]:
    """The address of the server; `SERVER_PYTHON` is the Python that has pagewire."""
    command = [os.environ["SERVER_PYTHON"], "-m", "pagewire.cli.main", "serve", "demo", *OPTIONS]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    word, _, found = process.stdout.readline().strip().partition(" ")
    assert word == "ready"
    yield found
    process.terminate()
    process.stdout.close()
    assert process.wait(PATIENCE) == 0
