"""lm-evaluation-harness by its two model types for servers; it tokenizes at the server (/tokenizer_info)."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import openai
import pytest
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

ROWS = [
    {"question": 'The "with" statement is used to', "choices": ["wrap", "bake"], "answer": 0},
    {"question": 'The "for" statement is used to', "choices": ["iterate", "swim"], "answer": 0},
]
CHOICE = """\
task: choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list: [{{metric: acc}}]
"""
WRITING = """\
task: writing
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: ""
generation_kwargs: {{max_gen_toks: 8, until: ["\\n\\n"], temperature: 0}}
metric_list: [{{metric: exact_match}}]
"""


@pytest.fixture
def tasks(tmp_path: Path) -> Any:
    """Two tasks whose data are a file."""
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    for name, text in (("choice", CHOICE), ("writing", WRITING)):
        (tmp_path / f"{name}.yaml").write_text(text.format(file=file))
    return TaskManager(include_path=str(tmp_path), include_defaults=False)


def samples_of(kind: str, url: str, task: str, tasks: Any, **more: Any) -> list[Any]:
    """The samples of a task, evaluated on a server."""
    arguments: Any = {"model": "demo", "base_url": url, "max_retries": 1, "num_concurrent": 2}
    result: Any = simple_evaluate(
        kind, arguments, tasks=[task], task_manager=tasks, log_samples=True, bootstrap_iters=0, **more
    )
    return sorted(result["samples"][task], key=lambda sample: sample["doc_id"])


def test_local_completions(url: str, tasks: Any) -> None:
    client = openai.OpenAI(base_url=url + "/v1", api_key="none")
    choices = samples_of("local-completions", url + "/v1/completions", "choice", tasks)
    for row, sample in zip(ROWS, choices, strict=True):
        for choice, ((given, _),) in zip(row["choices"], sample["resps"], strict=True):
            text = f"{row['question']} {choice}"
            echoed: Any = client.completions.create(
                model="demo", prompt=text, echo=True, max_tokens=1, logprobs=1, temperature=0
            )
            logprobs: Any = echoed.choices[0].logprobs
            behind = [
                value
                for value, offset in zip(logprobs.token_logprobs[:-1], logprobs.text_offset, strict=False)
                if offset >= len(str(row["question"]))
            ]
            assert math.isclose(float(given), sum(behind), abs_tol=1e-3)
    for sample in samples_of("local-completions", url + "/v1/completions", "writing", tasks):
        (text,) = sample["resps"][0]
        asked = client.completions.create(
            model="demo", prompt=sample["doc"]["question"], max_tokens=8, temperature=0, stop=["\n\n"]
        )
        assert text == asked.choices[0].text


def test_local_chat_completions(url: str, tasks: Any) -> None:
    client = openai.OpenAI(base_url=url + "/v1", api_key="none")
    found = samples_of(
        "local-chat-completions", url + "/v1/chat/completions", "writing", tasks, apply_chat_template=True
    )
    for sample in found:
        messages: Any = [{"role": "user", "content": sample["doc"]["question"]}]
        asked = client.chat.completions.create(
            model="demo", messages=messages, max_tokens=8, temperature=0, stop=["\n\n"]
        )
        assert sample["resps"][0] == [asked.choices[0].message.content]
