"""Servers that the clients of this environment call; they run in the project's own.

`SERVER_PYTHON` is the Python that has pagewire. Elsewhere than in that environment (`make test-clients`), nothing
is collected here.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

collect_ignore_glob = [] if find_spec("schemathesis") else ["test_*.py"]
PATIENCE = 60
ROOT = Path(__file__).parents[2]
DEMO = ROOT / "pagewire" / "demo"
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
    *(
        "--enable-admin",
        "--enable-auto-tool-choice",
        "--tool-call-parser",
        "hermes",
        "--reasoning-parser",
        "qwen3",
    ),
)


def started(*command: str) -> Iterator[str]:
    """Start a server by the Python that has pagewire, and yield its address; end it afterwards."""
    process = subprocess.Popen(
        [os.environ["SERVER_PYTHON"], *command], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert process.stdout is not None
    word, _, url = process.stdout.readline().strip().partition(" ")
    assert word == "ready"
    yield url
    process.terminate()
    process.stdout.close()
    assert process.wait(PATIENCE) == 0


@pytest.fixture(scope="session")
def url() -> Iterator[str]:
    """The address of a server on the demo model."""
    yield from started("-m", "pagewire.cli.main", "serve", "demo", *OPTIONS)


@pytest.fixture(scope="session")
def pooled() -> Iterator[str]:
    """The address of a server of embeddings, made of the demo model."""
    options = ("--port", "0", "--dtype", "float32", "--convert", "embed", "--enable-admin")
    yield from started("-m", "pagewire.cli.main", "serve", "demo", *options)


@pytest.fixture(scope="session")
def pulling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server whose models are pulled from a hub on loopback (`pulling_server.py`)."""
    cache = str(tmp_path_factory.mktemp("pulled"))
    options = ("--port", "0", "--dtype", "float32", "--kv-cache-memory-bytes", "67108864")
    yield from started("-m", "tests.clients.pulling_server", cache, str(DEMO), *options)


@pytest.fixture(scope="session")
def hearing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server that transcribes."""
    yield from started("-m", "tests.clients.hearing_server", str(tmp_path_factory.mktemp("whisper")))


@pytest.fixture(scope="session")
def scripted() -> Iterator[str]:
    """The address of a server whose model follows the script of a conversation (`scripts.py`).

    It has no option but the template, which is the model's: it finds the formats of calls and reasoning itself.
    """
    yield from started("-m", "tests.clients.scripted_server", str(DEMO), TEMPLATE)
