"""Templates from requests run in processes that are lost when they exceed a limit; the frontend is not."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from pagewire.frontend.text import render_process
from pagewire.frontend.text.chat_template import render_chat
from pagewire.frontend.text.render_process import render_processes
from pagewire.frontend.text.tokenizer import Tokenizer, load_tokenizer

MESSAGES = [{"role": "user", "content": "hi"}]
PLAIN = "{% for message in messages %}{{ message.content }}{% endfor %}"
SHARED = (
    "{% set n = namespace(a=[1], b=[1]) %}"
    "{% for i in range(60) %}{% set n.a = [n.a, n.a] %}{% set n.b = [n.b, n.b] %}{% endfor %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer("demo")


@pytest.fixture(autouse=True)
def limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render_process, "CPU_SECONDS", 0.25)


def rendered(tokenizer: Tokenizer, template: str, **options: Any) -> str:
    return render_chat(tokenizer, MESSAGES, chat_template=template, template_files=False, **options)


@pytest.mark.parametrize(
    "template",
    [
        SHARED + "{{ n.a == n.b }}",  # compares 2 ** 60 numbers in one operation
        SHARED + "{{ n.a | tojson }}",
        SHARED + "{{ [n.a, n.b] | sort }}",
    ],
)
def test_a_template_that_never_ends_is_ended_and_refused_at_once_when_it_comes_again(
    tokenizer: Tokenizer, template: str
) -> None:
    with pytest.raises(ValueError, match=r"fails on the conversation: it (takes|needs) more than"):
        rendered(tokenizer, template)
    server = render_processes().pid
    assert rendered(tokenizer, PLAIN) == "hi"
    with pytest.raises(ValueError, match=r"fails on the conversation: it (takes|needs) more than"):
        rendered(tokenizer, template)
    assert render_processes().pid == server is not None


def test_errors_of_templates_come_back_as_they_are(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="rejects the conversation: no"):
        rendered(tokenizer, "{{ raise_exception('no') }}")
    with pytest.raises(ValueError, match="not valid"):
        rendered(tokenizer, "{{ nope( }}")
    with pytest.raises(ValueError, match="integers of over 64 bits"):
        rendered(tokenizer, "{{ x }}", chat_template_kwargs={"x": 1 << 70})


def test_options_hold_there_too(tokenizer: Tokenizer) -> None:
    template = PLAIN + "{{ x }}{% if add_generation_prompt %}?{% endif %}"
    assert rendered(tokenizer, template, chat_template_kwargs={"x": 1}) == "hi1?"
    assert rendered(tokenizer, template, add_generation_prompt=False, continue_final_message=True) == "hi"


def test_a_lost_job_server_is_replaced(tokenizer: Tokenizer) -> None:
    assert rendered(tokenizer, PLAIN) == "hi"
    server = render_processes().pid
    assert server is not None
    os.kill(server, signal.SIGKILL)
    assert rendered(tokenizer, PLAIN) == "hi" and render_processes().pid != server
